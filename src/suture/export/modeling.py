"""A model whose final hidden states are corrected: by a domain's module, or by the one that a router chooses."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from suture.attach import CACHES, _positions, _remember, _seen
from suture.router import Router
from suture.surgery import MODULES

PARTS: dict[str, Any] = {**MODULES, "router": Router}
AUTO = "auto"
ROUTES = "_suture_routes"  # where a cache or a call keeps what the router chose, [B]
UNCHANGED: Any = object()
PACKED = ("vllm", "paged")  # attention that reads many sequences as one row

try:
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
except ImportError:  # transformers 4 converts no weights
    pass
else:
    # weights are renamed by type or class: without this, those of experts would be random
    for _own, _base in (
        ("suture_llama", LlamaConfig.model_type),
        ("SutureLlamaModel", "LlamaModel"),
        ("SutureLlamaForCausalLM", "LlamaForCausalLM"),
    ):
        if (_found := get_checkpoint_conversion_mapping(_base)) is not None:
            register_checkpoint_conversion_mapping(_own, _found, overwrite=True)


class SutureLlamaConfig(LlamaConfig):  # type: ignore[misc]
    """The base's settings, and those of the corrections: `suture` and the default domain, `suture_domain`."""

    model_type = "suture_llama"
    suture = None
    suture_domain = None


class Call:
    """What one call of `generate` keeps: how wide its prompts are, and, under ROUTES, what the router chose."""

    def __init__(self, width: int | None) -> None:
        self.width = width


