"""One pass through a decoder's layers: all tokens go through one layer before any goes through the next.

Repair inside the layers stands on it: a layer can be changed when the states that enter it are final, and what is
measured of a layer needs the memory of one layer. No layer's arithmetic is written here: each is called as its model
would call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from suture.capture import BATCH_TOKENS, batches, pad_right
from suture.errors import AttachError
from suture.models import decoder_of
from suture.states import Tokens
from suture.wiring import Wiring, Writer, trace


@dataclass
class Batch:
    """Sequences that go through the layers together, padded on the right."""

    rows: Tensor  # [n] where its real tokens lie among all tokens
    real: Tensor  # [B, T] whether a token is real
    states: Tensor  # [B, T, H] what enters the next layer
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)  # a layer's other arguments

    def flat(self, values: Tensor) -> Tensor:
        """[B, T, W] → [n, W]: the real tokens, in the order of `rows`."""
        return values[self.real]


class _Stop(Exception):
    """Ends a layer's forward when what was wanted of it is there."""


def blocks_of(model: Any) -> tuple[str, nn.ModuleList]:
    """Path and list of a decoder's layers.

    Raises:
        AttachError: for a decoder that keeps its layers in a way that suture does not know.
    """
    path, decoder = decoder_of(model)
    count = model.config.get_text_config().num_hidden_layers
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return f"{path}.{name}", module
    raise AttachError(f"{type(model).__name__} keeps its {count} layers in a way that suture does not know")


