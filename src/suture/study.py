"""Studies: one recipe with many corrections, and what each buys for its size, its time and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from suture.checkpoint import parse_reference, resolve
from suture.corrections import Surgery
from suture.errors import RecipeError
from suture.evaluate.heldout import gap_closed
from suture.history import read_history
from suture.pipeline import Run
from suture.recipe import Recipe
from suture.report.study import draw_study
from suture.report.tables import markdown_table
from suture.store import versions, write_json, write_text

BUDGETS = (0.001, 0.003, 0.0075, 0.03)  # of the model's parameters
RANKS = (1, 4, 16, 64)  # at the last layer
SHARES = (0.1, 0.25, 0.5)  # of the calibration prompts
HEADER = ("domain", "correction", "parameters", "tokens", "seconds", "KL to target", "gap closed")


@dataclass(frozen=True)
class Point:
    """One correction of one domain.

    Attributes:
        kind: what it is a variant of: points of one kind are one line of the figure.
        parameters: numbers that it adds, or changes (`heal`).
        tokens: of calibration text that it was fitted on.
        seconds: of fitting, capture excluded.
        kl: to the target on held-out text, nats; closed: share of the merged model's that is gone.
    """

    domain: str
    correction: str
    kind: str
    parameters: int
    tokens: int
    seconds: float
    kl: float
    closed: float | None


def variants(samples: int, width: int, modules: Sequence[str] | None) -> list[Surgery]:
    """The corrections that are compared: each at several sizes, and the strongest on less text.

    Args:
        samples: calibration prompts a domain.
        width: H, the greatest rank at the last layer.
        modules: only these; all by default.

    Raises:
        RecipeError: when none is left.
    """
    paper = {"calibrate_on": "prompts", "gate": False, "samples": samples}
    found = [
        Surgery(module="darts", name="darts", **paper),
        Surgery(module="standard", name="standard-l1", **paper),
        Surgery(module="standard", name="standard-responses", samples=samples),
    ]
    for rank in [*(rank for rank in RANKS if rank < width), width]:
        found.append(Surgery(module="affine", rank=rank, name=f"affine-{rank}", samples=samples))
    for budget in BUDGETS:
        for module in ("deep", "svd", "asvd"):
            found.append(Surgery(module=module, budget=budget, name=f"{module}-{100 * budget:g}", samples=samples))
    found.append(Surgery(module="distil", budget=BUDGETS[2], name="distil", samples=samples))
    found.append(Surgery(module="heal", name="heal", samples=samples))
    for share in SHARES:
        few = max(4, round(share * samples))
        found.append(Surgery(module="affine", rank=min(16, width), name=f"affine-on-{few}", samples=few))
        found.append(Surgery(module="deep", budget=BUDGETS[2], name=f"deep-on-{few}", samples=few))
        found.append(Surgery(module="heal", name=f"heal-on-{few}", samples=few))
    if modules:
        found = [each for each in found if each.module in modules]
    if not found:
        raise RecipeError(f"no correction of the study is among {', '.join(modules or [])}")
    return list({each.label: each for each in found}.values())


def widened(recipe: Recipe, modules: Sequence[str] | None = None) -> Recipe:
    """A recipe with the study's corrections in place of its own; its models are looked up for their width."""
    first = next(iter(recipe.domains.values()))
    settings = resolve(parse_reference(first.target, recipe.folder)).text_config
    width = int(settings.get("hidden_size") or settings.get("n_embd") or RANKS[-1])
    recipe.surgery = variants(recipe.samples, width, modules)
    return recipe


def study_repair(job: Run, out: Path) -> list[Point]:
    """Make and score every correction of a widened recipe; write `study.json`, `study.md` and `study.png`."""
    job.capture()
    points = []
    for name, member in job.members.items():
        scores = job.score(member)
        made = job.corrections(member)
        kl = {score.model: score.value for score in scores if (score.metric, score.split) == ("kl", "heldout")}
        for surgery in job.recipe.surgery:
            history = read_history(made[surgery.label], name)
            points.append(
                Point(
                    name,
                    surgery.label,
                    surgery.module,
                    history["parameters"],
                    history["calibration_tokens"],
                    history["seconds"],
                    kl[surgery.label],
                    gap_closed(scores, name, surgery.label),
                )
            )
    job.release()
    write_json(out / "study.json", {"points": [asdict(point) for point in points], "versions": versions()})
    write_text(out / "study.md", f"# {job.recipe.name}\n\n" + markdown_table(HEADER, rows(points)))
    draw_study(points, out / "study.png")
    return points


def rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """The points as a table."""
    return [
        (
            point.domain,
            point.correction,
            f"{point.parameters:,}",
            f"{point.tokens:,}",
            f"{point.seconds:.1f}",
            f"{point.kl:.4f}",
            "" if point.closed is None else f"{100 * point.closed:.1f}%",
        )
        for point in points
    ]


def document(points: Sequence[Point]) -> dict[str, Any]:
    """As plain data, for `--json`."""
    return {"points": [asdict(point) for point in points]}
