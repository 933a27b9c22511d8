"""Weighted ridge regression without an offset, at every rank, from sums over tokens: what a linear should do otherwise.

The model is y = M^T a with M [in, out]: a enters a linear, y is what it gives too much of. Minimised is
sum_t ||y_t - M^T a_t||^2 + k ||M||^2 with k = ridge x the mean diagonal of G = sum a a^T. With C = sum a y^T the full
solution is M = (G + k I)^-1 C, and the best one of rank r is M V V^T: reduced-rank regression in the metric of
G + k I = L L^T, V [out, r] the first right singular vectors of L^-1 C. What a component gains on other tokens is one
number, since outputs of different components are orthogonal, so every rank is judged at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from suture.ridge import truncated

RIDGES = (0.01, 0.1, 0.3, 1.0, 3.0)
BLOCKS = 4  # of a Gram matrix: 10 of 16 are computed
EVERY = 4  # layers between two choices of a ridge


@dataclass(frozen=True)
class Normal:
    """Sums over tokens, which add over batches, prompts and domains.

    Attributes:
        gram: [in, in] sum of a a^T, tokens that are to stay as they are included.
        cross: [in, out] sum of a y^T; power: sum of ||y||^2; trace: sum of ||a||^2; weight: how many tokens.
    """

    gram: Tensor
    cross: Tensor
    power: float
    trace: float
    weight: float

    @classmethod
    def of(cls, a: Tensor, y: Tensor, usual: Tensor) -> Normal:
        """Of tokens: a [n, in], y [n, out], and [n] whether a token is to be corrected.

        One that is not, an attention sink, counts with y = 0: what enters there is large, so that a map that would
        change it is dear, and its y says nothing about other tokens. Products are in float32, sums in float64.
        """
        a, y = a.float(), y.float() * usual[:, None]
        # sinks may be a thousand times as large: in float32 their rounding would drown what the other tokens say
        large = a[~usual].to(wide_of(a))  # [few, in]
        a = a * usual[:, None]
        wide = wide_of(a)
        return cls(
            gram(a).to(wide) + large.T @ large,
            (a.T @ y).to(wide),
            float(y.square().sum(dtype=wide)),
            float(a.square().sum(dtype=wide)),
            float(usual.sum()),
        )

    @classmethod
    def gram_of(cls, a: Tensor) -> Normal:
        """Of inputs [n, in] alone; `between` adds what they should give."""
        wide = wide_of(a)
        sums = gram(a.float()).to(wide)
        return cls(sums, sums.new_zeros(len(sums), 0), 0.0, float(sums.diagonal().sum()), float(len(a)))

    @classmethod
    def between(cls, inputs: Normal, difference: Tensor) -> Normal:
        """Of y = D a, D [out, in] the merged weight less the target's."""
        d = difference.to(inputs.gram)
        cross = inputs.gram @ d.T  # [in, out]
        return cls(inputs.gram, cross, float((cross * d.T).sum()), inputs.trace, inputs.weight)

    def __add__(self, other: Normal) -> Normal:
        return Normal(
            self.gram + other.gram,
            self.cross + other.cross,
            self.power + other.power,
            self.trace + other.trace,
            self.weight + other.weight,
        )

    def __mul__(self, factor: float) -> Normal:
        gram, cross = self.gram * factor, self.cross * factor
        return Normal(gram, cross, self.power * factor, self.trace * factor, self.weight * factor)


def wide_of(tensor: Tensor) -> torch.dtype:
    """float64 where a device has it."""
    return torch.float64 if tensor.device.type != "mps" else torch.float32


