"""Baseline at equal size: a LoRA on the merged model, trained by gradients to the target's distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from suture.capture import pad_right
from suture.errors import SurgeryError
from suture.losses import Batch, Decode, kl
from suture.models import Head, decoder_of
from suture.progress import SILENT, Progress
from suture.repair.patch import Change, Patch
from suture.states import HiddenCache


def distil(
    model: Any,
    names: Sequence[str],
    target: HiddenCache,
    decode_target: Decode,
    *,
    rank: int,
    steps: int,
    lr: float,
    batch: int,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress = SILENT,
    stage: str = "distil",
) -> tuple[Patch, list[float]]:
    """A low-rank change of some linears, trained by Adam on KL(target || model) over whole texts.

    Args:
        names: paths of the linears.
        target: the target's states on the calibration text.
        decode_target: the target's head.
        rank, steps, lr, batch, seed: as in a recipe; `batch` is sequences a step.

    Returns:
        (the patch, the loss of each step). The model's weights are as they were.

    Raises:
        SurgeryError: when the loss is no longer finite.
    """
    path, decoder = decoder_of(model)
    head = Head(model, path)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    added = {name: _Added(model.get_submodule(name), rank, generator) for name in names}
    optimiser = torch.optim.Adam([weight for each in added.values() for weight in each.parameters()], lr=lr)
    sequences = target.tokens.sequences
    wanted = torch.split(target.states, target.tokens.lengths.tolist())
    queue: list[int] = []
    losses: list[float] = []
    try:
        with torch.enable_grad(), progress.stage(stage, steps) as advance:
            for _ in range(steps):
                while len(queue) < batch:
                    queue += torch.randperm(len(sequences), generator=generator).tolist()
                chosen, queue = queue[:batch], queue[batch:]
                ids = pad_right([sequences[index] for index in chosen]).to(device)  # [B, T]
                states = decoder(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, H]
                flat = torch.cat([states[row, : len(sequences[index])] for row, index in enumerate(chosen)])  # [n, H]
                reference = torch.cat([wanted[index] for index in chosen]).to(device)  # [n, H]
                loss = kl(flat, Batch(reference, None, head.differentiable, decode_target))
                optimiser.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                losses.append(float(loss.detach()))
                if not losses[-1] < float("inf"):
                    raise SurgeryError(f"distillation diverged at step {len(losses)} of {steps}: lower lr ({lr:g})")
                advance(1)
    finally:
        for each in added.values():
            each.hook.remove()
    changes = {name: each.change(dtype) for name, each in added.items()}
    flipped = {name for name in names if not isinstance(model.get_submodule(name), nn.Linear)}
    return Patch(changes, frozenset(flipped)), losses


class _Added(nn.Module):
    """up(down(a)) added to a linear's output while it trains; up starts at zero."""

    def __init__(self, linear: Any, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = linear.weight.shape
        out, width = (rows, columns) if isinstance(linear, nn.Linear) else (columns, rows)
        start = torch.randn(rank, width, generator=generator) / width**0.5
        self.down = nn.Parameter(start.to(linear.weight.device))  # [r, in]
        self.up = nn.Parameter(torch.zeros(out, rank, device=linear.weight.device))  # [out, r]
        self.hook = linear.register_forward_hook(self._add)

    def _add(self, _: Any, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return out + (given[0].float() @ self.down.T @ self.up.T).to(out.dtype)

    def change(self, dtype: torch.dtype) -> Change:
        return Change(self.up.detach().to("cpu", dtype), self.down.detach().to("cpu", dtype))
