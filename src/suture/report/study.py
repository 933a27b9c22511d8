"""The figure of a study: gap closed against parameters, seconds and calibration tokens, a row a domain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from suture.report.figures import GRID, MUTED, colours, figure_of, save_figure

AXES = {
    "parameters": "parameters of the correction",
    "seconds": "seconds to fit it, capture excluded",
    "tokens": "tokens that it was fitted on",
}


class Plotted(Protocol):
    """What is drawn of a correction."""

    @property
    def domain(self) -> str: ...
    @property
    def correction(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def closed(self) -> float | None: ...


def draw_study(points: Sequence[Plotted], path: Path) -> None:
    """Draw the points; those of one kind are joined where the text is the same."""
    domains = list(dict.fromkeys(point.domain for point in points))
    kinds = list(dict.fromkeys(point.kind for point in points))
    paint = colours(kinds)
    figure, axes = figure_of(len(domains), len(AXES), 4.2 * len(AXES), 3.2 * len(domains))
    for row, domain in enumerate(domains):
        for column, (field, title) in enumerate(AXES.items()):
            axis = axes[row][column]
            for kind in kinds:
                found = [point for point in points if (point.domain, point.kind) == (domain, kind)]
                few = [point for point in found if "-on-" in point.correction]
                _line(axis, [point for point in found if point not in few], field, paint[kind], kind, "o")
                _line(axis, few, field, paint[kind], None, "x")
            axis.set_xscale("log")
            axis.axhline(100, color=MUTED, linewidth=0.8, linestyle=":")
            axis.axhline(0, color=MUTED, linewidth=0.8)
            axis.grid(color=GRID)
            axis.set_axisbelow(True)
            axis.set_xlabel(title if row == len(domains) - 1 else "")
            if column == 0:
                axis.set_ylabel("KL gap closed (%)")
                axis.set_title(domain, loc="left", fontweight="bold")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle("What a correction buys on held-out text (x: fitted on fewer prompts)", x=0.01, ha="left")
    save_figure(figure, path)


def _line(axis: Any, points: Sequence[Any], field: str, colour: str, label: str | None, marker: str) -> None:
    found = sorted((getattr(point, field), 100 * point.closed) for point in points if point.closed is not None)
    if found:
        across, up = zip(*found, strict=True)
        style = "-" if field == "parameters" and marker == "o" else ""
        axis.plot(across, up, marker=marker, markersize=4, linestyle=style, color=colour, label=label, linewidth=1)
