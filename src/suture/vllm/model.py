"""vLLM's own model classes with the corrections behind them, and what vLLM has to be told about such a model."""

from __future__ import annotations

import functools
import json
import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from suture.router import Router
from suture.surgery import Surgery, make_surgery
from suture.vllm.slots import DOMAINS, KEY, Slots, index_of

MARK = ".suture."  # in the name of each tensor of the corrections
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_SLOTS: dict[int, Slots] = {}  # by the id of a live VllmConfig: its batch and its model share nothing else


class Corrections(nn.Module):
    """The surgery of each domain and the router of a checkpoint, in float32 whatever the model's dtype.

    Args:
        settings: `suture` of the checkpoint's config.json.
        hidden: H.
    """

    def __init__(self, settings: dict[str, Any], hidden: int) -> None:
        super().__init__()
        self.corrections = nn.ModuleList(_surgery(each) for each in settings["modules"])
        self.router: nn.Module | None = None
        if settings.get("router"):
            self.router = Router(hidden, len(settings["domains"]))
        self.float()

    def forward(self, states: Tensor, positions: Tensor, index: Tensor) -> Tensor:
        """[T, H] states, each corrected by the module that [T] `index` says; a negative one leaves it as it is."""
        corrected = states
        # every module sees every token: a loop over those in use would be frozen into a captured graph
        for place, surgery in enumerate(self.corrections):
            corrected = torch.where((index == place).unsqueeze(-1), surgery(states, positions), corrected)
        return corrected


def _surgery(settings: dict[str, Any]) -> Surgery:
    own = {key: settings[key] for key in ("waves",) if key in settings}
    module = make_surgery(settings["module"], settings["hidden"], settings["rank"], settings["t_max"], **own)
    module.strength = float(settings.get("strength", 1.0))
    return module


