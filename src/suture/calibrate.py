"""Calibration: cached states of a merged model and of a target → a trained surgery module. No language model is loaded.

A module is trained, or solved where its loss has a closed form.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from suture.bias import bias, reduction
from suture.errors import SurgeryError, did_you_mean
from suture.losses import NEED_ENTROPY, NEED_HEADS, Decode, entropy_weights, get_loss
from suture.progress import SILENT, Progress
from suture.ridge import Moments, cross_validate
from suture.states import HiddenCache, check_pair
from suture.surgery import MODULES, Affine, Surgery, make_surgery
from suture.table import Prior, median_table
from suture.training import Criterion, EarlyStopping, Heads, Text, train


@dataclass(frozen=True)
class Calibration:
    """A trained module with its history.

    Attributes:
        surgery: the module, rounded to the dtype it is stored in and back to float32.
        losses: one value a step.
        rho_calibration, rho_heldout: L1 reduction (Eq. 7); held-out is None where no such states were given.
        seconds: of the training loop, or of solving.
        details: what else is worth keeping: `rank`; where it was cross-validated, `ridge` and `ridge_errors`; with
            early stopping `best_step`, and `validation_losses` by step.
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
    waves: int = 8,
    steps: int = 500,
    lr: float = 1e-3,
    batch: int = 8,
    seed: int = 0,
    smooth: float = 0.0,
    shrink: float = 0.0,
    start: str = "zero",
    entropy_power: float = 1.0,
    entropy_floor: float = 0.0,
    early_stopping: bool = False,
    validation: tuple[HiddenCache, HiddenCache] | None = None,
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
        module, loss, rank, t_max, waves, steps, lr, batch, seed: as in the recipe; the defaults are the paper's. Where
            a module extrapolates, T_max is lowered to the longest text: its term is constant past what it has seen.
        smooth, shrink: weights of squared differences between neighbouring rows of the position table, and of its
            squares, scaled as in `suture.table`: alike for any width, number of tokens, length and T_max; 0 is off.
        start: `zero`, or `median`: the table starts as what minimises L1 and prior without the content term, tokens
            weighted by entropy for `ewl1` and `ewl2`.
        entropy_power, entropy_floor: those two losses weight a token by max(entropy, floor) ^ power; the floor in nats.
        early_stopping: keep the weights with the least loss on `validation`, those before the first step included.
        validation: (merged, target) states to measure that loss on; they are never trained on. What is solved in
            closed form has no steps to choose from, and needs none.
        dtype: what the module is rounded to at the end, as it will be stored.
        heldout: (merged, target) states to measure rho on; they are never trained on.
        decode, decode_target: heads of the merged model and of the target, for the losses `kl` and `ce`.
        device: where to train; by default where the states are.

    Raises:
        SurgeryError: for an unknown module, loss or start, a number out of range, states that do not match, entropies,
            heads or validation states that are missing, settings of a position table for a module without one, or a
            loss that is no longer finite.
    """
    get_loss(loss)
    check_table(module, smooth, shrink, start)
    if not 0 <= entropy_power < math.inf or not 0 <= entropy_floor < math.inf:
        raise SurgeryError(f"entropy_power ({entropy_power:g}) and entropy_floor ({entropy_floor:g}) must be 0 or more")
    _check_states(merged, target, loss)
    if loss in NEED_HEADS and (decode is None or decode_target is None):
        raise SurgeryError(f"loss {loss} needs the heads of the merged model and of the target")
    if module in MODULES and MODULES[module].extrapolates:
        t_max = min(t_max, int(merged.tokens.lengths.max()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        surgery = make_surgery(module, merged.states.shape[-1], rank, t_max, waves)
    place = device or merged.states.device
    solved = loss in surgery.solved_by
    if early_stopping and not solved:
        if validation is None:
            raise SurgeryError(
                "early_stopping needs prompts that are held back: give validation=(merged, target), states on prompts "
                "that are neither trained nor scored on, or leave early_stopping out"
            )
        _check_states(*validation, loss)
    if solved and place.type == "mps":  # has no float64
        place = torch.device("cpu")
    given, wanted = merged.to(place), target.to(place)
    criterion = Criterion(loss, Heads(decode, decode_target), entropy_power, entropy_floor)
    history: list[float] = []
    began = time.monotonic()
    if solved:
        surgery, details = _solve(MODULES[module], given, wanted, criterion, rank, progress, stage)
    else:
        details = {"rank": rank}
        if start == "median":
            _start_at_medians(surgery, merged, target, criterion, smooth, shrink)
        prior = Prior.of(smooth, shrink, merged.tokens.positions, t_max, place) if smooth or shrink else None
        stopping = None
        if early_stopping and validation is not None:
            stopping = EarlyStopping(Text(validation[0].to(place), validation[1].to(place), criterion), steps)
        history = train(
            surgery.to(place),
            Text(given, wanted, criterion),
            steps=steps,
            lr=lr,
            batch=batch,
            seed=seed,
            prior=prior,
            stopping=stopping,
            progress=progress,
            stage=stage,
        )
        if stopping is not None:
            losses = {str(step): value for step, value in stopping.losses.items()}
            details |= {"best_step": stopping.best, "validation_losses": losses}
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


def check_table(module: str, smooth: float = 0.0, shrink: float = 0.0, start: str = "zero") -> None:
    """Refuse settings of a position table for a module that has none that is subtracted as it is.

    Raises:
        SurgeryError: for such a module, a negative weight, or an unknown start.
    """
    if start not in ("zero", "median"):
        raise SurgeryError(f"unknown start {start!r}; {did_you_mean(start, ('zero', 'median'))}")
    if not 0 <= smooth < math.inf or not 0 <= shrink < math.inf:
        raise SurgeryError(f"smooth ({smooth:g}) and shrink ({shrink:g}) are weights of a penalty: give 0 or more")
    if (smooth or shrink or start != "zero") and module in MODULES and not MODULES[module].offset_table:
        fit = ", ".join(name for name, kind in MODULES.items() if kind.offset_table)
        raise SurgeryError(
            f"smooth, shrink and start are about a table of offsets by position, which {module} does not have: "
            f"leave them out, or take a module that has one ({fit})"
        )


def _check_states(merged: HiddenCache, target: HiddenCache, loss: str) -> None:
    check_pair(merged, target)
    if loss in NEED_ENTROPY and target.entropy is None:
        raise SurgeryError(f"loss {loss} needs the target's entropies: capture the target with entropy=True")


def _weights(target: HiddenCache, criterion: Criterion) -> Tensor | None:
    """[N] weights of the tokens in a closed form, or None where all count alike."""
    if criterion.loss not in NEED_ENTROPY or target.entropy is None:
        return None
    return entropy_weights(target.entropy, criterion.entropy_power, criterion.entropy_floor)


@torch.no_grad()
def _start_at_medians(
    surgery: Surgery, merged: HiddenCache, target: HiddenCache, criterion: Criterion, smooth: float, shrink: float
) -> None:
    """Set the table to what minimises weighted L1 and prior without content; on the CPU, where sums have one order."""
    merged, target = merged.to(torch.device("cpu")), target.to(torch.device("cpu"))
    residuals = merged.states.float() - target.states.float()  # [N, H]
    weights = _weights(target, criterion)  # [N]
    table = median_table(residuals, merged.tokens.positions, weights, surgery.t_max, smooth, shrink)
    surgery.offsets().copy_(table)


def _solve(
    kind: type[Surgery],
    merged: HiddenCache,
    target: HiddenCache,
    criterion: Criterion,
    rank: int,
    progress: Progress,
    stage: str,
) -> tuple[Surgery, dict[str, Any]]:
    """The affine or linear map nearest to h - h*, its ridge chosen by cross-validation over prompts.

    A map of rank r needs more than r tokens: with fewer the rank is lowered, and `details` says to what.
    """
    lengths = merged.tokens.lengths.tolist()
    rank = max(1, min(rank, len(merged.states) - 1, merged.states.shape[-1]))
    whole = _weights(target, criterion)  # [N]
    weights = torch.split(whole, lengths) if whole is not None else [None] * len(lengths)
    prompts = []
    with progress.stage(stage, len(lengths)) as advance:
        for one, two, weight in zip(
            torch.split(merged.states, lengths), torch.split(target.states, lengths), weights, strict=True
        ):
            prompts.append(Moments.of(one, one.double() - two.double(), weight))
            advance(1)
        assert issubclass(kind, Affine)
        choice = cross_validate(prompts, rank, offset=kind.offset)
    found = choice.solution
    errors = {f"{ridge:g}": error for ridge, error in choice.errors.items()}
    details = {"rank": rank, "ridge": choice.ridge, "ridge_errors": errors}
    return kind.of(found.down.float(), found.up.float(), found.offset.float()), details


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
