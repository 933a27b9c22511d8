"""Held-out scores against a direct computation on whole models."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import nearby, tiny_model

from suture.attach import attach
from suture.calibrate import rho
from suture.capture import capture, respond
from suture.evaluate.heldout import Score, gap_closed, score_calibration, score_heldout
from suture.models import Head
from suture.states import HiddenCache, Tokens
from suture.surgery import make_surgery

PROMPTS = [[5, 6, 7, 8], [50], [70, 71, 72], [20, 21, 22, 23, 24, 25]]


def test_scores_equal_whole_models_with_surgery_attached() -> None:
    target = tiny_model(initializer_range=0.4)
    merged = nearby(target, 1, 0.3)
    surgery = make_surgery("darts", 32, 4, 9)
    for parameter in surgery.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
        parameter.requires_grad_(False)
    tokens = respond(target, Tokens.of(PROMPTS), 7)
    caches = capture(merged, tokens), capture(target, tokens)
    found = score_heldout("math", *caches, {"darts": surgery}, Head(merged), Head(target))
    sums: dict[str, dict[str, float]] = {}
    count = 0
    attached = attach(merged, {"math": surgery})
    for row, prompt in zip(tokens.sequences, tokens.prompt_lengths.tolist(), strict=True):
        ids = row[None]
        p_star = torch.softmax(target(input_ids=ids).logits[0].double(), -1)
        models = {"target": p_star, "merged": torch.softmax(merged(input_ids=ids).logits[0].double(), -1)}
        with attached.domain("math"):
            models["darts"] = torch.softmax(merged(input_ids=ids).logits[0].double(), -1)
        for t in range(prompt - 1, len(row) - 1):
            count += 1
            for name, p in models.items():
                total = sums.setdefault(name, {"kl": 0.0, "agreement": 0.0, "nll": 0.0})
                total["kl"] += float((p_star[t] * (p_star[t].log() - p[t].log())).sum())
                total["agreement"] += float(p[t].argmax() == p_star[t].argmax())
                total["nll"] -= float(p[t, row[t + 1]].log())
    value = {(score.model, score.metric): score for score in found}
    assert len(found) == 12
    for name, total in sums.items():
        assert value[name, "kl"].value == pytest.approx(total["kl"] / count, abs=1e-5)
        assert value[name, "agreement"].value == pytest.approx(total["agreement"] / count)
        assert value[name, "perplexity"].value == pytest.approx(math.exp(total["nll"] / count), rel=1e-4)
        assert value[name, "kl"].n_tokens == count
    assert value["merged", "rho_l1"].value == 0
    assert value["target", "rho_l1"].value == 1
    assert value["merged", "kl"].value > 0.01


def test_scored_states_are_those_before_each_written_token() -> None:
    tokens = Tokens.of([[1, 2, 3, 4], [5, 6], [7, 8, 9]], [2, 2, 1])
    rows, labels = HiddenCache(tokens, torch.zeros(9, 4)).scored()
    assert rows.tolist() == [1, 2, 6, 7]
    assert labels.tolist() == [3, 4, 8, 9]
    rows, labels = HiddenCache(Tokens.of([[1, 2, 3], [5]]), torch.zeros(4, 4)).scored()
    assert rows.tolist() == [0, 1]
    assert labels.tolist() == [2, 3]


def test_a_target_with_more_vocabulary_rows_is_compared_on_shared_ones() -> None:
    tokens = Tokens.of([[1, 2, 3, 4, 5]], [2])
    states = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    caches = HiddenCache(tokens, states), HiddenCache(tokens, states)
    head = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    found = score_heldout("a", *caches, {}, lambda given: given @ head[:10].T, lambda given: given @ head.T)
    value = {(score.model, score.metric): score.value for score in found}
    assert value["merged", "kl"] == pytest.approx(0, abs=1e-6)
    assert value["merged", "perplexity"] == pytest.approx(value["target", "perplexity"])


def test_calibration_scores_and_gap() -> None:
    tokens = Tokens.of([[1, 2, 3]])
    target = HiddenCache(tokens, torch.zeros(3, 4))
    merged = HiddenCache(tokens, torch.ones(3, 4))
    surgery = make_surgery("darts", 4, 1, 2)
    surgery.table.rows.data.fill_(0.5)  # halves the bias of the first two tokens
    assert rho(surgery, merged, target) == pytest.approx(1 / 3)
    kept = {"half": {"rho_calibration": rho(surgery, merged, target), "calibration_tokens": 3}}
    found = {score.model: score for score in score_calibration("a", kept)}
    assert {name: score.value for name, score in found.items()} == {
        "target": 1.0,
        "merged": 0.0,
        "half": pytest.approx(1 / 3),
    }
    assert {(score.metric, score.split, score.n_tokens) for score in found.values()} == {("rho_l1", "calibration", 3)}
    rows = [
        Score("a", name, "kl", "heldout", value, 3) for name, value in (("target", 0.0), ("merged", 0.4), ("x", 0.5))
    ]
    assert gap_closed(rows, "a", "x") == pytest.approx(-0.25)
    assert gap_closed([Score(r.domain, r.model, r.metric, r.split, 0.0, 3) for r in rows], "a", "x") is None
