"""Priors, starts, entropy weights and early stopping: against sums written out, linear systems, and limits."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy
import pytest
import torch
from test_calibrate import H, caches
from torch import Tensor

from suture.calibrate import Calibration, calibrate, check_table
from suture.errors import SurgeryError
from suture.losses import LOSSES, Batch
from suture.states import HiddenCache, Tokens
from suture.surgery import MODULES, make_surgery
from suture.table import Prior, median_table, weighted_medians

T_MAX = 12
POSITIONS = torch.tensor([0] * 9 + [1] * 8 + [2] * 7 + [5] * 2 + [7] * 5 + [20] * 3)  # the last three have no row
CPU = torch.device("cpu")


def problem() -> tuple[Tensor, Tensor]:
    """Residuals [N, 3] that depend on the position, and weights [N]."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(POSITIONS), 3, generator=generator)
    return noise + POSITIONS[:, None].float().sin(), torch.rand(len(POSITIONS), generator=generator) + 0.1


def literal_median(values: Any, weights: Any) -> float:
    """The value at which a weighted sum of distances is least, by trying all of them."""
    costs = [sum(w * abs(v - x) for v, w in zip(values, weights, strict=True)) for x in values]
    return float(values[int(numpy.argmin(costs))])


def literal_penalty(table: Any, smooth: float, shrink: float, visited: int) -> float:
    rows = numpy.asarray(table, dtype=float)
    total = 0.0
    for t, row in enumerate(rows):
        total += shrink * sum(x * x for x in row)
        if t:
            total += smooth * sum((x - y) ** 2 for x, y in zip(row, rows[t - 1], strict=True))
    return total / (rows.shape[1] * visited)


def literal_objective(table: Tensor, residuals: Tensor, weights: Tensor, smooth: float, shrink: float) -> float:
    total = 0.0
    for y, w, t in zip(residuals, weights, POSITIONS.tolist(), strict=True):
        if t < T_MAX:
            total += float(w / weights.sum() * (y - table[t]).abs().mean())
    return total + literal_penalty(table, smooth, shrink, 5)


def test_medians_by_position_equal_a_literal_search() -> None:
    residuals, weights = problem()
    table = weighted_medians(residuals, POSITIONS, weights, T_MAX)
    assert torch.equal(median_table(residuals, POSITIONS, weights, T_MAX), table)
    for t, i in itertools.product(range(T_MAX), range(3)):
        here = POSITIONS.eq(t)
        expected = literal_median(residuals[here, i].numpy(), weights[here].numpy()) if bool(here.any()) else 0.0
        assert float(table[t, i]) == expected
    weightless = weighted_medians(residuals, POSITIONS, weights * (POSITIONS != 1), T_MAX)
    assert weightless[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("smooth", "shrink"), [(0.1, 0.0), (1.0, 0.0), (0.0, 0.3), (0.5, 0.1), (50.0, 0.01)])
def test_penalised_medians_are_the_minimum(smooth: float, shrink: float) -> None:
    """The objective, written out token by token, cannot be lowered: it is convex, so nearby tables decide."""
    residuals, weights = problem()
    table = median_table(residuals, POSITIONS, weights, T_MAX, smooth, shrink).double()
    least = literal_objective(table, residuals, weights, smooth, shrink)
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(T_MAX, 3, generator=generator, dtype=torch.float64) for _ in range(20)]
    directions += [torch.ones(T_MAX, 3, dtype=torch.float64), table]
    for t in range(T_MAX):
        one = torch.zeros(T_MAX, 3, dtype=torch.float64)
        one[t] = 1
        directions.append(one)
    for direction, length in itertools.product(directions, (-0.3, -0.03, 0.03, 0.3)):
        assert literal_objective(table + length * direction, residuals, weights, smooth, shrink) > least - 2e-5


def test_limits_of_the_prior() -> None:
    residuals, weights = problem()
    inside = POSITIONS < T_MAX
    flat = median_table(residuals, POSITIONS, weights, T_MAX, smooth=1e7)
    for i in range(3):
        one = literal_median(residuals[inside, i].numpy(), weights[inside].numpy())
        torch.testing.assert_close(flat[:, i], torch.full((T_MAX,), one), atol=5e-3, rtol=0)
    assert float(median_table(residuals, POSITIONS, weights, T_MAX, shrink=1e7).abs().max()) < 1e-6
    # the less of a prior, the nearer to the medians
    medians = weighted_medians(residuals, POSITIONS, weights, T_MAX)
    near = median_table(residuals, POSITIONS, weights, T_MAX, shrink=1e-4)
    torch.testing.assert_close(near, medians, atol=1e-2, rtol=0)