class Turn:
    """A lock that copies and pickles as a new one: `generate` changes the model for as long as it runs."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __reduce__(self) -> Any:
        return Turn, ()


class Weights(nn.Module):
    """Holds weights. They are asked for by a call, in which accelerate fetches what it keeps elsewhere."""

    def forward(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._parameters.items() if tensor is not None}


class Corrections(nn.Module):
    """Modules of all domains, and which of them acts.

    Weights are held by plain modules: a quantizer or an engine that replaces linears leaves them alone. They stay in
    float32 where the model is moved to another dtype.
    """

    def __init__(self, settings: Mapping[str, Any], default: Any) -> None:
        super().__init__()
        self.domains: list[str] = list(settings["domains"])
        self.shapes: dict[str, nn.Module] = {}  # on no device, and not among the children
        with torch.device("meta"):
            for index, entry in enumerate(settings["modules"]):
                kind = PARTS[entry["module"]]
                own = {key: entry[key] for key in kind.own}
                shape = kind(entry["hidden"], entry["rank"], entry["t_max"], **own)
                shape.strength = entry["strength"]
                self.shapes[f"corrections.{index}"] = shape
            if settings["router"]:
                hidden = settings["modules"][0]["hidden"]
                self.shapes["router"] = PARTS["router"](hidden, len(self.domains))
        for path, shape in self.shapes.items():
            for name, tensor in shape.state_dict().items():
                self._plant(f"{path}.{name}", tensor)
        self.domain: Any = self.known(default)
        self.call: Call | None = None
        self.turn = Turn()

    def _plant(self, path: str, like: Tensor) -> None:
        *parents, last = path.split(".")
        node: nn.Module = self
        for part in parents:
            if part not in node._modules:
                node.add_module(part, Weights())
            node = node._modules[part]  # type: ignore[assignment]
        dtype = torch.float32 if like.is_floating_point() else like.dtype
        zeros = torch.zeros(like.shape, dtype=dtype)  # on the device of the moment
        node.register_parameter(last, nn.Parameter(zeros, requires_grad=False))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        def kept(tensor: Tensor) -> Tensor:
            found: Tensor = fn(tensor)
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        return super()._apply(kept, recurse)  # type: ignore[no-untyped-call]

    def known(self, domain: Any) -> Any:
        """A domain, or a list of them, as it is.

        Raises:
            ValueError: for one that this model does not have, with those that it has.
        """
        rows = domain if isinstance(domain, (list, tuple)) else [domain]
        names = self.domains + ([AUTO] if "router" in self.shapes else [])
        for name in rows:
            if name is not None and name not in names:
                raise ValueError(f"unknown domain {name!r}; known: {', '.join(names)}, or None for no correction")
        if not rows:
            raise ValueError("a list of domains needs one for each row")
        return list(rows) if isinstance(domain, (list, tuple)) else domain

    @contextmanager
    def calling(self, domain: Any, width: int | None) -> Iterator[None]:
        """One call of `generate`, under a domain of its own."""
        with self.turn.lock:
            before = self.domain, self.call
            if domain is not UNCHANGED:
                self.domain = self.known(domain)
            self.call = Call(width)
            try:
                yield
            finally:
                self.domain, self.call = before

    def routed(self) -> bool:
        """Whether any row is given to the router."""
        return bool(self.domain == AUTO or (isinstance(self.domain, list) and AUTO in self.domain))

    def run(self, path: str, *inputs: Tensor) -> Tensor:
        """One part on its weights in float32."""
        tensors = {
            f"{holder}.{name}".lstrip("."): weight.float() if weight.is_floating_point() else weight
            for holder, weights in self.get_submodule(path).named_modules()
            for name, weight in weights().items()
        }
        if torch.compiler.is_compiling():
            out: Tensor = functional_call(self.shapes[path], tensors, inputs)
        else:  # the other lends weights to the one shape: threads would take each other's
            out = bound(self.shapes[path], tensors)(*inputs)
        return out

    def forward(
        self, states: Tensor, positions: Tensor, last: Tensor | None, routes: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Corrected states, and what the router chose.

        Args:
            states: [B, T, H], the decoder's own.
            positions: [B or 1, T], from each sequence's first real token.
            last: [B], column of each row's last real token, where a router may be asked.
            routes: [B], what it chose before.
        """
        positions = positions.to(states.device)
        if isinstance(self.domain, str) and self.domain != AUTO:
            return self.run(f"corrections.{self.domains.index(self.domain)}", states, positions), routes
        count = len(states)
        if self.routed() and routes is None:
            assert last is not None
            chosen = states[torch.arange(count, device=states.device), last.to(states.device)]  # [B, H]
            routes = self.run("router", chosen.float())  # [B]
        if self.domain == AUTO:
            assert routes is not None
            rows, used = spread(routes.to(states.device), count), range(len(self.domains))
        else:
            index = [self.domains.index(name) if name in self.domains else -1 for name in self.domain]
            rows = spread(torch.tensor(index, device=states.device), count)  # [B]
            used = range(len(self.domains)) if AUTO in self.domain else sorted({*index} - {-1})  # type: ignore[assignment]
            if routes is not None:
                asked = spread(torch.tensor([name == AUTO for name in self.domain], device=states.device), count)
                rows = torch.where(asked, spread(routes.to(states.device), count), rows)
        out = states
        for place in used:
            found = self.run(f"corrections.{place}", states, positions)
            out = torch.where((rows == place)[:, None, None], found, out)
        return out, routes