def gram(a: Tensor) -> Tensor:
    """[in, in] sum of a a^T over the rows of [n, in]: blocks of one half, the other is their mirror image."""
    width = a.shape[1]
    edges = [width * step // BLOCKS for step in range(BLOCKS + 1)]
    found = a.new_empty(width, width)
    for start, end in itertools.pairwise(edges):
        rows = a[:, start:end].T @ a[:, start:]  # [end - start, width - start]
        found[start:end, start:] = rows
        found[start:, start:end] = rows.T
    return found


class Fit:
    """The solution for one ridge.

    Raises:
        ValueError: when no token has weight, or the inputs are zero throughout.
    """

    def __init__(self, normal: Normal, ridge: float) -> None:
        level = normal.trace / len(normal.gram)  # the mean diagonal, without tokens that are to stay as they are
        if not level > 0:
            raise ValueError("nothing enters this linear")
        self.normal, self.ridge = normal, ridge
        # the least ridge keeps directions that no token has from blowing up; rounding may ask for more
        strength = max(ridge, 1e-8) * level
        eye = torch.eye(len(normal.gram)).to(normal.gram)
        self.root, failed = torch.linalg.cholesky_ex(normal.gram + strength * eye)  # L
        while int(failed):
            strength *= 10
            self.root, failed = torch.linalg.cholesky_ex(normal.gram + strength * eye)
        self.white = torch.linalg.solve_triangular(self.root, normal.cross, upper=False)  # L^-1 C, [in, out]
        self._basis: Tensor | None = None

    @cached_property
    def full(self) -> Tensor:
        """M [in, out]."""
        found: Tensor = torch.linalg.solve_triangular(self.root.T, self.white, upper=True)
        return found

    def basis(self, rank: int) -> Tensor:
        """[out, rank] V, what is explained most first."""
        if self._basis is None or self._basis.shape[1] < rank:
            self._basis = truncated(self.white, rank)[2]
        return self._basis[:, :rank]

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """(down [rank, in], up [out, rank]) with up @ down = M_rank^T."""
        chosen = self.basis(rank)
        return self._mapped(chosen).T, chosen

    def _mapped(self, directions: Tensor) -> Tensor:
        """M V, [in, rank], without M."""
        found: Tensor = torch.linalg.solve_triangular(self.root.T, self.white @ directions, upper=True)
        return found

    def error(self, other: Normal) -> float:
        """Share of y that is left on other tokens at full rank: 1 is no correction."""
        return self._left(other, (self.full * other.cross).sum(), ((other.gram @ self.full) * self.full).sum())

    def errors(self, other: Normal, most: int) -> Tensor:
        """[most + 1] the same at each rank from 0 to `most`."""
        directions = self.basis(most)  # V, [out, most]
        mapped = self._mapped(directions)  # [in, most]
        linear = (mapped * (other.cross @ directions)).sum(0)  # [most]
        square = ((other.gram @ mapped) * mapped).sum(0)  # [most]
        gain = torch.cumsum(2 * linear - square, 0) / max(other.power, 1e-30)
        return torch.cat([gain.new_ones(1), 1 - gain]).cpu()

    def _left(self, other: Normal, linear: Tensor, square: Tensor) -> float:
        return float(1 - (2 * linear - square) / max(other.power, 1e-30))


class Chooser:
    """Chooses ridge and rank on held-back tokens; the ridges of one kind of linear are alike from layer to layer.

    Args:
        ridges: strengths to choose from. All are tried at a kind's first linear and at each fourth one after it; the
            others take the last choice.
    """

    def __init__(self, ridges: Sequence[float] = RIDGES) -> None:
        self.ridges = tuple(ridges)
        self.seen: dict[str, tuple[int, float]] = {}  # kind → how many so far, the ridge chosen last

    def choose(
        self, kind: str, fitted: Normal, held: Sequence[Normal], most: int | None
    ) -> tuple[Fit, int | None, float]:
        """Fit with the ridge, and at the rank up to `most`, that leave the least on held-back tokens.

        Args:
            kind: of linear, for example `down_proj`.
            fitted: sums to fit on.
            held: sums of held-back tokens, one a domain: their shares count alike. Without any: ridge 1, all the rank.
            most: greatest rank; None is full rank, which is then never lowered.

        Returns:
            (the fit, its rank, mean share of y that is left on the held-back tokens).
        """
        if not held:
            return Fit(fitted, 1.0), most, float("nan")
        count, last = self.seen.get(kind, (0, 1.0))
        found = [_judged(fitted, held, most, ridge) for ridge in (self.ridges if count % EVERY == 0 else (last,))]
        best = min(found, key=lambda each: each[2])
        self.seen[kind] = (count + 1, best[0].ridge)
        return best


def _judged(fitted: Normal, held: Sequence[Normal], most: int | None, ridge: float) -> tuple[Fit, int | None, float]:
    fit = Fit(fitted, ridge)
    if most is None:
        return fit, None, sum(fit.error(each) for each in held) / len(held)
    errors = torch.stack([fit.errors(each, most) for each in held]).mean(0)  # [most + 1]
    # a rank that gains less than a thousandth is not worth its parameters
    rank = int((errors <= errors.min() + 1e-3).nonzero()[0, 0])
    return fit, rank, float(errors[rank])
