"""Baselines at equal size: what is nearest to target - merged at low rank, in the weights or in what the weights do.

Without data the distance is that of the weights, ||D - D_r||_F (an extracted LoRA). With data it is that of the outputs
on the merged model's own inputs, ||A (D - D_r)^T||_F: the same in the metric of the Gram matrix of what enters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from suture.layers import Layers
from suture.repair.patch import Change, Patch
from suture.ridge import truncated
from suture.states import Tokens


@torch.inference_mode()
def svd_patch(
    layers: Layers,
    target: Callable[[str], Tensor | None],
    budget: int,
    *,
    tokens: Tokens | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Patch:
    """Low-rank changes of all linears towards the target's weights, of one rank throughout.

    Args:
        target: path of a linear → its weight in the target; None leaves it alone.
        budget: numbers that the patch may hold; at least rank 1 is made.
        tokens: text for the metric of the outputs; None for that of the weights.
    """
    found = list(layers.linears().items())
    cost = sum(sum(module.weight.shape) for _, module in found)
    rank = max(1, budget // cost)
    grams = _grams(layers, tokens) if tokens is not None else {}
    changes, transposed = {}, set()
    for name, module in found:
        flipped = type(module).__name__ == "Conv1D"
        wanted = target(name)
        if wanted is None or wanted.shape != module.weight.shape:
            continue
        delta = (wanted.to(module.weight.device).float() - module.weight.float()).double()
        if flipped:
            delta = delta.T
            transposed.add(name)
        # outputs D a: with G = L L^T the error is ||(D - D_r) L||_F
        root = _root(grams[name]) if name in grams else None
        r = min(rank, *delta.shape)
        u, s, v = truncated(delta @ root if root is not None else delta, r)
        down = v.T  # [r, in]
        if root is not None:
            down = torch.linalg.solve_triangular(root, down, upper=False, left=False)
        changes[name] = Change((u * s).to("cpu", dtype), down.to("cpu", dtype))
    return Patch(changes, frozenset(transposed))


def _root(gram: Tensor) -> Tensor:
    """[in, in] lower Cholesky factor of a Gram matrix that may be singular."""
    level = gram.diagonal().mean().clamp_min(1e-30)
    factor: Tensor = torch.linalg.cholesky(gram + 1e-4 * level * torch.eye(len(gram)).to(gram))
    return factor


def _grams(layers: Layers, tokens: Tokens) -> dict[str, Tensor]:
    """[in, in] sums of a a^T of what enters each linear of the merged model."""
    grams: dict[str, Tensor] = {}
    batches = layers.begin(tokens)
    names = {id(module): name for name, module in layers.linears().items()}
    for index, block in enumerate(layers.blocks):
        for batch in batches:
            hooks = []
            for module in block.modules():
                if id(module) not in names:
                    continue

                def count(_: Any, given: tuple[Tensor, ...], name: str = names[id(module)]) -> None:
                    if given[0].numel() // given[0].shape[-1] != batch.real.numel():  # noqa: B023
                        return  # an expert of its own sees some tokens only
                    a = batch.flat(given[0].reshape(*batch.real.shape, -1)).float()  # noqa: B023
                    gram = (a.T @ a).double()
                    grams[name] = grams[name] + gram if name in grams else gram

                hooks.append(module.register_forward_pre_hook(count))
            try:
                batch.states = layers.call(index, batch)
            finally:
                for hook in hooks:
                    hook.remove()
    return grams