def test_a_prior_means_the_same_for_any_width_number_of_tokens_and_table() -> None:
    residuals, weights = problem()
    table = median_table(residuals, POSITIONS, weights, T_MAX, 0.7, 0.1)
    twice = median_table(torch.cat([residuals] * 2), POSITIONS.repeat(2), weights.repeat(2) * 5, T_MAX, 0.7, 0.1)
    wide = median_table(torch.cat([residuals] * 2, 1), POSITIONS, weights, T_MAX, 0.7, 0.1)
    torch.testing.assert_close(twice, table, atol=1e-4, rtol=0)
    torch.testing.assert_close(wide, torch.cat([table] * 2, 1), atol=1e-4, rtol=0)
    short = POSITIONS < T_MAX  # a longer table would give the last three tokens rows
    few = [median_table(residuals[short], POSITIONS[short], None, t_max, 0.7)[:T_MAX] for t_max in (T_MAX, 30)]
    torch.testing.assert_close(few[0], few[1], atol=1e-4, rtol=0)


def test_a_row_with_few_tokens_is_pulled_harder() -> None:
    positions = torch.tensor([0] * 40 + [1] * 40 + [2] * 40 + [3] * 2 + [4] * 40)
    spread = torch.linspace(-0.5, 0.5, 40)
    residuals = torch.cat([spread, spread + 1, spread, torch.tensor([0.9, 1.1]), spread])[:, None]
    table = median_table(residuals, positions, None, 5, smooth=0.2)[:, 0]
    assert float(table[3]) < 0.5 * float(table[1])


def test_penalty_and_the_rows_that_no_token_visits() -> None:
    table = torch.randn(T_MAX, 3, generator=torch.Generator().manual_seed(2))
    prior = Prior.of(0.5, 0.2, POSITIONS, T_MAX, CPU)
    assert float(prior(table)) == pytest.approx(literal_penalty(table, 0.5, 0.2, 5), rel=1e-5)
    kept = table.clone()
    prior.settle(table)
    assert torch.equal(table[[0, 1, 2, 5, 7]], kept[[0, 1, 2, 5, 7]])
    least = literal_penalty(table, 0.5, 0.2, 5)
    for t in (3, 4, 6, 8, 11):
        for step in (-0.01, 0.01):
            moved = table.double().clone()
            moved[t] += step
            assert literal_penalty(moved, 0.5, 0.2, 5) > least - 1e-8
    Prior.of(2.0, 0.0, POSITIONS, T_MAX, CPU).settle(table)  # without shrinkage: straight lines, then level
    torch.testing.assert_close(table[3], kept[2] + (kept[5] - kept[2]) / 3)
    torch.testing.assert_close(table[6], (kept[5] + kept[7]) / 2)
    torch.testing.assert_close(table[8:], kept[7].expand(4, 3))
    Prior.of(0.0, 2.0, POSITIONS, T_MAX, CPU).settle(table)
    assert float(table[8:].abs().max()) == 0


def offsets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `darts` learn its table alone."""

    def make(name: str, *given: Any) -> Any:
        module = make_surgery(name, *given)
        module.content.requires_grad_(False)
        return module

    # the package gives its function for the name of this module
    monkeypatch.setattr(sys.modules["suture.calibrate"], "make_surgery", make)


def test_training_by_l2_with_a_prior_ends_at_a_linear_system(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets_only(monkeypatch)
    merged, target = caches([3, 11, 7, 5, 9, 4], position_offset=True)
    smooth, shrink, t_max = 0.8, 0.1, 14
    settings: dict[str, Any] = {"t_max": t_max, "loss": "l2", "rank": 1, "steps": 1500, "lr": 3e-3, "batch": 6}
    found = calibrate(merged, target, smooth=smooth, shrink=shrink, dtype=torch.float32, **settings)
    # sum_n |y_n - b_t(n)|^2 / N + (smooth |D b|^2 + shrink |b|^2) / T
    places = numpy.eye(t_max)[merged.tokens.positions.numpy()]  # [N, T_max]
    y = (merged.states - target.states).double().numpy()
    jumps = numpy.diff(numpy.eye(t_max), axis=0)
    system = places.T @ places / len(y) + (smooth * jumps.T @ jumps + shrink * numpy.eye(t_max)) / 11
    expected = numpy.linalg.solve(system, places.T @ y / len(y))
    torch.testing.assert_close(found.surgery.offsets().double(), torch.from_numpy(expected), atol=5e-3, rtol=0)


def test_trained_tables_at_the_limits_of_the_prior() -> None:
    merged, target = caches([3, 11, 7, 5, 9, 4], position_offset=True)
    flat: dict[str, Any] = {"t_max": 14, "rank": 4, "steps": 100, "lr": 1e-2, "smooth": 1e4, "dtype": torch.float32}
    for start in ("zero", "median"):
        table = calibrate(merged, target, start=start, **flat).surgery.offsets()
        assert float((table - table[0]).abs().max()) < 2e-3 < float(table.abs().max())
    table = calibrate(
        merged, target, t_max=14, rank=4, steps=300, lr=1e-3, shrink=1e6, start="median"
    ).surgery.offsets()
    assert float(table.abs().max()) < 0.01


@pytest.mark.parametrize("loss", ["l1", "ewl1"])
def test_a_start_at_the_medians(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a learning rate of almost zero, what is trained is the start: the optimum without content."""
    merged, target = caches([4] * 9, seed=2)
    found = calibrate(
        merged, target, loss=loss, rank=1, t_max=6, steps=1, lr=1e-30, start="median", dtype=torch.float32
    )
    residuals = (merged.states - target.states).view(9, 4, H).numpy()
    assert target.entropy is not None
    weights = target.entropy.view(9, 4).numpy() if loss == "ewl1" else numpy.ones((9, 4))
    for t, i in itertools.product(range(4), range(H)):
        expected = literal_median(residuals[:, t, i], weights[:, t])
        assert float(found.surgery.offsets()[t, i]) == pytest.approx(expected, abs=1e-6)
    assert float(found.surgery.offsets()[4:].abs().max()) == 0
    assert found.rho_calibration > 0


