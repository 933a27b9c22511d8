"""Representation bias: how far the merged model's states are from a target's, where, and where it matters.

Equation numbers are those of arXiv 2608.28547.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from suture.states import HiddenCache, check_pair

EARLY = (0, 50)  # positions of Figure 1's comparison, ends excluded
LATE = (100, 256)


def bias(states: Tensor, target: Tensor) -> Tensor:
    """[N] delta_t = ||h_t - h*_t||_1 / H (Eq. 2), from [N, H] states of the merged model and of the target."""
    return (states.float() - target.float()).abs().mean(-1)


def reduction(before: Tensor, after: Tensor) -> float:
    """rho_L1 = 1 - sum(delta after) / sum(delta before) (Eq. 7); 0 where there was no bias to begin with."""
    total = float(before.double().sum())
    return 1.0 - float(after.double().sum()) / total if total > 0 else 0.0


@dataclass(frozen=True)
class BiasReport:
    """Bias of one domain.

    Attributes:
        delta: [N] bias of each token.
        sample: [N] which sequence each token is in.
        position: [N] its position there.
        entropy: [N] the target's entropy there in nats, or None.
        sensitivity: rows of Figure 2: what a perturbation of one size does where entropy is low and where it is high.
    """

    delta: Tensor
    sample: Tensor
    position: Tensor
    entropy: Tensor | None
    sensitivity: list[dict[str, float]]

    def heat_map(self) -> Tensor:
        """[S, T] bias by sample and position, NaN behind each sequence's end (Figure 1)."""
        grid = torch.full((int(self.sample.max()) + 1, int(self.position.max()) + 1), torch.nan)
        grid[self.sample, self.position] = self.delta
        return grid

    def curve(self) -> dict[str, Tensor]:
        """Mean, standard deviation and count of the bias at each position, [T] each."""
        size = int(self.position.max()) + 1
        zeros = torch.zeros(size, dtype=torch.float64)
        count = zeros.index_add(0, self.position, torch.ones_like(self.delta, dtype=torch.float64))
        mean = zeros.index_add(0, self.position, self.delta.double()) / count.clamp_min(1)
        square = zeros.index_add(0, self.position, (self.delta.double() - mean[self.position]) ** 2)
        spread = (square / (count - 1).clamp_min(1)).sqrt()
        return {"position": torch.arange(size), "mean": mean, "std": spread, "count": count.long()}

    def span(self, first: int, end: int) -> float | None:
        """Mean bias of tokens at positions in [first, end); None where there are none."""
        chosen = self.delta[(self.position >= first) & (self.position < end)]
        return float(chosen.mean()) if len(chosen) else None

    def summary(self) -> dict[str, Any]:
        """The figures of §3.3 and the counts behind them.

        `slope` is that of a line through all tokens but the first ones, per 100 positions and relative to the mean;
        None where no text has 100 positions.
        """
        early, late = self.span(*EARLY), self.span(*LATE)
        mean = float(self.delta.mean())
        slope = self._slope()
        return {
            "tokens": len(self.delta),
            "samples": int(self.sample.max()) + 1,
            "mean": mean,
            "first": self.span(0, 1),
            "early": early,
            "late": late,
            "late_tokens": int(((self.position >= LATE[0]) & (self.position < LATE[1])).sum()),
            "late_over_early": late / early if early and late is not None else None,
            "slope": 100 * slope / mean if mean and slope is not None else None,
            "mean_entropy": float(self.entropy.mean()) if self.entropy is not None else None,
            "sensitivity": self.sensitivity,
        }

    def _slope(self) -> float | None:
        """Least squares, per position. The first token has its own bias, often a small one, and is left out."""
        if int(self.position.max()) < LATE[0]:
            return None
        position, delta = self.position[self.position > 0].double(), self.delta[self.position > 0].double()
        centred = position - position.mean()
        return float((centred @ delta) / (centred @ centred))

    def columns(self) -> dict[str, list[Any]]:
        """One row a token: sample, position, delta and, where known, entropy."""
        found: dict[str, list[Any]] = {
            "sample": self.sample.tolist(),
            "position": self.position.tolist(),
            "delta": self.delta.tolist(),
        }
        if self.entropy is not None:
            found["entropy"] = self.entropy.tolist()
        return found


def measure_bias(
    merged: HiddenCache,
    target: HiddenCache,
    decode: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
) -> BiasReport:
    """The bias report of one domain.

    Args:
        merged, target: states of both models on the same tokens.
        decode: the target's head; with it and the target's entropies, Figure 2's perturbations are tried too.

    Raises:
        SurgeryError: for states on different tokens or of different width.
    """
    check_pair(merged, target)
    delta = bias(merged.states, target.states)
    rows: list[dict[str, float]] = []
    if target.entropy is not None and decode is not None:
        rows = perturb(target.states, target.entropy, decode, float(delta.mean()), seed)
    sample = torch.arange(len(target.tokens)).repeat_interleave(target.tokens.lengths)
    return BiasReport(delta, sample, target.tokens.positions, target.entropy, rows)


@torch.inference_mode()
def perturb(
    target: Tensor,
    entropy: Tensor,
    decode: Callable[[Tensor], Tensor],
    size: float,
    seed: int = 0,
    per_group: int = 128,
) -> list[dict[str, float]]:
    """What a random perturbation of one size does where the target is sure and where it is not (Figure 2).

    Tokens are grouped into quarters by entropy; in each, states get a Gaussian direction scaled to a mean absolute
    value of `size` (that of the measured bias, ||d||_1 / H).

    Returns:
        A row a quarter: mean entropy, KL(p || p perturbed) in nats, share of changed argmax, tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.argsort(entropy, stable=True)
    rows = []
    for group, members in enumerate(order.chunk(4)):
        chosen = members[torch.randperm(len(members), generator=generator)[:per_group]]
        if not len(chosen):
            continue
        states = target[chosen].float()  # [n, H]
        noise = torch.randn(states.shape, generator=generator)
        noise *= size / noise.abs().mean(-1, keepdim=True)
        clean = torch.log_softmax(decode(states), -1)  # [n, V]
        moved = torch.log_softmax(decode(states + noise), -1)
        rows.append(
            {
                "quarter": float(group + 1),
                "entropy": float(entropy[chosen].mean()),
                "kl": float((clean.exp() * (clean - moved)).sum(-1).mean()),
                "flipped": float((clean.argmax(-1) != moved.argmax(-1)).float().mean()),
                "tokens": float(len(chosen)),
            }
        )
    return rows
