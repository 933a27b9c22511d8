"""Weighted ridge and reduced-rank regression in closed form, from sums over tokens: memory of H^2, not of tokens x H.

The model is y = M x + b with rank M <= r, fitted by minimising sum_t w_t ||y_t - M x_t - b||^2 + k ||M||^2, where
k = ridge x the mean diagonal of the weighted, centred Gram matrix of x. The offset b is not penalised; without one
(b = 0) nothing is centred. For a rank below
H the truncated solution is the exact minimiser: with R = (G + k I)^-1/2 and C the cross sums, the best rank-r M^T is R
times the rank-r truncation of R C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGES = tuple(10.0**power for power in range(-4, 4))
FOLDS = 5


@dataclass(frozen=True)
class Moments:
    """Weighted sums over tokens, in float64; they add over batches, prompts and domains.

    Attributes:
        weight: sum of w.
        x, y: [H] sums of w x and w y.
        xx: [H, H] sum of w x x^T; xy: [H, H] sum of w x y^T; yy: sum of w ||y||^2.
    """

    weight: Tensor
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Moments:
        """Of tokens: x [n, H] and y [n, H], each token with its weight [n] or 1."""
        x, y = x.double(), y.double()
        w = torch.ones(len(x), dtype=torch.float64, device=x.device) if weight is None else weight.double()
        weighted = w[:, None] * x  # [n, H]
        return cls(w.sum(), weighted.sum(0), w @ y, weighted.T @ x, weighted.T @ y, w @ (y * y).sum(-1))

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(one + two for one, two in zip(self.parts, other.parts, strict=True)))

    def __sub__(self, other: Moments) -> Moments:
        return Moments(*(one - two for one, two in zip(self.parts, other.parts, strict=True)))

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All sums, in the order of the constructor."""
        return (self.weight, self.x, self.y, self.xx, self.xy, self.yy)


@dataclass(frozen=True)
class Solution:
    """M = up @ down, of rank r: down [r, H], up [H, r]; and the offset [H]."""

    down: Tensor
    up: Tensor
    offset: Tensor

    def error(self, moments: Moments) -> float:
        """sum_t w_t ||y_t - M x_t - b||^2 on the tokens behind some sums; no token is needed again."""
        m, b = self.up @ self.down, self.offset  # [H, H], [H]
        linear = -2 * (moments.xy * m.T).sum() + ((moments.xx @ m.T) * m.T).sum()
        offset = -2 * b @ moments.y + 2 * b @ (m @ moments.x) + moments.weight * (b @ b)
        return float(moments.yy + linear + offset)


class Basis:
    """The eigenvectors of a Gram matrix, centred where there is an offset: they solve for every ridge and rank.

    Raises:
        ValueError: when no token has weight.
    """

    def __init__(self, moments: Moments, offset: bool = True) -> None:
        if not float(moments.weight) > 0:
            raise ValueError("no token has weight")
        share = float(offset) / moments.weight
        self.mean_x, self.mean_y = moments.x * share, moments.y * share
        gram = moments.xx - torch.outer(moments.x, self.mean_x)  # [H, H]
        cross = moments.xy - torch.outer(moments.x, self.mean_y)
        self.level = gram.diagonal().mean()
        values, self.vectors = torch.linalg.eigh(gram)  # G = Q diag(values) Q^T
        self.values = values.clamp_min(0)  # rounding makes empty directions negative
        self.cross = self.vectors.T @ cross  # Q^T C, [H, H]
        # directions that no token has stay at zero instead of blowing up
        self.least = 1e-12 * (moments.xx.diagonal().mean() + 1e-30)

    def solve(self, ridge: float, rank: int) -> Solution:
        """The minimiser of the penalised squared error among maps of at most this rank."""
        root = (self.values + ridge * self.level).clamp_min(self.least).rsqrt()  # [H] of (G + k I)^-1/2 in this basis
        whitened = root[:, None] * self.cross  # [H, H]
        outer = self.vectors * root  # Q (G + k I)^-1/2, [H, H]
        if rank >= len(root):
            down, up = outer.T, whitened.T
        else:
            u, s, v = truncated(whitened, rank)
            down, up = (outer @ (u * s)).T, v  # [r, H], [H, r]
        return Solution(down, up, self.mean_y - up @ (down @ self.mean_x))


def solve(moments: Moments, ridge: float, rank: int, offset: bool = True) -> Solution:
    """The minimiser of the penalised squared error among maps of at most this rank.

    Raises:
        ValueError: when no token has weight.
    """
    return Basis(moments, offset).solve(ridge, rank)


def truncated(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """(U [H, r], S [r], V [H, r]) of a matrix, exact, or by subspace iteration where few directions are wanted."""
    if rank * 4 >= min(matrix.shape):
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        return u[:, :rank], s[:rank], vh[:rank].T
    with torch.random.fork_rng(devices=[matrix.device] if matrix.is_cuda else []):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(matrix, q=rank + 8, niter=6)
    return u[:, :rank], s[:rank], v[:, :rank]


@dataclass(frozen=True)
class Choice:
    """A solution with the ridge that cross-validation chose, and the error of each ridge over that of no correction."""

    solution: Solution
    ridge: float
    errors: dict[float, float]


def cross_validate(
    prompts: Sequence[Moments],
    rank: int,
    ridges: Sequence[float] = RIDGES,
    folds: int = FOLDS,
    *,
    offset: bool = True,
) -> Choice:
    """Choose the ridge by cross-validation over prompts, then fit on all of them.

    Args:
        prompts: the sums of each prompt's tokens; whole prompts are left out together, since tokens of one are alike.
        rank: at most this.
        ridges: strengths to try.
        folds: at most this many groups.
        offset: whether b is fitted, or 0.
    """
    groups = [_sum(prompts[start :: min(folds, len(prompts))]) for start in range(min(folds, len(prompts)))]
    whole = _sum(groups)
    errors = dict.fromkeys(ridges, 0.0)
    if len(groups) > 1:
        for group in groups:
            rest = Basis(whole - group, offset)
            for ridge in ridges:
                errors[ridge] += rest.solve(ridge, rank).error(group) / float(whole.yy)
        best = min(ridges, key=lambda ridge: errors[ridge])
    else:
        best = 1.0  # one prompt cannot be left out
    return Choice(solve(whole, best, rank, offset), best, errors)


def _sum(moments: Sequence[Moments]) -> Moments:
    total = moments[0]
    for each in moments[1:]:
        total = total + each
    return total