def test_a_start_with_a_prior_is_the_optimum_that_training_would_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets_only(monkeypatch)
    merged, target = caches([3, 11, 7, 5, 9, 4], position_offset=True)
    settings: dict[str, Any] = {"rank": 1, "t_max": 14, "loss": "l1", "smooth": 0.5, "shrink": 0.05, "batch": 6}
    start = calibrate(merged, target, start="median", steps=1, lr=1e-30, dtype=torch.float32, **settings)
    trained = calibrate(merged, target, steps=1500, lr=2e-3, dtype=torch.float32, **settings)
    torch.testing.assert_close(start.surgery.offsets(), trained.surgery.offsets(), atol=0.03, rtol=0)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_settings_that_are_off_change_no_byte(module: str) -> None:
    merged, target = caches([6, 9, 7, 8, 5])
    settings: dict[str, Any] = {"module": module, "rank": 4, "t_max": 16, "steps": 20}
    off: dict[str, Any] = {"smooth": 0.0, "shrink": 0.0, "start": "zero", "entropy_power": 1.0, "entropy_floor": 0.0}
    one = calibrate(merged, target, **settings)
    two = calibrate(merged, target, **settings, **off, waves=8, early_stopping=False, validation=caches([4, 4], seed=1))
    assert one.losses == two.losses
    assert same(one, two)
    assert one.details == two.details == {"rank": 4}


def same(one: Calibration, two: Calibration) -> bool:
    first, second = one.surgery.state_dict(), two.surgery.state_dict()
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("module", "weighted", "plain"), [("darts", "ewl1", "l1"), ("affine", "ewl2", "l2")])
def test_no_power_of_entropy_is_no_weight_at_all(module: str, weighted: str, plain: str) -> None:
    merged, target = caches([6, 9, 7, 8, 5])
    settings: dict[str, Any] = {"module": module, "rank": 3, "steps": 20}
    unweighted = calibrate(merged, target, loss=plain, **settings)
    powerless = calibrate(merged, target, loss=weighted, entropy_power=0, **settings)
    assert same(unweighted, powerless)
    assert unweighted.losses == powerless.losses
    assert not same(unweighted, calibrate(merged, target, loss=weighted, **settings))


@pytest.mark.parametrize("module", ["affine", "darts"])
def test_power_and_floor_are_those_of_weights_raised_beforehand(module: str) -> None:
    merged, target = caches([6, 9, 7, 8, 5])
    assert target.entropy is not None
    raised = HiddenCache(target.tokens, target.states, target.entropy.clamp_min(0.8) ** 2)
    settings: dict[str, Any] = {"module": module, "loss": "ewl2", "rank": 3, "steps": 20, "start": "zero"}
    assert same(
        calibrate(merged, target, entropy_power=2, entropy_floor=0.8, **settings), calibrate(merged, raised, **settings)
    )


def rest(cache: HiddenCache, sequences: int) -> HiddenCache:
    """All but the first sequences."""
    start = int(cache.tokens.lengths[:sequences].sum())
    tokens = Tokens.of([[1] * length for length in cache.tokens.lengths[sequences:].tolist()])
    return HiddenCache(tokens, cache.states[start:], None if cache.entropy is None else cache.entropy[start:])


