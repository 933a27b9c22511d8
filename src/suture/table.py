"""A position table's prior, and its closed form for L1 where there is no content term.

With residuals y_n = h_n - h*_n of N tokens at positions t(n), weights w_n and W their sum, the table b minimises

    sum_n w_n / W ||y_n - b_t(n)||_1 / H + (smooth sum_t ||b_t - b_{t-1}||_2^2 + shrink sum_t ||b_t||_2^2) / (H T)

where H is the width and T counts the positions below T_max that tokens visit. The prior is divided by H T because the
loss is a mean over H coordinates and, position by position, spreads a total weight of 1 over T rows. So neither width,
number of tokens, length of the text nor T_max changes what a value of `smooth` or `shrink` means: for a row with the
average number of visits, a jump of x to its neighbour costs smooth x^2 a coordinate where a bias of x costs x. A row
with fewer visits is held less by its tokens and pulled more by its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDS = 80  # of reweighting
SHARPEN = 0.85  # from round to round, of the width within which an absolute value counts as a square
NUMBERS = 1 << 24  # residuals that are worked on at one time


@dataclass(frozen=True)
class Prior:
    """Smoothness and shrinkage of a table: (smooth sum ||b_t - b_{t-1}||^2 + shrink sum ||b_t||^2) / (H T).

    Attributes:
        smooth, shrink: for losses that are linear in the states in units of 1 / states, for squared ones pure numbers.
        visited: [T_max] whether any calibration token is at this position; T counts them.
        fill: [free, T_max - free] rows that no token visits, from those that tokens visit.
    """

    smooth: float
    shrink: float
    visited: Tensor
    fill: Tensor

    @classmethod
    def of(cls, smooth: float, shrink: float, positions: Tensor, t_max: int, device: torch.device) -> Prior:
        """From the positions [N] of the calibration tokens."""
        visited = _visits(positions, t_max) > 0  # [T_max]
        free = ~visited
        quadratic = torch.zeros(t_max, t_max, dtype=torch.float64)
        quadratic.diagonal().copy_(_diagonal(smooth, shrink, t_max))
        quadratic.diagonal(1).fill_(-smooth)
        quadratic.diagonal(-1).fill_(-smooth)
        # where no token pulls, the minimum over free rows given the others is a linear system
        fill = torch.linalg.solve(quadratic[free][:, free], -quadratic[free][:, visited])
        return cls(smooth, shrink, visited.to(device), fill.float().to(device))

    def __call__(self, rows: Tensor) -> Tensor:
        """The penalty of a table, [T_max, H]."""
        jumps = (rows[1:] - rows[:-1]).square().sum()
        total = self.smooth * jumps + self.shrink * rows.square().sum()
        return total / (rows.shape[1] * self.visited.sum())

    @torch.no_grad()
    def settle(self, rows: Tensor) -> None:
        """Set the rows that no token visits to their exact minimum, between or beyond the others, in place.

        Gradient steps would carry a value row by row through hundreds of free rows, and a free tail still at zero
        would pull the last visited rows to it.
        """
        rows[~self.visited] = self.fill @ rows[self.visited]


def weighted_medians(residuals: Tensor, positions: Tensor, weights: Tensor, t_max: int) -> Tensor:
    """[T_max, H] least weighted medians of residuals [N, H] by position [N]; zero where no token has weight.

    A median is the smallest residual at which the weights [N] of those up to it reach half of all.
    """
    table = torch.zeros(t_max, residuals.shape[1])
    for t in _visits(positions, t_max).nonzero()[:, 0].tolist():
        here = positions == t  # [N]
        values, order = residuals[here].sort(dim=0)  # [n, H] each
        sums = weights[here].double()[order].cumsum(0)  # [n, H]
        if float(sums[-1, 0]) > 0:
            first = (sums >= sums[-1] / 2).int().argmax(0, keepdim=True)  # [1, H]
            table[t] = values.gather(0, first)[0]
    return table


def median_table(
    residuals: Tensor, positions: Tensor, weights: Tensor | None, t_max: int, smooth: float = 0.0, shrink: float = 0.0
) -> Tensor:
    """The table that minimises the weighted L1 and its prior without a content term, [T_max, H], float32.

    Without a prior these are weighted medians, exactly. With one the minimum is found by reweighted least squares: an
    absolute value is bounded by a square that touches it, and the smooth width around zero shrinks from round to round.

    Args:
        residuals: [N, H] merged minus target states.
        positions: [N] of the tokens; those at T_max and beyond have no row.
        weights: [N] of the tokens, or None where all count alike.
        t_max: rows.
        smooth, shrink: as in `Prior`.
    """
    weights = torch.ones(len(residuals)) if weights is None else weights.float()
    if not (smooth or shrink) or not float(weights.sum()) > 0:
        return weighted_medians(residuals, positions, weights, t_max)
    inside = positions < t_max
    rows, share = positions[inside], (weights / weights.sum())[inside]
    visited = int((_visits(rows, t_max) > 0).sum())
    width = max(1, NUMBERS // len(residuals))
    blocks = [
        _reweighted(block.float(), rows, share, t_max, smooth / visited, shrink / visited)
        for block in torch.split(residuals[inside], width, dim=1)
    ]
    return torch.cat(blocks, 1)


def _visits(positions: Tensor, t_max: int) -> Tensor:
    """[T_max] tokens at each position."""
    return torch.bincount(positions[positions < t_max], minlength=t_max)


def _reweighted(residuals: Tensor, rows: Tensor, share: Tensor, t_max: int, smooth: float, shrink: float) -> Tensor:
    """[T_max, H] minimum of sum_n share_n |y_n - b_t(n)| + smooth sum |jumps|^2 + shrink sum |b|^2, by coordinate."""
    size = residuals.shape[1]
    scale = residuals.abs().mean(0).clamp_min(1e-12)  # [H]
    diagonal = _diagonal(smooth, shrink, t_max)[:, None]  # [T_max, 1]
    curved = (share[:, None] / (2 * scale)).expand(-1, size)  # [N, H] of the square that bounds each absolute value
    table = torch.zeros(t_max, size)
    for turn in range(ROUNDS):
        pull = torch.zeros(t_max, size).index_add_(0, rows, curved)
        right = torch.zeros(t_max, size).index_add_(0, rows, curved * residuals)
        table = _tridiagonal(pull.double() + diagonal, -smooth, right.double()).float()
        distance = torch.hypot(residuals - table[rows], scale * SHARPEN**turn)  # [N, H]
        curved = share[:, None] / (2 * distance)
    return table


def _diagonal(smooth: float, shrink: float, t_max: int) -> Tensor:
    """[T_max] diagonal of the prior's quadratic form: a row inside has two neighbours, one at an end has one."""
    neighbours = torch.full((t_max,), 2.0, dtype=torch.float64)
    neighbours[0] -= 1
    neighbours[-1] -= 1
    return shrink + smooth * neighbours


def _tridiagonal(diagonal: Tensor, beside: float, right: Tensor) -> Tensor:
    """Solve, for each column, a symmetric system with `diagonal` [T, H] and one constant beside it; right [T, H]."""
    right = right.clone()
    ratios = torch.zeros_like(right)
    pivot = diagonal[0]
    right[0] /= pivot
    for t in range(1, len(right)):
        ratios[t - 1] = beside / pivot
        pivot = diagonal[t] - beside * ratios[t - 1]
        right[t] = (right[t] - beside * right[t - 1]) / pivot
    for t in range(len(right) - 2, -1, -1):
        right[t] -= ratios[t] * right[t + 1]
    return right