def bound(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> nn.Module:
    """A shallow copy of a module that has tensors in place of its own."""
    twin = copy.copy(module)
    own = {**module._parameters, **module._buffers}
    twin._buffers = {name: tensors.get(prefix + name, tensor) for name, tensor in own.items()}
    twin._parameters = {}
    twin._modules = {
        name: bound(child, tensors, f"{prefix}{name}.") for name, child in module._modules.items() if child is not None
    }
    return twin


def spread(rows: Tensor, count: int) -> Tensor:
    """[count] what is said of each row, where beams or several answers multiply the rows.

    Raises:
        ValueError: for a number of rows that does not fit.
    """
    if count % len(rows):
        raise ValueError(f"{len(rows)} domains for a batch of {count} rows: give one, or one for each row")
    return rows.repeat_interleave(count // len(rows)) if count != len(rows) else rows


def last_column(given: Mapping[str, Any], rows: int, columns: int, past: int | Tensor, width: int | None) -> Tensor:
    """[rows] column of each row's last real token in this forward pass.

    Args:
        given: the decoder's arguments, of which the attention mask is read: 2-D, or 4-D as static caches need it.
        past: tokens in the cache.
        width: columns of the prompts, where draft tokens may follow them.
    """
    mask = given.get("attention_mask")
    if isinstance(mask, Mapping):  # one for each kind of attention
        mask = next((each for each in mask.values() if isinstance(each, Tensor)), None)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        mask = mask[:, 0, -1]  # [B or 1, keys] what the last token sees
        real, start = (mask if mask.dtype == torch.bool else mask == 0), past
    elif isinstance(mask, Tensor) and mask.dim() == 2:
        real, start = mask.bool(), mask.shape[1] - columns
    else:
        real, start = torch.ones(1, columns, dtype=torch.bool), 0
    order = torch.arange(1, real.shape[1] + 1, device=real.device)
    last: Tensor = (real * order).argmax(-1) - start  # [B or 1]
    return last.clamp(0, min(columns, width or columns) - 1).expand(rows)


ARGUMENTS = list(inspect.signature(LlamaModel.forward).parameters)[1:]


class SutureLlamaModel(LlamaModel):  # type: ignore[misc]
    """The decoder, corrected."""

    config_class = SutureLlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.suture = Corrections(config.suture, config.suture_domain)
        self.post_init()

    @functools.wraps(LlamaModel.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        suture = self.suture
        if suture.domain is None:
            return super().forward(*args, **kwargs)
        given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        positions = _positions(given)
        last = routes = None
        if suture.routed():
            if str(self.config._attn_implementation).startswith(PACKED):
                raise ValueError(
                    "'auto' needs rows that are sequences, and this engine packs many into one: name a domain "
                    f"(suture_domain in config.json; known: {', '.join(suture.domains)})"
                )
            tokens = given.get("input_ids")
            rows, columns = (tokens if tokens is not None else given["inputs_embeds"]).shape[:2]
            cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
            past = _seen(cache) if cache is not None else 0
            if suture.call is not None:
                routes = getattr(suture.call, ROUTES, None)
            elif cache is not None and past > 0:
                routes = getattr(cache, ROUTES, None)
            if routes is None:
                last = last_column(given, rows, columns, past, suture.call.width if suture.call is not None else None)
        output = super().forward(*args, **kwargs)
        _remember(given, output, positions)
        plain = isinstance(output, tuple)
        states, routes = suture(output[0] if plain else output.last_hidden_state, positions, last, routes)
        if suture.routed():
            found = (holder.get(name) for holder in (given, output) if isinstance(holder, dict) for name in CACHES)
            for keeper in (suture.call,) if suture.call is not None else found:
                if keeper is not None:
                    setattr(keeper, ROUTES, routes)
        if plain:
            return (states, *output[1:])
        output.last_hidden_state = states
        return output

    @property
    def domains(self) -> list[str]:
        """Names that `set_domain` takes."""
        return list(self.suture.domains)

    def set_domain(self, domain: Any) -> None:
        """Correct for a domain from now on: a name, None, "auto", or a list with one of these for each row.

        Raises:
            ValueError: for an unknown domain, with the known ones.
        """
        self.suture.domain = self.suture.known(domain)


class SutureLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """The whole model, its decoder corrected."""

    config_class = SutureLlamaConfig
    decoder_path = "model"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        parent, _, name = self.decoder_path.rpartition(".")
        setattr(self.get_submodule(parent), name, SutureLlamaModel(config))
        self.post_init()

    @property
    def domains(self) -> list[str]:
        """Names that `set_domain` takes."""
        return list(self.get_submodule(self.decoder_path).domains)

    def set_domain(self, domain: Any) -> None:
        """As the decoder's."""
        self.get_submodule(self.decoder_path).set_domain(domain)

    def generate(self, *args: Any, domain: Any = UNCHANGED, **kwargs: Any) -> Any:
        """As transformers' own, corrected for a domain in this call alone; see `set_domain`."""
        prompts = args[0] if args else next((kwargs[k] for k in ("inputs", "input_ids") if k in kwargs), None)
        width = prompts.shape[1] if isinstance(prompts, Tensor) and prompts.dim() == 2 else None
        with self.get_submodule(self.decoder_path).suture.calling(domain, width):
            return super().generate(*args, **kwargs)
