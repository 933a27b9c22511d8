"""Which linears of a layer write to the residual stream, and which read what: seen by calling it, not by names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[[Tensor], Tensor]  # [B, T, H] states → what a layer makes of them
Group = list[tuple[str, Any]]  # (path, linear) of those that read one tensor


@dataclass(frozen=True)
class Writer:
    """A linear whose output is added to the residual stream: `o_proj`, `down_proj` and their like.

    Attributes:
        name: path in the model, for example `model.layers.3.mlp.down_proj`.
        linear: the module.
        scale: what its output is multiplied by before it is added (1 in most architectures).
    """

    name: str
    linear: Any
    scale: float


@dataclass(frozen=True)
class Wiring:
    """The linears of one layer that every token passes once.

    Attributes:
        writers: in the order they are called.
        readers: the others, before each writer and behind the last, grouped by the tensor they read.
        closed: whether what leaves the layer is the residual stream behind the last writer.
    """

    writers: list[Writer]
    readers: list[list[Group]]
    closed: bool


@dataclass(frozen=True)
class _Seen:
    path: str
    linear: Any
    entered: Tensor
    left: Tensor  # a copy: some layers add to it in place


def trace(block: nn.Module, path: str, states: Tensor, call: Call) -> Wiring:
    """Find the linears of a layer.

    A test output is given to each candidate, with those of all others at zero: what comes out of the layer must move by
    the test output itself, times one number. Its size differs by token, which a norm would undo.

    Args:
        block: the layer.
        path: of the layer in the model.
        states: [B, T, H] of a short text, without padding.
        call: runs the layer.
    """
    seen, plain = _watched(block, path, states, call)
    width = states.shape[-1]
    candidates = [each for each in seen if shape_of(each.linear)[1] == width]
    # small states: beside those of an attention sink half precision would lose the test output
    small = states / states.abs().amax(-1, keepdim=True).clamp_min(1e-6)
    test = torch.randn(plain.shape, generator=torch.Generator().manual_seed(0))  # [B, T, H]
    test = (test * 2.0 ** torch.arange(test.shape[1])[:, None]).to(plain)
    writers = []
    for each in candidates:
        others = [other for other in _wide(block, width) if other is not each.linear]
        # what mixes experts has no linear to silence: there the whole part of the layer is
        parts = [part for part in block.children() if not _holds(part, each.linear) and _mixes(part)]
        for silent in (others, others + parts):
            scale = _scale(small, call, each.linear, silent, test)
            if scale is not None:
                writers.append(Writer(each.path, each.linear, scale))
                break
    total = states.float()
    for each in candidates:
        for writer in writers:
            if writer.linear is each.linear:
                total = total + writer.scale * each.left.reshape(states.shape).float()
    allowed = 1e-4 * float(plain.abs().max())
    closed = bool(torch.allclose(total, plain.float(), rtol=1e-3, atol=allowed))
    return Wiring(writers, _grouped(seen, [writer.linear for writer in writers]), closed)


def _watched(block: nn.Module, path: str, states: Tensor, call: Call) -> tuple[list[_Seen], Tensor]:
    """(linears that the layer calls once, with all tokens, in order; what leaves the layer)."""
    seen: list[_Seen] = []
    hooks = []
    for name, module in block.named_modules():
        if is_linear(module) and module.weight.is_floating_point():

            def note(own: Any, given: tuple[Tensor, ...], out: Tensor, name: str = name) -> None:
                seen.append(_Seen(f"{path}.{name}", own, given[0], out.clone()))

            hooks.append(module.register_forward_hook(note))
    try:
        plain = call(states)
    finally:
        for hook in hooks:
            hook.remove()
    paths = [each.path for each in seen]
    tokens = states.shape[0] * states.shape[1]
    # an expert sees some of the tokens, and no token may have come to it here
    whole = [each for each in seen if each.entered.numel() // each.entered.shape[-1] == tokens]
    return [each for each in whole if paths.count(each.path) == 1], plain


def _scale(states: Tensor, call: Call, module: Any, silent: Sequence[Any], test: Tensor) -> float | None:
    """What a linear's output is multiplied by on its way into the residual; None where it does more than add."""
    results = []
    for value in (torch.zeros_like(test), test):
        hooks = [other.register_forward_hook(_silenced) for other in silent]
        hooks.append(module.register_forward_hook(lambda _, __, out, value=value: value.reshape(out.shape)))
        try:
            results.append(call(states))
        finally:
            for hook in hooks:
                hook.remove()
    response, given = (results[1] - results[0]).float(), test.float()  # [B, T, H]
    scale = float((response * given).sum() / (given**2).sum())
    left = (response - scale * given).norm(dim=-1) / given.norm(dim=-1)  # [B, T] what is not explained
    exact = test.dtype == torch.float32
    if abs(scale) > 1e-6 and float(left.max()) <= (1e-3 if exact else 3e-2) * abs(scale):
        # nearly all add their output as it is: half precision only blurs it
        return 1.0 if abs(scale - 1) < 5e-3 else round(scale, 4 if exact else 3)
    return None


def _grouped(seen: Sequence[_Seen], writers: Sequence[Any]) -> list[list[Group]]:
    segments: list[list[Group]] = [[]]
    before: Tensor | None = None
    for each in seen:
        if any(each.linear is writer for writer in writers):
            segments.append([])
            before = None
        elif before is not None and before is each.entered:
            segments[-1][-1].append((each.path, each.linear))
        else:
            segments[-1].append([(each.path, each.linear)])
            before = each.entered
    return segments


def _wide(block: nn.Module, width: int) -> list[Any]:
    """Every linear of a layer that gives H numbers, experts included."""
    return [module for module in block.modules() if is_linear(module) and shape_of(module)[1] == width]


def _silenced(module: Any, given: Any, out: Any) -> Any:
    """A forward hook: zeros in place of what a module gives."""
    if isinstance(out, tuple):
        return (torch.zeros_like(out[0]), *out[1:])
    return torch.zeros_like(out)


def _holds(part: nn.Module, module: Any) -> bool:
    return any(each is module for each in part.modules())


def _mixes(part: nn.Module) -> bool:
    """Whether a part of a layer has matrices: norms have none."""
    return any(parameter.dim() > 1 for parameter in part.parameters())


def is_linear(module: Any) -> bool:
    """Whether a module is a plain linear, GPT-2's kind included."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def shape_of(linear: Any) -> tuple[int, int]:
    """(in, out) of a linear; GPT-2 stores its weights [in, out]."""
    rows, columns = linear.weight.shape
    return (columns, rows) if isinstance(linear, nn.Linear) else (rows, columns)
