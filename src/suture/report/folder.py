"""The folder of a run: scores, tables, figures, modules and provenance, each file written whole."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from suture.bias import BiasReport
from suture.evaluate.heldout import Score
from suture.history import read_history
from suture.report.figures import draw_bias, draw_entropy, draw_losses, draw_scores
from suture.report.tables import CORRECTIONS, HEADER, caption, correction_rows, markdown_table, score_rows, verdicts
from suture.store import Artifact, replaced_folder, write_json, write_text


def write_folder(
    folder: Path,
    *,
    name: str,
    scores: Sequence[Score],
    reports: Mapping[str, BiasReport],
    biases: Mapping[str, Artifact],
    surgeries: Mapping[str, Mapping[str, Artifact]],
    about: Sequence[str],
) -> None:
    """Write a run's folder; what a stopped earlier run left there is replaced file by file."""
    write_json(folder / "scores.json", [score.row() for score in scores])
    for domain, artifact in biases.items():
        with replaced_folder(folder / "bias" / domain) as work:
            shutil.copytree(artifact.path, work, dirs_exist_ok=True)
    histories: dict[str, dict[str, Mapping[str, Any]]] = {}
    for domain, modules in surgeries.items():
        for label, artifact in modules.items():
            with replaced_folder(folder / "surgery" / domain / label) as work:
                # a patch of full matrices is as large as the model: `suture heal` folds it into a checkpoint
                left = shutil.ignore_patterns("patch.safetensors")
                shutil.copytree(artifact.path, work, dirs_exist_ok=True, ignore=left)
            histories.setdefault(domain, {})[label] = read_history(artifact, domain)
    figures = folder / "figures"
    draw_scores(scores, figures / "scores.png")
    draw_bias(reports, figures / "bias.png")
    draw_entropy(reports, figures / "entropy.png")
    losses = {
        domain: {label: history["losses"] for label, history in made.items()} for domain, made in histories.items()
    }
    draw_losses(losses, figures / "losses.png")
    write_text(folder / "report.md", _markdown(name, scores, reports, histories, about))


def _markdown(
    name: str,
    scores: Sequence[Score],
    reports: Mapping[str, BiasReport],
    histories: Mapping[str, Mapping[str, Mapping[str, Any]]],
    about: Sequence[str],
) -> str:
    rows = []
    for domain, report in reports.items():
        found = report.summary()
        rows.append(
            (
                domain,
                str(found["tokens"]),
                *(f"{found[key]:.4f}" if found[key] is not None else "" for key in ("mean", "early", "late")),
                f"{found['late_over_early']:.2f}" if found["late_over_early"] else "",
                f"{100 * found['slope']:+.1f}%" if found["slope"] is not None else "",
            )
        )
    header = ("domain", "tokens", "mean δ", "δ at 0-49", "δ at 100-255", "late / early", "slope per 100 positions")
    parts = [
        f"# {name}\n",
        "\n".join(f"- {line}" for line in about) + "\n",
        f"## {caption(scores)}\n",
        "On text that each target wrote for prompts that nobody calibrated on. KL is to the target, in nats; "
        "`gap closed` is (merged - model) / (merged - target) in KL; `agreement` is how often both would write one "
        "token; `ρ L1` is the share of the L1 bias δ of the final hidden states that is removed, and "
        "`ρ L1 calibration` the same on the text that a correction was trained on.\n",
        markdown_table(HEADER, score_rows(scores)),
        "\n".join(f"- {line}" for line in verdicts(scores)) + "\n",
        "![scores](figures/scores.png)\n",
        "## Corrections\n",
        "`strength` was chosen on calibration prompts that were held back (KL there beside that of the uncorrected "
        "model, in nats); where it is empty nothing was held back for that.\n",
        markdown_table(CORRECTIONS, correction_rows(histories)),
        "## Bias of the merged model\n",
        markdown_table(header, rows, left=1),
        "![bias](figures/bias.png)\n",
        "![entropy](figures/entropy.png)\n",
        "Training losses, each of its own kind: lines of different losses do not compare.\n",
        "![losses](figures/losses.png)\n",
    ]
    return "\n".join(parts)
