"""Closed forms against numpy, gradient descent and what is known by construction."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_calibrate import caches
from torch import Tensor

from suture.calibrate import calibrate
from suture.losses import LOSSES, Batch
from suture.ridge import RIDGES, Moments, cross_validate, solve
from suture.states import HiddenCache, Tokens

H, N = 6, 50


def data(seed: int = 0, noise: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, H, generator=generator, dtype=torch.float64) * torch.tensor([3.0, 1, 1, 1, 0.5, 0.1]) + 1
    m = torch.randn(H, H, generator=generator, dtype=torch.float64)
    y = x @ m.T + 2 + noise * torch.randn(N, H, generator=generator, dtype=torch.float64)
    return x, y, torch.rand(N, generator=generator, dtype=torch.float64)


def level(x: Tensor, w: Tensor) -> float:
    centred = x - (w @ x) / w.sum()
    return float((w[:, None] * centred**2).sum() / H)


@pytest.mark.parametrize("ridge", [1e-3, 1.0, 30.0])
def test_full_rank_is_weighted_ridge_regression(ridge: float) -> None:
    """numpy's least squares on rows that are scaled, centred and augmented by sqrt(k) I."""
    x, y, w = data()
    found = solve(Moments.of(x, y, w), ridge, H)
    mean_x, mean_y = (w @ x) / w.sum(), (w @ y) / w.sum()
    root = w.sqrt()[:, None]
    a = torch.cat([root * (x - mean_x), (ridge * level(x, w)) ** 0.5 * torch.eye(H, dtype=torch.float64)])
    b = torch.cat([root * (y - mean_y), torch.zeros(H, H, dtype=torch.float64)])
    expected = np.linalg.lstsq(a.numpy(), b.numpy(), rcond=None)[0].T
    m = found.up @ found.down
    np.testing.assert_allclose(m.numpy(), expected, atol=1e-9)
    np.testing.assert_allclose(found.offset.numpy(), (mean_y - torch.from_numpy(expected) @ mean_x).numpy(), atol=1e-9)


def test_without_an_offset_nothing_is_centred() -> None:
    """numpy's least squares on rows as they are."""
    x, y, w = data()
    found = solve(Moments.of(x, y, w), 0.3, H, offset=False)
    root = w.sqrt()[:, None]
    penalty = 0.3 * float((w[:, None] * x**2).sum() / H)
    a = torch.cat([root * x, penalty**0.5 * torch.eye(H, dtype=torch.float64)])
    b = torch.cat([root * y, torch.zeros(H, H, dtype=torch.float64)])
    expected = np.linalg.lstsq(a.numpy(), b.numpy(), rcond=None)[0].T
    np.testing.assert_allclose((found.up @ found.down).numpy(), expected, atol=1e-9)
    assert not bool(found.offset.any())


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_reduced_rank_is_the_best_map_of_that_rank(rank: int) -> None:
    """No descent from random starts finds a smaller penalised error."""
    x, y, w = data(1)
    ridge = 0.5
    moments = Moments.of(x, y, w)
    found = solve(moments, ridge, rank)
    assert found.down.shape == (rank, H)
    penalty = ridge * level(x, w)

    def objective(up: Tensor, down: Tensor, offset: Tensor) -> Tensor:
        m = up @ down
        return (w * ((y - x @ m.T - offset) ** 2).sum(-1)).sum() + penalty * (m**2).sum()

    best = float(objective(found.up, found.down, found.offset))
    reached = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        leaves = [
            torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(True)
            for shape in ((H, rank), (rank, H), (H,))
        ]
        optimiser = torch.optim.LBFGS(leaves, max_iter=800, line_search_fn="strong_wolfe")

        def closure(leaves: list[Tensor] = leaves, optimiser: torch.optim.LBFGS = optimiser) -> Tensor:
            optimiser.zero_grad()
            loss = objective(*leaves)
            loss.backward()
            return loss

        optimiser.step(closure)
        reached.append(float(objective(*leaves).detach()))
    assert best <= min(reached) * (1 + 1e-9)
    assert best == pytest.approx(min(reached), rel=1e-4)


