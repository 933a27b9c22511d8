"""The folder of a run: scores, tables, figures, modules and provenance, each file written whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from suture.bias import BiasReport
from suture.evaluate.heldout import Score
from suture.report.figures import draw_bias, draw_entropy, draw_losses, draw_scores
from suture.report.tables import HEADER, markdown_table, score_rows, verdicts
from suture.store import Artifact, replaced_folder, write_json, write_text


def write_folder(
    folder: Path,
    *,
    name: str,
    scores: Sequence[Score],
    reports: Mapping[str, BiasReport],
    biases: Mapping[str, Artifact],
    surgeries: Mapping[str, Mapping[str, Artifact]],
) -> None:
    """Write a run's folder; what a stopped earlier run left there is replaced file by file."""
    write_json(folder / "scores.json", [score.row() for score in scores])
    for domain, artifact in biases.items():
        with replaced_folder(folder / "bias" / domain) as work:
            shutil.copytree(artifact.path, work, dirs_exist_ok=True)
    histories: dict[str, dict[str, list[float]]] = {}
    for domain, modules in surgeries.items():
        for label, artifact in modules.items():
            with replaced_folder(folder / "surgery" / domain / label) as work:
                shutil.copytree(artifact.path, work, dirs_exist_ok=True)
            histories.setdefault(domain, {})[label] = json.loads((artifact.path / "history.json").read_text())["losses"]
    figures = folder / "figures"
    draw_scores(scores, figures / "scores.png")
    draw_bias(reports, figures / "bias.png")
    draw_entropy(reports, figures / "entropy.png")
    draw_losses(histories, figures / "losses.png")
    write_text(folder / "report.md", _markdown(name, scores, reports))


def _markdown(name: str, scores: Sequence[Score], reports: Mapping[str, BiasReport]) -> str:
    rows = []
    for domain, report in reports.items():
        found = report.summary()
        rows.append(
            (
                domain,
                str(found["tokens"]),
                *(f"{found[key]:.4f}" if found[key] is not None else "" for key in ("mean", "early", "late")),
                f"{found['late_over_early']:.2f}" if found["late_over_early"] else "",
                f"{100 * found['slope']:+.1f}%",
            )
        )
    header = ("domain", "tokens", "mean δ", "δ at 0-50", "δ at 100-256", "late / early", "slope per 100 positions")
    parts = [
        f"# {name}\n",
        "Held-out figures: on text that each target wrote for prompts that nobody calibrated on. "
        "`gap closed` is (merged - model) / (merged - target) in KL.\n",
        markdown_table(HEADER, score_rows(scores)),
        "\n".join(f"- {line}" for line in verdicts(scores)) + "\n",
        "![scores](figures/scores.png)\n",
        "## Bias of the merged model\n",
        markdown_table(header, rows, left=1),
        "![bias](figures/bias.png)\n",
        "![entropy](figures/entropy.png)\n",
        "![losses](figures/losses.png)\n",
    ]
    return "\n".join(parts)