def corrected_class(base: type, name: str, home: str) -> type:
    """A subclass of one of vLLM's causal models that corrects what its forward returns.

    Args:
        name: of the class.
        home: the module where processes that vLLM starts find it by that name.
    """

    @functools.wraps(base.__init__)  # type: ignore[misc]
    def __init__(self: Any, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        base.__init__(self, vllm_config=vllm_config, prefix=prefix, **kwargs)  # type: ignore[misc]
        config = vllm_config.model_config.hf_config
        if id(vllm_config) not in _SLOTS:
            raise RuntimeError("suture: this vLLM runs the model without logits processors, which carry the domains")
        self.suture = Corrections(config.suture, config.hidden_size)
        self.suture.requires_grad_(False)
        self.suture_slots = _SLOTS[id(vllm_config)]

    forward_of_base = base.forward  # type: ignore[attr-defined]

    @functools.wraps(forward_of_base)
    def forward(self: Any, input_ids: Any, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        states = forward_of_base(self, input_ids, positions, *args, **kwargs)
        starts = _starts()
        # none: vLLM measures memory or warms up; no tensor: another pipeline stage goes on with it
        if starts is None or not isinstance(states, Tensor):
            return states
        index = self.suture_slots.of_tokens(states, positions, starts, self.suture.router)
        return self.suture(states, positions, index)

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own: dict[str, Tensor] = {}

        def others() -> Iterator[tuple[str, Tensor]]:
            for key, tensor in weights:
                if MARK in key:
                    own[key.partition(MARK)[2]] = tensor
                else:
                    yield key, tensor

        loaded = base.load_weights(self, others())  # type: ignore[attr-defined]
        self.suture.load_state_dict(own)
        return set(loaded or ()) | {f"suture.{key}" for key in own}

    members = {"__init__": __init__, "forward": forward, "load_weights": load_weights, "__module__": home}
    return type(name, (base,), members)


def _starts() -> Tensor | None:
    """[n + 1] where each request's tokens start in this step, from the attention's metadata; None in a dry run.

    Raises:
        RuntimeError: for an attention backend that does not say.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    found = get_forward_context().attn_metadata if is_forward_context_available() else None
    if not found:
        return None
    if not isinstance(found, dict):
        raise RuntimeError("suture: vLLM splits its batch in two here (dual batch overlap): switch that off")
    for metadata in found.values():
        starts = getattr(metadata, "query_start_loc", None)
        if isinstance(starts, Tensor):
            return starts
    kinds = ", ".join(sorted({type(metadata).__name__ for metadata in found.values()}))
    raise RuntimeError(f"suture: {kinds} does not say where requests start: choose another attention backend")


def domains_class(name: str, known: dict[str, Any], home: str) -> type:
    """A logits processor that changes no logits: vLLM tells these, and nothing else, what a request's parameters are.

    Args:
        known: domains, router.
    """
    from vllm.v1.sample.logits_processor import LogitsProcessor

    @classmethod  # type: ignore[misc]
    def validate_params(cls: Any, sampling_params: Any) -> None:
        index_of((sampling_params.extra_args or {}).get(KEY), known["domains"], known["router"])

    def __init__(self: Any, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        default = getattr(vllm_config.model_config.hf_config, KEY, None)
        size = vllm_config.scheduler_config.max_num_seqs
        self.slots = Slots(size, known["domains"], default, known["router"], device)
        if id(vllm_config) not in _SLOTS:
            weakref.finalize(vllm_config, _SLOTS.pop, id(vllm_config), None)
        _SLOTS[id(vllm_config)] = self.slots

    def update_state(self: Any, batch_update: Any) -> None:
        if batch_update is not None:
            self.slots.update(batch_update.removed, batch_update.added, batch_update.moved)

    members = {
        "__init__": __init__,
        "__module__": home,
        "validate_params": validate_params,
        "update_state": update_state,
        "apply": lambda self, logits: logits,
        "is_argmax_invariant": lambda self: True,
    }
    return type(name, (LogitsProcessor,), members)


def checking_class(base: type, home: str) -> type:
    """What vLLM asks about a configuration before it starts: refuse what would go wrong silently, name the processor.

    Args:
        base: what it would ask for the architecture without corrections.
    """

    def verify_and_update_model_config(model_config: Any) -> None:
        base.verify_and_update_model_config(model_config)  # type: ignore[attr-defined]
        # V2, vLLM's choice on GPUs, tells no model which request a token is of; asked for here, before it is chosen
        os.environ.setdefault(RUNNER, "0")

    def verify_and_update_config(vllm_config: Any) -> None:
        base.verify_and_update_config(vllm_config)  # type: ignore[attr-defined]
        model = vllm_config.model_config
        settings = model.hf_config.suture
        if settings.get("format") != 1:
            raise ValueError(f"suture in config.json has format {settings.get('format')}, not 1: use a newer suture")
        router = bool(settings.get("router"))
        index_of(getattr(model.hf_config, KEY, None), settings["domains"], router)
        if model.runner_type == "pooling":
            raise ValueError("suture: corrected models write text; vLLM's pooling runner does not carry domains")
        if vllm_config.speculative_config is not None:
            raise ValueError("suture: vLLM does not carry domains through speculative decoding: switch it off")
        if vllm_config.use_v2_model_runner:
            raise ValueError(f"suture: model runner V2 does not carry domains: set {RUNNER}=0")
        if settings.get("base_model_type") == "gemma2" and model.dtype == torch.float16:
            raise ValueError("suture: Gemma 2 overflows in float16: use --dtype bfloat16 or float32")
        if router and model.enable_prompt_embeds:
            raise ValueError("suture: a router needs prompts as tokens: switch prompt embeddings off")
        known = json.dumps({"domains": settings["domains"], "router": router}).encode().hex()
        model.logits_processors = [*(model.logits_processors or ()), f"{home}:{DOMAINS}{known}"]

    members = {
        "verify_and_update_model_config": staticmethod(verify_and_update_model_config),
        "verify_and_update_config": staticmethod(verify_and_update_config),
        "__module__": home,
    }
    return type("SutureChecks", (base,), members)
