"""Held-out scores: on text that the target wrote for prompts nobody calibrated on, how near a model is to the target.

Four metrics, all on the same tokens, those of the responses: KL(target || model) in nats, share of positions where both
would write the same token, the model's perplexity on the text, and rho_L1 (Eq. 7 of arXiv 2608.28547).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from suture.bias import bias, reduction
from suture.progress import SILENT, Progress
from suture.states import HiddenCache, check_pair
from suture.surgery import Surgery

MOST_NATS = 700.0  # of a broken model: what exp can still take
FIXED = {"target": 1.0, "merged": 0.0}  # rho by definition
GUARD = "guard"  # in place of a domain: text of none
ROWS = 256  # states whose logits exist at one time
Decode = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Score:
    """One row of `scores.json`."""

    domain: str
    model: str  # target, merged, or a surgery's name
    metric: str  # kl, agreement, perplexity, rho_l1
    split: str  # heldout or calibration
    value: float
    n_tokens: int

    def row(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@torch.inference_mode()
def score_heldout(
    domain: str,
    merged: HiddenCache,
    target: HiddenCache,
    corrections: Mapping[str, Surgery | HiddenCache],
    decode: Decode,
    decode_target: Decode,
    *,
    progress: Progress = SILENT,
    stage: str = "score",
) -> list[Score]:
    """Scores of the target, the merged model and each correction on the responses in two caches.

    Args:
        merged, target: states of both models on the same prompts and responses.
        corrections: a module on the merged model's states, or the states of a model that is corrected inside.
        decode: the merged model's head, which reads corrected states too: there is one checkpoint.
        decode_target: the target's head.
    """
    check_pair(merged, target)
    rows, labels = target.scored()
    states, wanted = merged.states[rows], target.states[rows]  # [n, H]
    positions = target.tokens.positions[rows]
    corrected = {"merged": states}
    for name, each in corrections.items():
        if isinstance(each, HiddenCache):
            check_pair(each, target)
            corrected[name] = each.states[rows]
        else:
            corrected[name] = each(states, positions)
    sums = {name: {"kl": 0.0, "agreement": 0.0, "nll": 0.0} for name in ("target", *corrected)}
    # on the token ids that both vocabularies have
    size = min(decode(states[:1]).shape[-1], decode_target(wanted[:1]).shape[-1])
    with progress.stage(stage, len(rows)) as advance:
        for start in range(0, len(rows), ROWS):
            part = slice(start, start + ROWS)
            reference = torch.log_softmax(decode_target(wanted[part])[:, :size], -1)  # [m, V]
            _add(sums["target"], reference, reference, labels[part])
            for name, given in corrected.items():
                _add(sums[name], torch.log_softmax(decode(given[part])[:, :size], -1), reference, labels[part])
            advance(len(labels[part]))
    before = bias(states, wanted)
    count = max(len(rows), 1)
    scores = []
    for name, found in sums.items():
        after = bias(corrected[name], wanted) if name in corrected else torch.zeros_like(before)
        values = {
            "kl": found["kl"] / count,
            "agreement": found["agreement"] / count,
            "perplexity": math.exp(min(found["nll"] / count, MOST_NATS)),
            "rho_l1": reduction(before, after),
        }
        scores += [Score(domain, name, metric, "heldout", value, len(rows)) for metric, value in values.items()]
    return scores


@torch.inference_mode()
def perplexity(cache: HiddenCache, decode: Decode) -> tuple[float, int]:
    """(perplexity, tokens that it rests on) of a model on its own reading of a text."""
    rows, labels = cache.scored()
    total = 0.0
    for states, wanted in zip(torch.split(cache.states[rows], ROWS), torch.split(labels, ROWS), strict=True):
        logits = torch.log_softmax(decode(states), -1)  # [m, V]
        total -= float(logits.gather(-1, wanted.to(logits.device)[:, None]).sum())
    return math.exp(min(total / max(len(rows), 1), MOST_NATS)), len(rows)


def _add(sums: dict[str, float], model: Tensor, target: Tensor, labels: Tensor) -> None:
    """Add up one chunk: [m, V] log-probabilities of model and target, [m] tokens that were written."""
    target, labels = target.to(model.device), labels.to(model.device)
    if model is not target:
        sums["kl"] += float(torch.nn.functional.kl_div(model, target, reduction="sum", log_target=True))
    sums["agreement"] += float((model.argmax(-1) == target.argmax(-1)).sum())
    sums["nll"] -= float(model.gather(-1, labels[:, None]).sum())


def score_calibration(domain: str, histories: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """rho_L1 of each correction on what it was fitted on, as its history says."""
    scores: list[Score] = []
    for label, history in histories.items():
        count = int(history["calibration_tokens"])
        if not scores:
            scores = [Score(domain, name, "rho_l1", "calibration", value, count) for name, value in FIXED.items()]
        scores.append(Score(domain, label, "rho_l1", "calibration", float(history["rho_calibration"]), count))
    return scores


def gap_closed(scores: list[Score], domain: str, model: str) -> float | None:
    """(merged - model) / (merged - target) in held-out KL; None where the merged model has no gap."""
    value = {
        score.model: score.value
        for score in scores
        if (score.domain, score.metric, score.split) == (domain, "kl", "heldout")
    }
    gap = value["merged"] - value["target"]
    return (value["merged"] - value[model]) / gap if gap > 0 else None