def test_error_from_sums_is_the_error_over_tokens() -> None:
    x, y, w = data(2)
    found = solve(Moments.of(x, y, w), 0.1, 3)
    other = data(3)
    residual = other[1] - other[0] @ (found.up @ found.down).T - found.offset
    expected = float((other[2][:, None] * residual**2).sum())
    assert found.error(Moments.of(*other)) == pytest.approx(expected, rel=1e-9)


def test_sums_stream_and_come_apart() -> None:
    x, y, w = data()
    whole = Moments.of(x, y, w)
    parts = Moments.of(x[:20], y[:20], w[:20]) + Moments.of(x[20:], y[20:], w[20:])
    left = whole - Moments.of(x[:20], y[:20], w[:20])
    for one, two in zip(whole.parts, parts.parts, strict=True):
        torch.testing.assert_close(one, two)
    for one, two in zip(left.parts, Moments.of(x[20:], y[20:], w[20:]).parts, strict=True):
        torch.testing.assert_close(one, two)


def test_an_exact_relation_is_found_exactly() -> None:
    x, y, _ = data(4, noise=0.0)
    found = solve(Moments.of(x, y), 0.0, H)
    torch.testing.assert_close(x @ (found.up @ found.down).T + found.offset, y, atol=1e-6, rtol=1e-6)
    assert cross_validate([Moments.of(x[i::10], y[i::10]) for i in range(10)], H).ridge == min(RIDGES)


def test_cross_validation_shrinks_what_is_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(60, 20, generator=generator) for _ in range(2))  # nothing to be learnt
    choice = cross_validate([Moments.of(x[i::12], y[i::12]) for i in range(12)], 20)
    assert choice.ridge == max(RIDGES)
    assert choice.errors[max(RIDGES)] == pytest.approx(1, abs=0.1)
    assert choice.errors[min(RIDGES)] > 1.2


def test_many_dimensions_by_subspace_iteration_equal_the_exact_truncation() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 80, generator=generator, dtype=torch.float64)
    m = torch.randn(80, 6, generator=generator, dtype=torch.float64) @ torch.randn(
        6, 80, generator=generator, dtype=torch.float64
    )
    moments = Moments.of(x, x @ m.T + 0.01 * torch.randn(400, 80, generator=generator, dtype=torch.float64))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    few = solve(moments, 0.01, 4)
    assert torch.equal(torch.get_rng_state(), before)
    many = solve(moments, 0.01, 80)
    whole = many.up @ many.down
    u, s, vh = torch.linalg.svd(whole)
    # x is nearly white, so the best rank-4 map is nearly the truncated full one
    relative = (few.up @ few.down - (u[:, :4] * s[:4]) @ vh[:4]).norm() / whole.norm()
    assert float(relative) < 0.2
    exact = solve(moments, 0.01, 20).error(moments)
    assert few.error(moments) > exact


def test_no_weight_is_refused() -> None:
    x, y, w = data()
    with pytest.raises(ValueError, match="no token has weight"):
        solve(Moments.of(x, y, 0 * w), 1.0, 2)


@pytest.mark.parametrize("loss", ["l2", "ewl2"])
def test_calibration_solves_what_training_approaches(loss: str) -> None:
    """The closed form is no worse on its own loss than long training of the same module from zero."""
    merged, target = caches([30, 40, 25, 35, 50, 20])
    solved = calibrate(merged, target, module="affine", loss=loss, rank=10, dtype=torch.float32)
    assert set(solved.details) == {"rank", "ridge", "ridge_errors"}

    def value(corrected: Tensor) -> float:
        return float(LOSSES[loss](corrected, Batch(target.states, target.entropy)))

    from suture.surgery import make_surgery

    module = make_surgery("affine", 10, 10)
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(1500):
        found = LOSSES[loss](module(merged.states, merged.tokens.positions), Batch(target.states, target.entropy))
        optimiser.zero_grad()
        found.backward()
        optimiser.step()
    assert value(solved.surgery(merged.states, merged.tokens.positions)) <= 1.02 * found.item()
    assert solved.rho_calibration > 0.3


def test_too_few_tokens_lower_the_rank() -> None:
    tokens = Tokens.of([[1, 2], [3]])
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    found = calibrate(HiddenCache(tokens, x), HiddenCache(tokens, x * 0.9), module="affine", loss="l2", rank=8)
    assert found.details["rank"] == 2
    assert bool(torch.isfinite(found.surgery(x, tokens.positions)).all())
