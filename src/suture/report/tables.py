"""Tables: held-out scores for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from suture.evaluate.heldout import GUARD, Score, gap_closed

WHOLE = 26  # characters that a cell may have to be kept on one line
HEADER = ("domain", "model", "KL to target", "gap closed", "agreement", "perplexity", "ρ L1", "ρ L1 calibration")


def score_rows(scores: Sequence[Score]) -> list[tuple[str, ...]]:
    """One row a domain and model: held-out figures, and rho on the calibration prompts beside them."""
    value = {(score.domain, score.model, score.metric, score.split): score.value for score in scores}
    rows: list[tuple[str, ...]] = []
    for domain, model in dict.fromkeys((score.domain, score.model) for score in scores if score.domain != GUARD):
        closed = gap_closed(list(scores), domain, model)
        rows.append(
            (
                domain,
                model,
                f"{value[domain, model, 'kl', 'heldout']:.4f}",
                "" if closed is None else f"{100 * closed:.1f}%",
                f"{100 * value[domain, model, 'agreement', 'heldout']:.1f}%",
                f"{value[domain, model, 'perplexity', 'heldout']:.3f}",
                f"{100 * value[domain, model, 'rho_l1', 'heldout']:.1f}%",
                f"{100 * value[domain, model, 'rho_l1', 'calibration']:.1f}%",
            )
        )
    return rows


FEW = 500  # scored tokens below which corrections cannot be told apart


def caption(scores: Sequence[Score]) -> str:
    """What the scores rest on."""
    counts = sorted({score.n_tokens for score in scores if score.split == "heldout" and score.domain != GUARD})
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"Held-out scores ({span} tokens a domain{', too few to rank corrections' if counts[0] < FEW else ''})"


def verdicts(scores: Sequence[Score]) -> list[str]:
    """A plain sentence for each domain and surgery: what it did to the held-out KL, worse included."""
    said = []
    for domain, model in dict.fromkeys((score.domain, score.model) for score in scores if score.domain != GUARD):
        closed = gap_closed(list(scores), domain, model)
        if model in ("target", "merged") or closed is None:
            continue
        if closed >= 0:
            said.append(f"{domain}: {model} closes {100 * closed:.1f}% of the merged model's held-out KL gap")
        else:
            said.append(f"{domain}: {model} makes the merged model worse (held-out KL gap {100 * -closed:.1f}% wider)")
    guard = {score.model: score.value for score in scores if score.domain == GUARD}
    for model, value in guard.items():
        if model != "merged":
            change = 100 * (value / guard["merged"] - 1)
            said.append(
                f"text of no domain: perplexity {value:.2f} with {model}, {guard['merged']:.2f} merged ({change:+.2f}%)"
            )
    return said


CORRECTIONS = ("domain", "correction", "parameters", "strength", "KL held back", "uncorrected", "seconds", "what")


def correction_rows(histories: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[tuple[str, ...]]:
    """One row a domain and correction, from its history: size, the gate's choice and what it rests on, time."""
    rows: list[tuple[str, ...]] = []
    for domain, made in histories.items():
        for label, history in made.items():
            gate = history.get("gate") or {}
            strength = history.get("strength")
            kl = gate.get("kl", {})
            rows.append(
                (
                    domain,
                    label,
                    f"{history['parameters']:,}",
                    "" if strength is None else f"{strength:g}",
                    "" if strength is None else f"{kl[f'{strength:g}']:.4f}",
                    f"{kl['0']:.4f}" if kl else "",
                    f"{history['seconds']:.1f}",
                    _what(history, strength),
                )
            )
    return rows


def _what(history: Mapping[str, Any], strength: float | None) -> str:
    """Whatever else a reader should know of one correction."""
    chosen = (history.get("auto") or {}).get("chosen")
    said = [f"chose {chosen['surgery']}" + (f" of rank {chosen['rank']}" if chosen["rank"] else "")] if chosen else []
    if strength == 0:
        said.append("no gain on held-back prompts beyond its error: the domain stays uncorrected")
    return "; ".join(said)


def rich_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 2) -> Any:
    """A table for the terminal; the first `left` columns are text, the rest figures."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for index, name in enumerate(header):
        # on a narrow terminal headings wrap and long texts fold; figures and names stay whole
        widest = max((len(row[index]) for row in rows), default=0)
        wrapped = max(len(word) for word in [*name.split(), ""])
        least = max(wrapped, widest) if widest <= WHOLE else wrapped
        table.add_column(name, justify="left" if index < left else "right", overflow="fold", min_width=least)
    grouped = rows and 1 < len({row[0] for row in rows}) <= len(rows) / 2
    for before, row in zip(["", *(row[0] for row in rows)], rows, strict=False):
        if grouped and before not in ("", row[0]):
            table.add_section()
        table.add_row(*map(escape, row))
    return table


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """The same as Markdown."""
    lines = [
        "| " + " | ".join(header) + " |",
        "|" + "|".join("---" if i < left else "---:" for i in range(len(header))) + "|",
    ]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def plain(value: Any) -> str:
    """A cell's text: floats with four significant digits."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
