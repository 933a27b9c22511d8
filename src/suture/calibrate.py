"""Calibration: cached states of a merged model and of a target → a trained surgery module. No language model is loaded.

Adam with betas (0.9, 0.999) in float32, a minibatch of whole prompts a step, flat over their tokens: padding does not
exist here, so none is computed. Where a module's loss has a closed form, it is solved instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from suture.bias import bias, reduction
from suture.errors import SurgeryError
from suture.losses import NEED_ENTROPY, NEED_HEADS, Batch, Decode, get_loss
from suture.progress import SILENT, Progress
from suture.ridge import Moments, cross_validate
from suture.states import HiddenCache, check_pair
from suture.surgery import Affine, Surgery, make_surgery


@dataclass(frozen=True)
class Calibration:
    """A trained module with its history.

    Attributes:
        surgery: the module, rounded to the dtype it is stored in and back to float32.
        losses: one value a step.
        rho_calibration, rho_heldout: L1 reduction (Eq. 7); held-out is None where no such states were given.
        seconds: of the training loop, or of solving.
        details: what else is worth keeping: `rank` and, where it was cross-validated, `ridge` and `ridge_errors`.
    """

    surgery: Surgery
    losses: list[float]
    rho_calibration: float
    rho_heldout: float | None
    seconds: float
    details: dict[str, Any]


def calibrate(
    merged: HiddenCache,
    target: HiddenCache,
    *,
    module: str = "darts",
    loss: str = "ewl1",
    rank: int = 16,
    t_max: int = 512,
    steps: int = 500,
    lr: float = 1e-3,
    batch: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    heldout: tuple[HiddenCache, HiddenCache] | None = None,
    decode: Decode | None = None,
    decode_target: Decode | None = None,
    device: torch.device | None = None,
    progress: Progress = SILENT,
    stage: str = "calibrate",
) -> Calibration:
    """Train one module on one domain. The same seed on the same machine gives the same bytes.

    Args:
        merged, target: states of both models on the same calibration tokens; the target's with entropies for `ewl1`.
        module, loss, rank, t_max, steps, lr, batch, seed: as in the recipe; the defaults are the paper's.
        dtype: what the module is rounded to at the end, as it will be stored.
        heldout: (merged, target) states to measure rho on; they are never trained on.
        decode, decode_target: heads of the merged model and of the target, for the losses `kl` and `ce`.
        device: where to train; by default where the states are.

    Raises:
        SurgeryError: for an unknown module or loss, states that do not match, entropies or heads that are missing, or
            a loss that is no longer finite.
    """
    get_loss(loss)
    check_pair(merged, target)
    if loss in NEED_ENTROPY and target.entropy is None:
        raise SurgeryError(f"loss {loss} needs the target's entropies: capture the target with entropy=True")
    if loss in NEED_HEADS and (decode is None or decode_target is None):
        raise SurgeryError(f"loss {loss} needs the heads of the merged model and of the target")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        surgery = make_surgery(module, merged.states.shape[-1], rank, t_max)
    place = device or merged.states.device
    solved = loss in surgery.solved_by
    if solved and place.type == "mps":  # has no float64
        place = torch.device("cpu")
    given, wanted = merged.to(place), target.to(place)
    history: list[float] = []
    began = time.monotonic()
    if solved:
        surgery, details = _solve(given, wanted, loss, rank, progress, stage)
    else:
        heads = Heads(decode, decode_target)
        history = _train(surgery.to(place), given, wanted, loss, heads, steps, lr, batch, seed, progress, stage)
        details = {"rank": rank}
    seconds = time.monotonic() - began
    surgery.to("cpu").eval().requires_grad_(False)
    for tensor in surgery.state_dict().values():
        tensor.copy_(tensor.to(dtype).float())  # what is measured is what is stored
    return Calibration(
        surgery,
        history,
        rho(surgery, merged, target),
        rho(surgery, *heldout) if heldout is not None else None,
        seconds,
        details,
    )


@dataclass(frozen=True)
class Heads:
    """Heads of the merged model and of the target, for losses that read logits."""

    merged: Decode | None
    target: Decode | None


def _train(
    surgery: Surgery,
    merged: HiddenCache,
    target: HiddenCache,
    loss: str,
    heads: Heads,
    steps: int,
    lr: float,
    batch: int,
    seed: int,
    progress: Progress,
    stage: str,
) -> list[float]:
    """Adam on minibatches of whole prompts; the loss of each step."""
    function = get_loss(loss)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(surgery.parameters(), lr=lr, betas=(0.9, 0.999))
    given, wanted = merged.states.float(), target.states.float()  # [N, H] each
    positions = merged.tokens.positions.to(given.device)  # [N]
    spans = torch.split(torch.arange(len(given), device=given.device), merged.tokens.lengths.tolist())
    queue: list[int] = []
    history: list[Tensor] = []
    with progress.stage(stage, steps) as advance:
        for _ in range(steps):
            while len(queue) < batch:
                queue += torch.randperm(len(spans), generator=generator).tolist()
            chosen, queue = queue[:batch], queue[batch:]
            rows = torch.cat([spans[index] for index in chosen])  # [n] tokens of these prompts
            corrected = surgery(given[rows], positions[rows])  # [n, H]
            weights = target.entropy[rows] if target.entropy is not None else None
            value = function(corrected, Batch(wanted[rows], weights, heads.merged, heads.target))
            optimiser.zero_grad(set_to_none=True)
            value.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            history.append(value.detach())
            advance(1)
    curve = torch.stack(history)
    if not bool(torch.isfinite(curve).all()):
        step = int((~torch.isfinite(curve)).nonzero()[0, 0])
        raise SurgeryError(f"training by {loss} diverged at step {step + 1} of {steps}: lower surgery.lr ({lr:g})")
    return [float(value) for value in curve]


def _solve(
    merged: HiddenCache, target: HiddenCache, loss: str, rank: int, progress: Progress, stage: str
) -> tuple[Surgery, dict[str, Any]]:
    """The affine map nearest to h - h*, its ridge chosen by cross-validation over prompts.

    A map of rank r needs more than r tokens: with fewer the rank is lowered, and `details` says to what.
    """
    lengths = merged.tokens.lengths.tolist()
    rank = max(1, min(rank, len(merged.states) - 1, merged.states.shape[-1]))
    entropy = target.entropy if loss in NEED_ENTROPY else None
    weights = torch.split(entropy, lengths) if entropy is not None else [None] * len(lengths)
    prompts = []
    with progress.stage(stage, len(lengths)) as advance:
        for one, two, weight in zip(
            torch.split(merged.states, lengths), torch.split(target.states, lengths), weights, strict=True
        ):
            prompts.append(Moments.of(one, one.double() - two.double(), weight))
            advance(1)
        choice = cross_validate(prompts, rank)
    found = choice.solution
    errors = {f"{ridge:g}": error for ridge, error in choice.errors.items()}
    details = {"rank": rank, "ridge": choice.ridge, "ridge_errors": errors}
    return Affine.of(found.down.float(), found.up.float(), found.offset.float()), details


def rho_rows(cache: HiddenCache) -> Tensor:
    """[n] indices of the states that rho is about: those that write responses, or all where there are none."""
    return torch.arange(len(cache.states)) if cache.tokens.prompts_only else cache.scored()[0]


@torch.inference_mode()
def rho(surgery: Surgery, merged: HiddenCache, target: HiddenCache) -> float:
    """L1 reduction of a module (Eq. 7) on the states that write responses, or on all where there are none."""
    check_pair(merged, target)
    rows = rho_rows(merged)
    states, wanted, positions = merged.states[rows], target.states[rows], merged.tokens.positions[rows]  # [n, H], [n]
    return reduction(bias(states, wanted), bias(surgery(states, positions), wanted))