class Layers:
    """A frozen model's layers, each with the linears that write to its residual stream.

    Raises:
        AttachError: for a model whose layers cannot be called one by one.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        _, self.decoder = decoder_of(model)
        self.path, self.blocks = blocks_of(model)
        self.device = next(model.parameters()).device
        probe = self._begin(Tokens.of([[1, 2, 3, 4]]), BATCH_TOKENS)
        with torch.inference_mode():
            found = [self._trace(index, probe[0]) for index in range(len(self.blocks))]
        self.writers = [wiring.writers for wiring in found]
        self.readers = [wiring.readers for wiring in found]
        self.closed = [wiring.closed for wiring in found]

    def _trace(self, index: int, batch: Batch) -> Wiring:
        """A layer's linears, seen on a short text, which leaves the layer then."""

        def call(states: Tensor) -> Tensor:
            return self.call(index, replace(batch, states=states))

        found = trace(self.blocks[index], f"{self.path}.{index}", batch.states, call)
        batch.states = self.call(index, batch)
        return found

    def linears(self, only: Sequence[str] = ()) -> dict[str, Any]:
        """path → module of every linear that each token passes, by last names where some are given."""
        found: dict[str, Any] = {}
        for writers, readers in zip(self.writers, self.readers, strict=True):
            for place, segment in enumerate(readers):
                found |= {path: module for group in segment for path, module in group}
                found |= {writer.name: writer.linear for writer in writers[place : place + 1]}
        return {path: module for path, module in found.items() if not only or path.rsplit(".", 1)[-1] in only}

    def left_alone(self) -> list[str]:
        """Matrices of the layers that are no such linear, each once: fused experts, or what few tokens pass."""
        known = {id(module.weight) for module in self.linears().values()}
        names = [
            name
            for block in self.blocks
            for name, weight in block.named_parameters()
            if weight.dim() > 1 and id(weight) not in known
        ]
        return list(dict.fromkeys(names))

    def __len__(self) -> int:
        return len(self.blocks)

    @torch.inference_mode()
    def begin(self, tokens: Tokens, batch_tokens: int = BATCH_TOKENS) -> list[Batch]:
        """All tokens, embedded, before the first layer."""
        return self._begin(tokens, batch_tokens)

    @torch.inference_mode()
    def _begin(self, tokens: Tokens, batch_tokens: int) -> list[Batch]:
        found: list[Batch] = []
        spans = torch.split(torch.arange(len(tokens.ids)), tokens.lengths.tolist())
        sequences = tokens.sequences
        for indices in batches(tokens.lengths, batch_tokens):
            ids = pad_right([sequences[index] for index in indices]).to(self.device)  # [B, T]
            lengths = tokens.lengths[indices].to(self.device)
            real = torch.arange(ids.shape[1], device=self.device) < lengths[:, None]  # [B, T]
            batch = Batch(torch.cat([spans[index] for index in indices]), real, torch.empty(0))
            with self._instead(functools.partial(_record, batch)):
                self.decoder(input_ids=ids, use_cache=False)
            if len(batch.calls) != len(self.blocks):
                raise AttachError(f"{type(self.model).__name__} does not call each of its layers once")
            found.append(batch)
        return found

    @contextmanager
    def _instead(self, replacement: Callable[[int, Tensor, tuple[Any, ...], dict[str, Any]], Tensor]) -> Iterator[None]:
        """Let something else stand where the layers are; it gets a layer's index, states and other arguments."""

        def forward(index: int, tupled: bool) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                states = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
                out = replacement(index, states, args[1:], kwargs)
                return (out, None) if tupled else out

            return call

        before = [block.__dict__.get("forward") for block in self.blocks]
        tupled = self._tupled
        try:
            for index, block in enumerate(self.blocks):
                block.forward = forward(index, tupled)
            yield
        finally:
            for block, kept in zip(self.blocks, before, strict=True):
                if kept is None:
                    del block.forward
                else:
                    block.forward = kept

    @property
    def _tupled(self) -> bool:
        """Whether a layer returns a tuple: seen once, on a short text."""
        if not hasattr(self, "_returns_tuple"):
            seen: list[bool] = []
            hook = self.blocks[0].register_forward_hook(lambda _, __, out: seen.append(isinstance(out, tuple)))
            try:
                with torch.inference_mode():
                    self.decoder(input_ids=torch.arange(1, 3, device=self.device)[None], use_cache=False)
            finally:
                hook.remove()
            self._returns_tuple = seen[0]
        return self._returns_tuple

    @torch.inference_mode()
    def call(self, index: int, batch: Batch) -> Tensor:
        """[B, T, H] what a layer makes of a batch."""
        args, kwargs = batch.calls[index]
        out = self.blocks[index](batch.states, *args, **kwargs)
        states: Tensor = out[0] if isinstance(out, tuple) else out
        return states

    @torch.inference_mode()
    def finish(self, batches: list[Batch], total: int) -> Tensor:
        """[N, H] final states, after the norm, of batches that have gone through all layers."""
        joined: Tensor | None = None
        last = len(self.blocks) - 1
        for batch in batches:
            with self._instead(functools.partial(_play, last, batch.states)):
                ids = torch.zeros(batch.real.shape, dtype=torch.long, device=self.device)
                out = self.decoder(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, H]
            rows = batch.flat(out).cpu()  # [n, H]
            if joined is None:
                joined = rows.new_empty(total, rows.shape[-1])
            joined[batch.rows] = rows
        assert joined is not None
        return joined

    @torch.inference_mode()
    def tap(self, index: int, batch: Batch, writers: Sequence[Writer], *, whole: bool) -> Tapped:
        """Run a layer and keep what enters and leaves some of its writers.

        Args:
            whole: run the layer to its end; else stop behind the last of these writers.
        """
        found = Tapped()
        hooks = []
        for place, writer in enumerate(writers):

            def keep(_: Any, given: tuple[Tensor, ...], out: Tensor, stop: bool = place + 1 == len(writers)) -> None:
                found.inputs.append(given[0])
                # some layers add to what a linear gave in place (Falcon)
                found.outputs.append(out.clone() if whole else out)
                if stop and not whole:
                    raise _Stop

            hooks.append(writer.linear.register_forward_hook(keep))
        try:
            found.out = self.call(index, batch)
        except _Stop:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return found

    @torch.inference_mode()
    def entering(self, index: int, batch: Batch, linear: Any) -> Tensor:
        """[n, in] what enters a linear, for the real tokens; the layer's forward stops there."""
        found: list[Tensor] = []

        def stop(_: Any, given: tuple[Tensor, ...]) -> None:
            found.append(given[0])
            raise _Stop

        hook = linear.register_forward_pre_hook(stop)
        try:
            self.call(index, batch)
        except _Stop:
            pass
        finally:
            hook.remove()
        return batch.flat(found[0].reshape(*batch.real.shape, -1))


def _play(last: int, final: Tensor, index: int, states: Tensor, args: Any, kwargs: Any) -> Tensor:
    """Stands where the layers are: the last one gives states that are known, the others hand theirs on."""
    return final if index == last else states


def _record(kept: Batch, index: int, states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Stands where the layers are: notes how each is called, and hands the states on."""
    if index == 0:
        kept.states = states
    kept.calls.append((args, kwargs))
    return states


@dataclass
class Tapped:
    """What a layer did to one batch: [B, T, in] and [B, T, out] of each writer; [B, T, H] where it ran to its end."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    out: Tensor | None = None

    def residual(self, batch: Batch, writers: Sequence[Writer]) -> Tensor:
        """[n, H] the residual stream behind the last of the writers, for the real tokens."""
        total = batch.flat(batch.states)
        for writer, out in zip(writers, self.outputs, strict=False):
            total = total + writer.scale * batch.flat(out.reshape(*batch.states.shape[:2], -1))
        return total
