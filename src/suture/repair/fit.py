"""Closed-form repair inside the layers: one pass, no gradients; each linear is fitted with all earlier ones corrected.

At a linear that writes to the residual stream, a is what enters it, x the merged model's residual stream behind it, x*
the target's at the same place on the same tokens: what the weight should do otherwise is the ridge regression of x - x*
on a. Any other linear has no x*, but the target has its weight W*: there it is the ridge regression of (W - W*) a on a,
which for several domains is the compromise between their weights that moves their outputs least. Fitted on one domain
at low rank this is a LoRA adapter (`deep`), on all domains jointly at full rank a plain checkpoint (`heal`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from suture.errors import SurgeryError
from suture.layers import Batch, Layers
from suture.progress import SILENT, Progress
from suture.repair.normal import RIDGES, Chooser, Fit, Normal
from suture.repair.patch import Change, Patch, add, weight_of
from suture.states import Tokens
from suture.wiring import Writer, shape_of

MASSIVE = 10.0  # times the median norm of the residual: above it a token is an attention sink


@dataclass(frozen=True)
class Lesson:
    """What one domain teaches.

    Attributes:
        name: of the domain.
        tokens: calibration text: prompts and what the target wrote.
        residual: (layer, writer) → [N, H] the target's residual stream behind that linear.
        weights: path of a linear → its weight in the target, or None where that is not known; without any, only
            linears that write to the residual stream are changed.
        itself: whether the target is the model itself as it was: its text holds the changes back.
        held: how many of the last sequences are held back: ridge and rank are chosen there.
        weight: of this domain among all.
    """

    name: str
    tokens: Tokens
    residual: Callable[[int, int], Tensor]
    held: int
    weights: Callable[[str], Tensor | None] | None = None
    itself: bool = False
    weight: float = 1.0


@dataclass(frozen=True)
class Repaired:
    """A patch, the final states of each domain's text under it, and what was chosen at each linear.

    Attributes:
        patch: rounded to the dtype it is stored in.
        states: domain → [N, H] final states of the patched model on the calibration text.
        choices: a row a linear: name, ridge, rank (None: full), and `left`, the share of x - x* that is left on
            held-back tokens.
    """

    patch: Patch
    states: dict[str, Tensor]
    choices: list[dict[str, Any]]


@torch.inference_mode()
def repair(
    layers: Layers,
    lessons: Sequence[Lesson],
    *,
    rank: int | None,
    only: Sequence[str] = (),
    dtype: torch.dtype = torch.bfloat16,
    ridges: Sequence[float] = RIDGES,
    progress: Progress = SILENT,
    stage: str = "repair",
) -> Repaired:
    """Fit a patch on one or several domains; the model's weights are afterwards what they were.

    Args:
        rank: mean rank of the changes; None fits full matrices.
        only: last parts of the paths of linears to change, for example `down_proj`; all by default.
        dtype: what the changes are rounded to; the rounded ones are in force in the rest of the pass.
        ridges: strengths to choose from.

    Raises:
        SurgeryError: for a model without linears that can be changed.
    """
    kept: dict[str, Tensor] = {}
    try:
        return _Pass(layers, lessons, rank, only, dtype, ridges, kept).run(progress, stage)
    finally:
        for name, before in kept.items():
            weight_of(layers.model, name).copy_(before)


class _Pass:
    """One pass through the layers of a merged model with the texts of all domains."""

    def __init__(
        self,
        layers: Layers,
        lessons: Sequence[Lesson],
        rank: int | None,
        only: Sequence[str],
        dtype: torch.dtype,
        ridges: Sequence[float],
        kept: dict[str, Tensor],
    ) -> None:
        self.layers, self.dtype, self.kept = layers, dtype, kept
        self.only = tuple(only)
        self.pupils = [Pupil(layers, lesson) for lesson in lessons]
        self.changes: dict[str, Change] = {}
        self.transposed: set[str] = set()
        self.choices: list[dict[str, Any]] = []
        self.chooser = Chooser(ridges)
        shapes = {path: shape_of(module) for path, module in layers.linears(only).items()}
        if not shapes:
            raise SurgeryError(
                f"{type(layers.model).__name__} has no linear that can be repaired"
                + (f" among {', '.join(only)}" if only else "")
            )
        self.budget = Budget(rank, {path: sum(shape) for path, shape in shapes.items()})

    def _wanted(self, path: str) -> bool:
        return not self.only or path.rsplit(".", 1)[-1] in self.only

    def run(self, progress: Progress, stage: str) -> Repaired:
        """All layers, in order."""
        with progress.stage(stage, len(self.layers)) as advance:
            for index in range(len(self.layers)):
                self._layer(index)
                advance(1)
        states = {
            pupil.lesson.name: self.layers.finish(pupil.batches, len(pupil.lesson.tokens.ids)) for pupil in self.pupils
        }
        return Repaired(Patch(self.changes, frozenset(self.transposed)), states, self.choices)

    def _layer(self, index: int) -> None:
        writers, segments = self.layers.writers[index], self.layers.readers[index]
        for place, segment in enumerate(segments):
            for group in segment:
                self._read(index, group)
            if place == len(writers):
                break
            writer = writers[place]
            last = place + 1 == len(writers) and self.layers.closed[index]
            if not self._wanted(writer.name) and not last:
                continue
            sums = [pupil.study(index, writers[: place + 1], place, keep=last) for pupil in self.pupils]
            change = self._solve(writer.name, writer.linear, sums, writer.scale) if self._wanted(writer.name) else None
            if last:
                for pupil in self.pupils:
                    pupil.move(writer, change)
                return
        for pupil in self.pupils:
            pupil.rerun(index)

    def _read(self, index: int, group: list[tuple[str, Any]]) -> None:
        """Linears that read one tensor: one Gram matrix serves them all."""
        wanted = [(path, module) for path, module in group if self._wanted(path)]
        compared = [
            (path, module, [pupil.difference(path, module) for pupil in self.pupils]) for path, module in wanted
        ]
        known = [each for each in compared if all(difference is not None for difference in each[2])]
        for path, _, differences in compared:
            if any(difference is None for difference in differences):
                self._note(path)  # others may use its share
        if not known:
            return
        grams = [pupil.grams(index, group[0][1]) for pupil in self.pupils]
        for path, module, differences in known:
            sums = [
                (Normal.between(one, difference), Normal.between(two, difference))
                for (one, two), difference in zip(grams, differences, strict=True)
                if difference is not None
            ]
            self._solve(path, module, sums, 1.0)

    def _solve(self, path: str, module: Any, sums: Sequence[tuple[Normal, Normal]], scale: float) -> Change | None:
        """Change a linear, where that helps on held-back tokens."""
        weights = [pupil.lesson.weight for pupil in self.pupils]
        # domains count alike, however long their texts are
        parts = [one * (weight / max(one.weight, 1.0)) for (one, _), weight in zip(sums, weights, strict=True)]
        total = sum(parts[1:], start=parts[0])
        held = [two for (_, two), pupil in zip(sums, self.pupils, strict=True) if pupil.lesson.held and two.power > 0]
        most = self.budget.rank(path, min(shape_of(module)), sum(one.weight for one, _ in sums))
        choice: dict[str, Any] = {}
        change = None
        if most != 0 and total.trace > 0 and total.power > 0:
            fit, rank, left = self.chooser.choose(path.rsplit(".", 1)[-1], total, held, most)
            if rank != 0 and not left >= 1:
                choice = {"ridge": fit.ridge, "rank": rank, "left": left}
                change = self._change(fit, rank, scale)
        self._note(path, **choice)
        if change is not None:
            self.changes[path] = change
            if not isinstance(module, torch.nn.Linear):
                self.transposed.add(path)
            self.kept[path] = module.weight.detach().clone()
            add(module.weight, Patch({path: change}, frozenset(self.transposed)).delta(path))
        return change

    def _note(self, path: str, ridge: float | None = None, rank: int | None = 0, left: float = 1.0) -> None:
        self.budget.spend(path, rank)
        self.choices.append({"linear": path, "ridge": ridge, "rank": rank, "left": left})

    def _change(self, fit: Fit, rank: int | None, scale: float) -> Change:
        # the linear's output is scaled before it enters the residual
        if rank is None:
            return Change((-fit.full.T / scale).to("cpu", self.dtype))
        down, up = fit.factors(rank)
        return Change((-up / scale).to("cpu", self.dtype), down.to("cpu", self.dtype))


class Budget:
    """Parameters that low-rank changes may hold in all: what one linear leaves over, later ones may use."""

    def __init__(self, ranks: int | None, costs: dict[str, int]) -> None:
        self.ranks, self.costs = ranks, costs
        self.free = (ranks or 0) * sum(costs.values())

    def rank(self, path: str, widest: int, tokens: float) -> int | None:
        """The greatest rank for a linear now; fewer tokens than a rank cannot fill it."""
        if self.ranks is None:
            return None
        fair = self.free // max(sum(self.costs.values()), 1)
        return int(max(0, min(fair, tokens - 1, widest)))

    def spend(self, path: str, rank: int | None) -> None:
        """Note what a linear has taken."""
        self.free -= (rank or 0) * self.costs.pop(path)


class Pupil:
    """One domain's text on its way through the layers."""

    def __init__(self, layers: Layers, lesson: Lesson) -> None:
        self.layers, self.lesson = layers, lesson
        self.batches = layers.begin(lesson.tokens)
        self.kept: list[tuple[Batch, Tensor, Tensor]] = []
        lengths = lesson.tokens.lengths
        # rows from here on are held back
        self.border = int(lengths[: len(lengths) - lesson.held].sum())

    def study(self, index: int, writers: Sequence[Writer], place: int, *, keep: bool) -> tuple[Normal, Normal]:
        """(sums of the tokens to fit on, sums of those held back) at the last of some writers of a layer."""
        wanted = self.lesson.residual(index, place).to(self.layers.device)  # [N, H]
        norms = wanted.float().norm(dim=-1)  # [N]
        limit = MASSIVE * norms.median()
        rows, inputs, excess, normal = [], [], [], []
        self.kept = []
        for batch in self.batches:
            seen = self.layers.tap(index, batch, writers, whole=keep)
            entered = batch.flat(seen.inputs[-1].reshape(*batch.real.shape, -1))  # [n, in]
            left = seen.residual(batch, writers)  # [n, H]
            here = batch.rows.to(self.layers.device)
            rows.append(batch.rows)
            inputs.append(entered)
            excess.append(left.float() - wanted[here].float())
            normal.append((norms[here] <= limit) & (left.float().norm(dim=-1) <= limit))
            if keep and seen.out is not None:
                self.kept.append((batch, entered, seen.out))
        a, y, usual = torch.cat(inputs), torch.cat(excess), torch.cat(normal)  # [N, in], [N, H], [N]
        held = (torch.cat(rows) >= self.border).to(usual.device)
        one = Normal.of(a[~held], y[~held], usual[~held])
        two = Normal.of(a[held], y[held], usual[held])
        return one, two

    def move(self, writer: Writer, change: Change | None) -> None:
        """Let the text leave a layer that has run already, with its last linear's weight as it was."""
        for batch, entered, out in self.kept:
            batch.states = out
            if change is not None:
                batch.states = out.clone()
                batch.states[batch.real] += (writer.scale * change.apply(entered)).to(out.dtype)
        self.kept = []

    def rerun(self, index: int) -> None:
        """Let the text leave a layer, its linears as they are now."""
        for batch in self.batches:
            batch.states = self.layers.call(index, batch)

    def difference(self, path: str, module: Any) -> Tensor | None:
        """[out, in] merged - target of a weight; None where the target's is not known or has another shape."""
        if self.lesson.itself:
            return torch.zeros(shape_of(module)[::-1])
        wanted = self.lesson.weights(path) if self.lesson.weights is not None else None
        if wanted is None or wanted.shape != module.weight.shape:
            return None
        change: Tensor = module.weight.float() - wanted.to(module.weight.device).float()
        return change if isinstance(module, torch.nn.Linear) else change.T

    def grams(self, index: int, module: Any) -> tuple[Normal, Normal]:
        """(sums of what enters a linear on the tokens to fit on, on those held back)."""
        entered = torch.cat([self.layers.entering(index, batch, module) for batch in self.batches])  # [N, in]
        held = (torch.cat([batch.rows for batch in self.batches]) >= self.border).to(entered.device)
        return Normal.gram_of(entered[~held]), Normal.gram_of(entered[held])