def test_early_stopping_keeps_the_step_with_the_least_validation_loss() -> None:
    whole = caches([5, 6, 6, 9, 7, 8] * 3)
    merged, target = (cache.first(9) for cache in whole)
    held = rest(whole[0], 9), rest(whole[1], 9)
    settings: dict[str, Any] = {"rank": 8, "t_max": 16, "lr": 3e-2, "batch": 2, "dtype": torch.float32}
    found = calibrate(merged, target, steps=205, early_stopping=True, validation=held, **settings)
    looked = {int(step): loss for step, loss in found.details["validation_losses"].items()}
    assert list(looked) == [*range(0, 201, 10), 205]
    best = min(looked, key=lambda step: looked[step])
    assert found.details["best_step"] == best
    assert 0 < best < 205
    assert len(found.losses) == 205
    # the weights are those of that step: a training that ends there has them too
    assert same(found, calibrate(merged, target, steps=best, **settings))
    corrected = found.surgery(held[0].states, held[0].tokens.positions)
    again = LOSSES["ewl1"](corrected, Batch(held[1].states, held[1].entropy))
    assert float(again) == pytest.approx(looked[best], rel=1e-6)


def test_early_stopping_keeps_the_identity_where_training_only_harms() -> None:
    merged, target = caches([5, 6])
    away = HiddenCache(merged.tokens, 2 * merged.states - target.states, target.entropy)
    found = calibrate(merged, target, rank=4, steps=40, early_stopping=True, validation=(merged, away))
    assert found.details["best_step"] == 0
    assert torch.equal(found.surgery(merged.states, merged.tokens.positions), merged.states)


def test_early_stopping_by_logits_and_of_what_is_solved() -> None:
    merged, target = caches([6, 9])
    head = torch.randn(13, H, generator=torch.Generator().manual_seed(5))
    settings: dict[str, Any] = {"rank": 4, "steps": 5, "early_stopping": True}
    found = calibrate(
        merged,
        target,
        loss="kl",
        decode=lambda states: states @ head.T,
        decode_target=lambda states: states @ head.T,
        validation=caches([4, 7], seed=1),
        **settings,
    )
    assert list(found.details["validation_losses"]) == ["0", "1", "2", "3", "4", "5"]
    solved = calibrate(merged, target, module="affine", loss="l2", **settings)
    assert "best_step" not in solved.details


def test_cosines_level_off_where_the_calibration_text_ends() -> None:
    merged, target = caches([6, 9, 7, 8, 5], position_offset=True)
    settings: dict[str, Any] = {"module": "cosine", "rank": 4, "steps": 200, "lr": 1e-2}
    found = calibrate(merged, target, waves=4, **settings).surgery
    assert (found.t_max, found.waves) == (9, 4)
    assert calibrate(merged, target, t_max=5, **settings).surgery.t_max == 5
    table = found.correction(torch.zeros(600, H), torch.arange(600))  # c(0) is 0
    assert float(table[8].abs().max()) > 0.1
    torch.testing.assert_close(table[8:], table[8].expand(592, H))


def test_refusals() -> None:
    merged, target = caches([3, 4])
    for settings in ({"smooth": 1.0}, {"shrink": 1.0}, {"start": "median"}):
        for module in sorted(set(MODULES) - {"darts"}):
            with pytest.raises(SurgeryError, match=rf"which {module} does not have: .*\(darts\)"):
                calibrate(merged, target, module=module, rank=2, **settings)
        check_table("darts", **settings)
    with pytest.raises(SurgeryError, match="unknown start 'medain'; did you mean 'median'"):
        calibrate(merged, target, start="medain")
    with pytest.raises(SurgeryError, match=r"smooth \(-1\)"):
        calibrate(merged, target, smooth=-1.0)
    with pytest.raises(SurgeryError, match=r"entropy_power \(-1\)"):
        calibrate(merged, target, entropy_power=-1.0)
    with pytest.raises(SurgeryError, match=r"early_stopping needs prompts .* give validation="):
        calibrate(merged, target, rank=2, early_stopping=True)
    with pytest.raises(SurgeryError, match="different tokens"):
        calibrate(merged, target, rank=2, early_stopping=True, validation=(merged, caches([4, 3])[1]))
    bare = HiddenCache(target.tokens, target.states)
    with pytest.raises(SurgeryError, match="needs the target's entropies"):
        calibrate(merged, target, rank=2, early_stopping=True, validation=(merged, bare))
    one = Tokens.of([[1]])
    single = HiddenCache(one, merged.states[:1]), HiddenCache(one, target.states[:1])
    found = calibrate(*single, loss="l1", t_max=1, rank=2, steps=2, smooth=1.0, start="median")
    assert found.surgery.offsets().shape == (1, H)
