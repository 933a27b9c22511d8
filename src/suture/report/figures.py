"""Figures as PNG, drawn by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from suture.bias import EARLY, LATE, BiasReport
from suture.evaluate.heldout import GUARD, Score

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
COLOURS = {"target": "#9ca3af", "merged": "#1f2430"}
SURGERIES = (
    "#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#0891b2", "#65a30d", "#dc2626", "#a16207", "#4338ca",
)  # fmt: skip
MANY = 4  # bars a domain, above which their figures stand upright
METRICS = {
    "kl": "KL to the target (nats), lower is better",
    "agreement": "top-1 agreement with the target, higher is better",
    "perplexity": "perplexity on the target's text, the target's is best",
    "rho_l1": "share of L1 bias removed (ρ), higher is better",
}


def figure_of(rows: int, columns: int, width: float, height: float, **more: Any) -> tuple[Any, Any]:
    """A figure with a grid of axes, in the project's style."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "font.size": 9,
            "axes.edgecolor": MUTED,
            "axes.labelcolor": INK,
            "text.color": INK,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
        }
    )
    figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **more)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure and let it go."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def colours(names: Sequence[str]) -> dict[str, str]:
    """A fixed colour for each model of a comparison."""
    others = [name for name in names if name not in COLOURS]
    return {**COLOURS, **{name: SURGERIES[index % len(SURGERIES)] for index, name in enumerate(others)}}


def draw_bias(reports: Mapping[str, BiasReport], path: Path) -> None:
    """Figure 1 of the paper: heat map by sample and position, and the mean with its spread, a column a domain."""
    figure, axes = figure_of(2, len(reports), 4.2 * len(reports), 5.6, height_ratios=(3, 2))
    top = max(float(np.nanpercentile(report.heat_map().numpy(), 98)) for report in reports.values())
    image = None
    for column, (name, report) in enumerate(reports.items()):
        heat, curve = axes[0][column], axes[1][column]
        grid = report.heat_map().numpy()
        image = heat.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
        heat.set_title(name, loc="left", fontweight="bold")
        heat.set_ylabel("sample" if column == 0 else "")
        found = {key: value.numpy() for key, value in report.curve().items()}
        enough = found["count"] >= 2
        place, mean, spread = found["position"][enough], found["mean"][enough], found["std"][enough]
        curve.fill_between(place, mean - spread, mean + spread, color="#93c5fd", alpha=0.5, linewidth=0)
        curve.plot(place, mean, color="#1d4ed8", linewidth=1.2)
        curve.set_xlim(0, grid.shape[1] - 1)
        curve.set_ylim(bottom=0)
        curve.grid(axis="y", color=GRID)
        curve.set_xlabel("position")
        curve.set_ylabel("bias δ (mean ± s.d.)" if column == 0 else "")
        ratio = report.summary()["late_over_early"]
        said = (
            f"at {LATE[0]}-{LATE[1] - 1} over 0-{EARLY[1] - 1}: {ratio:.2f}x"
            if ratio
            else f"no text reaches position {LATE[0]}"
        )
        curve.set_title(said, loc="left", color=MUTED)
    figure.colorbar(image, ax=list(axes[0]), label="bias δ", shrink=0.9)
    figure.suptitle("Bias of the merged model's final hidden states, on held-out text", x=0.01, ha="left")
    save_figure(figure, path)


def draw_entropy(reports: Mapping[str, BiasReport], path: Path) -> None:
    """Figure 2 of the paper: entropy along one text, and what one size of perturbation does by entropy."""
    figure, axes = figure_of(2, len(reports), 4.2 * len(reports), 5.0)
    for column, (name, report) in enumerate(reports.items()):
        along, effect = axes[0][column], axes[1][column]
        if report.entropy is not None:
            first = report.sample == 0
            along.bar(report.position[first].numpy(), report.entropy[first].numpy(), width=1.0, color="#7c3aed")
        along.set_title(name, loc="left", fontweight="bold")
        along.set_xlabel("position in the first held-out text")
        along.set_ylabel("target's entropy (nats)" if column == 0 else "")
        rows = report.sensitivity
        place = np.arange(len(rows))
        effect.bar(place - 0.2, [row["kl"] for row in rows], width=0.4, color="#2563eb", label="KL (nats)")
        effect.bar(
            place + 0.2, [row["flipped"] for row in rows], width=0.4, color="#d97706", label="argmax changed (share)"
        )
        effect.set_xticks(place, [f"{row['entropy']:.2f}" for row in rows])
        effect.set_xlabel("mean entropy of a quarter of the tokens (nats)")
        effect.grid(axis="y", color=GRID)
        effect.set_axisbelow(True)
        if column == 0:
            effect.legend(frameon=False)
            effect.set_ylabel("effect of a perturbation\nas large as the bias")
    figure.suptitle("Entropy of the target, and what an error of one size does by entropy", x=0.01, ha="left")
    save_figure(figure, path)


def draw_scores(scores: Sequence[Score], path: Path) -> None:
    """The four held-out metrics, a panel each, a group of bars a domain."""
    held = [score for score in scores if score.split == "heldout" and score.domain != GUARD]
    domains = list(dict.fromkeys(score.domain for score in held))
    models = list(dict.fromkeys(score.model for score in held))
    paint = colours(models)
    figure, axes = figure_of(2, 2, 10.5, 6.4)
    for axis, (metric, title) in zip(axes.flat, METRICS.items(), strict=True):
        value = {(score.domain, score.model): score.value for score in held if score.metric == metric}
        # the target is 0 or 1 by definition everywhere but in perplexity
        shown = (
            models
            if metric == "perplexity"
            else [m for m in models if m != "target" and (m, metric) != ("merged", "rho_l1")]
        )
        width = 0.8 / max(len(shown), 1)
        for index, model in enumerate(shown):
            heights = [value[domain, model] for domain in domains]
            place = np.arange(len(domains)) - 0.4 + width * (index + 0.5)
            bars = axis.bar(place, heights, width=0.92 * width, color=paint[model], label=model)
            texts = [f"{height:.2g}" if abs(height) < 0.1 else f"{height:.3g}" for height in heights]
            turned = 90 if len(shown) > MANY else 0
            axis.bar_label(bars, texts, fontsize=7, color=MUTED, padding=2, rotation=turned)
        axis.axhline(0, color=MUTED, linewidth=0.8)
        axis.set_xticks(np.arange(len(domains)), domains)
        axis.set_title(title, loc="left")
        axis.grid(axis="y", color=GRID)
        axis.set_axisbelow(True)
        axis.margins(y=0.25 if len(shown) > MANY else 0.12)
    handles, labels = axes.flat[2].get_legend_handles_labels()  # perplexity shows every model
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle("Held-out text: what each target wrote for prompts that nobody calibrated on", x=0.01, ha="left")
    save_figure(figure, path)


def draw_losses(histories: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Training loss by step, a panel a domain, a line a surgery."""
    figure, axes = figure_of(1, len(histories), 4.2 * len(histories), 3.0, sharey=False)
    names = list(dict.fromkeys(name for found in histories.values() for name in found))
    paint = colours(names)
    for column, (domain, found) in enumerate(histories.items()):
        axis = axes[0][column]
        for name, losses in found.items():
            if not losses:  # solved, not trained
                continue
            axis.plot(losses, color=paint[name], linewidth=0.9, label=name)
        axis.set_title(domain, loc="left", fontweight="bold")
        axis.set_xlabel("step")
        axis.grid(axis="y", color=GRID)
        if column == 0:
            axis.set_ylabel("training loss")
            if axis.lines:
                axis.legend(frameon=False)
    save_figure(figure, path)
