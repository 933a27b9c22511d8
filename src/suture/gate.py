"""Do no harm: a correction's strength, chosen by KL to the target on calibration prompts that nobody trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from suture.losses import Decode, shared_rows
from suture.states import HiddenCache
from suture.surgery import Surgery

STRENGTHS = (0.25, 0.5, 0.75, 1.0)
SHARE = 0.2  # of the calibration prompts that are held back
ROWS = 256  # states whose logits exist at one time


def held_back(samples: int) -> int:
    """How many of so many calibration prompts are held back: a fifth, one at least, never all."""
    return 0 if samples < 2 else max(1, round(SHARE * samples))


@dataclass(frozen=True)
class Gate:
    """What was chosen on held-back prompts.

    Attributes:
        strength: what the correction is multiplied by; 0 where it does not help.
        kl: strength → mean KL to the target in nats, 0 (uncorrected) included.
        error: standard error, over prompts, of what the chosen strength gains.
        prompts: how many prompts that rests on.
    """

    strength: float
    kl: dict[float, float]
    error: float
    prompts: int

    def row(self) -> dict[str, Any]:
        """As plain data."""
        kl = {f"{strength:g}": value for strength, value in self.kl.items()}
        return {"strength": self.strength, "kl": kl, "error": self.error, "prompts": self.prompts}


@torch.inference_mode()
def divergence(states: Tensor, wanted: Tensor, decode: Decode, decode_target: Decode) -> Tensor:
    """[n] KL(target || model) in nats at each of [n, H] states, on token ids that both vocabularies have."""
    found = []
    for one, two in zip(torch.split(states, ROWS), torch.split(wanted, ROWS), strict=True):
        logits, reference = shared_rows(decode(one), decode_target(two))
        target = torch.log_softmax(reference, -1)  # [m, V]
        gap = target - torch.log_softmax(logits, -1)
        found.append(torch.linalg.vecdot(target.exp(), gap).float().cpu())
    return torch.cat(found) if found else torch.empty(0)


@torch.no_grad()
def at_strength(surgery: Surgery, cache: HiddenCache) -> Callable[[float], Tensor]:
    """strength → [N, H] corrected states of a cache; the correction is computed once."""
    states = cache.states.float()
    correction = surgery.correction(states, cache.tokens.positions.to(states.device))
    return lambda strength: (states - strength * correction).to(cache.states.dtype)


def choose_strength(
    merged: HiddenCache,
    target: HiddenCache,
    corrected: Callable[[float], Tensor],
    decode: Decode,
    decode_target: Decode,
    strengths: Sequence[float] = STRENGTHS,
) -> Gate:
    """The strength with the least KL on held-back prompts; 0 unless the gain exceeds its standard error over prompts.

    Args:
        merged, target: states of both models on the held-back text.
        corrected: strength → [N, H] corrected states on it.
        decode, decode_target: heads of the merged model and of the target.
    """
    rows, _ = target.scored()
    owner = torch.repeat_interleave(torch.arange(len(target.tokens)), target.tokens.lengths)[rows]  # [n]
    wanted = target.states[rows]  # [n, H]

    def by_prompt(states: Tensor) -> Tensor:
        """[S] sums over the tokens of each prompt."""
        found = divergence(states[rows], wanted, decode, decode_target)
        return torch.zeros(len(target.tokens), dtype=torch.float64).index_add_(0, owner, found.double())

    sums: Mapping[float, Tensor] = {0.0: by_prompt(merged.states)} | {
        strength: by_prompt(corrected(strength)) for strength in strengths
    }
    count = max(len(rows), 1)
    means = {strength: float(found.sum()) / count for strength, found in sums.items()}
    best = min(means, key=lambda strength: means[strength])
    gains = (sums[0.0] - sums[best]) * len(target.tokens) / count  # [S], their mean is the gain
    error = float(gains.std() / len(gains) ** 0.5) if len(gains) > 1 else 0.0
    if not means[0.0] - means[best] > error:
        best = 0.0
    return Gate(best, means, error, len(target.tokens))


def joint_strength(gates: Sequence[Gate]) -> float:
    """One strength for several domains: the least mean of KL over uncorrected KL, among those that no domain loses by.

    0 where no domain gains more than its standard error.
    """
    if not gates or not any(gate.strength for gate in gates):
        return 0.0
    shares = {
        strength: [gate.kl[strength] / gate.kl[0.0] if gate.kl[0.0] > 0 else 1.0 for gate in gates]
        for strength in gates[0].kl
    }
    allowed = [strength for strength, found in shares.items() if all(share <= 1 for share in found)]
    return min(allowed, key=lambda strength: sum(shares[strength]))
