"""A model card from an export's manifest: what it is, how it scores, how to use it, and what it does not fix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from suture.corrections import LAYERED
from suture.evaluate.heldout import GUARD, Score
from suture.export.public import HUB, names_in, parents
from suture.export.usage import usage
from suture.report.tables import HEADER, caption, markdown_table, plain, score_rows, verdicts
from suture.store import write_text

FIGURE = Path("figures") / "scores.png"
TABLES = ("darts", "add", "parallel")  # modules that know positions by a table
ALL = "*"  # in place of a domain: one correction for all
KINDS = {
    "hf": "a checkpoint for transformers with modelling code of its own",
    "vllm": "a checkpoint for vLLM, and for transformers with modelling code of its own",
    "plain": "a plain checkpoint: the correction is part of the weights, and stock classes load it",
    "adapter": "a plain checkpoint of the merged model, and a PEFT LoRA for each domain",
    "gguf": "GGUF for llama.cpp: the correction is part of the weights",
}


def write_card(
    folder: Path, manifest: Mapping[str, Any], *, licences: Mapping[str, str | None], figure: Path | None = None
) -> None:
    """Write README.md into an export folder.

    Args:
        manifest: what suture.json holds.
        licences: public name → licence of each model that was merged, None where it is not known (`licences_of`).
        figure: of the scores; copied to figures/scores.png.
    """
    if figure is not None and figure.resolve() != (folder / FIGURE).resolve():
        (folder / FIGURE).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(figure, folder / FIGURE)
    merged = list(dict.fromkeys(name for each in parents(manifest["recipe"]) for name in names_in(each)))
    known = {name: licences.get(name) for name in merged}
    parts = [
        "---\n" + yaml.safe_dump(_front(manifest, known), sort_keys=False, allow_unicode=True) + "---\n",
        f"# {manifest['name']}\n",
        _what(manifest),
        _corrections(manifest),
        "## Merge\n",
        _merge(manifest["recipe"]),
        "## Held-out scores\n",
        _scores(manifest, figure is not None),
        "## How to use it\n",
        usage(folder, manifest),
        "## What was checked\n",
        _checked(manifest["verified"]),
        "## What it does not fix\n",
        _limits(folder, manifest),
        "## Licence\n",
        _licences(known),
        "## How it was made\n",
        _made(manifest),
    ]
    write_text(folder / "README.md", "\n".join(parts))


def _front(manifest: Mapping[str, Any], licences: Mapping[str, str | None]) -> dict[str, Any]:
    """What the hub reads."""
    ids = [name for name in licences if HUB.fullmatch(name)]
    by_mergekit = manifest["recipe"].get("merge") is not None
    data: dict[str, Any] = {"base_model": ids} if ids else {}
    if ids and by_mergekit:
        data["base_model_relation"] = "merge"
    if manifest["to"] != "gguf":
        data["library_name"] = "transformers"
    data["pipeline_tag"] = "text-generation"
    if licences and all(licences.values()):
        found = {str(licence) for licence in licences.values()}
        (only,) = found if len(found) == 1 else ("other",)
        data["license"] = "other" if only.startswith("other") or ", " in only else only
    kinds = {"adapter": ["peft", "lora"], "gguf": ["gguf"], "hf": ["custom_code"], "vllm": ["custom_code", "vllm"]}
    data["tags"] = ["merge", *(["mergekit"] if by_mergekit else []), "suture", *kinds.get(manifest["to"], [])]
    return data


def _what(manifest: Mapping[str, Any]) -> str:
    domains, kind = manifest["domains"], manifest["to"]
    listed = ", ".join(domains)
    inside = any(each["module"] in LAYERED for each in manifest["corrections"].values())
    place = "weights inside its layers" if inside else "final hidden states"
    if ALL in manifest["corrections"]:
        acts = f"One correction of its {place} acts for all of its domains: {listed}."
    else:
        acts = f"Its {place} are corrected by [suture](#how-it-was-made), domain by domain: {listed}."
    said = ["Several fine-tunes in one: a merged language model, brought closer to the models that it was merged from."]
    said += [acts, f"This is {KINDS[kind]}."]
    if kind in ("hf", "vllm", "adapter"):
        default = manifest.get("default")
        chosen = {None: "no correction acts", "auto": "the router chooses"}.get(default, f"`{default}` acts")
        said.append(f"One domain's correction acts at a time; unless you choose, {chosen}.")
    return " ".join(said) + "\n"


def _corrections(manifest: Mapping[str, Any]) -> str:
    rows, said = [], []
    for domain, each in manifest["corrections"].items():
        name = "all" if domain == ALL else domain
        cells = (each["surgery"], each["module"], plain(each["rank"]), plain(each["strength"]))
        rows.append((name, *cells, f"{each['parameters']:,}"))
        if each["strength"] == 0:
            said.append(f"- {name}: no gain on held-back prompts beyond its error, so nothing is corrected here\n")
    header = ("domain", "correction", "module", "rank", "strength", "parameters")
    return "\n".join([markdown_table(header, rows, left=3), *said])


def _merge(recipe: Mapping[str, Any]) -> str:
    if recipe.get("merge") is None:
        return f"The model was merged before suture saw it: `{recipe['merged']}`.\n"
    text = yaml.safe_dump(recipe["merge"], sort_keys=False, allow_unicode=True)
    return f"By mergekit:\n\n```yaml\n{text}```\n"


def _scores(manifest: Mapping[str, Any], figure: bool) -> str:
    """Uncorrected, target and corrected, domain by domain, and in words what got better and what worse."""
    used = {domain: each["surgery"] for domain, each in manifest["corrections"].items()}
    scores = []
    for row in manifest["scores"]:
        score = Score(**row)
        labels = set(used.values()) if score.domain == GUARD else {used.get(score.domain), used.get(ALL)}
        if score.model in ("merged", "target") or score.model in labels:
            scores.append(score)
    if not scores:
        return "None were measured.\n"
    parts = [
        f"{caption(scores)}, on text that each target wrote for prompts that nobody calibrated on. `merged` is the "
        "uncorrected model, `target` the model that the domain comes from. KL is to the target, in nats; `gap closed` "
        "is the share of the merged model's KL that is gone; `agreement` is how often both would write the same token; "
        "`ρ L1` is the share of the L1 bias of the final hidden states that is gone, with that on the calibration text "
        "beside it.\n",
        markdown_table(HEADER, score_rows(scores)),
        "\n".join(f"- {line}" for line in [*verdicts(scores), *_worse(scores)]) + "\n",
    ]
    return "\n".join([*parts, *([f"![scores]({FIGURE.as_posix()})\n"] if figure else [])])


def _worse(scores: Sequence[Score]) -> list[str]:
    """What a correction makes worse beside the KL, a sentence each."""
    value = {(each.domain, each.model, each.metric): each.value for each in scores if each.split == "heldout"}
    said = []
    for domain, model in dict.fromkeys((each.domain, each.model) for each in scores if each.domain != GUARD):
        if model in ("merged", "target"):
            continue
        found = {name: value[domain, model, name] for name in ("agreement", "perplexity", "rho_l1")}
        merged, target = (
            {name: value[domain, each, name] for name in ("agreement", "perplexity")} for each in ("merged", "target")
        )
        if found["agreement"] < merged["agreement"]:
            said.append(
                f"{domain}: agreement is worse than the merged model's ({100 * found['agreement']:.2f}% with {model}, "
                f"{100 * merged['agreement']:.2f}% merged)"
            )
        if abs(found["perplexity"] - target["perplexity"]) > abs(merged["perplexity"] - target["perplexity"]):
            said.append(
                f"{domain}: perplexity is further from the target's ({found['perplexity']:.3f} with {model}, "
                f"{merged['perplexity']:.3f} merged, {target['perplexity']:.3f} target)"
            )
        if found["rho_l1"] < 0:
            said.append(f"{domain}: the final hidden states are further from the target's than without {model}")
    return said


def _checked(verified: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            each["engine"],
            ", ".join(f"{name} {version}" for name, version in each["versions"].items()),
            str(each["cases"]),
            f"{each['logprobs']:.1e} nats" if "logprobs" in each else f"{each.get('logits', float('nan')):.1e}",
            str(each.get("greedy") or ""),
        )
        for each in verified
    ]
    return (
        "The files were loaded in fresh processes and compared with the corrected model in suture, which is the one "
        "that was scored: the largest difference of logits, over the largest logit (vLLM: of log-probabilities), and "
        "how many greedy tokens are the same.\n\n"
        + markdown_table(("engine", "versions", "cases", "difference", "greedy"), rows)
    )


def _limits(folder: Path, manifest: Mapping[str, Any]) -> str:
    held = manifest["recipe"].get("heldout") or {}
    rests = "text that the targets wrote"
    if held:
        rests += f" for {held['samples']} prompts a domain, {held['tokens']} tokens each at most"
    said = [
        f"Scores are on {rests}. They say how near the model is to its targets there. They are not benchmark results.",
        "A correction aims at a target. What no parent knows is not taught, and the parents' faults stay.",
    ]
    if ALL not in manifest["corrections"]:
        said.append("Each correction is for its own domain. What it does to other text was not measured.")
        if len(manifest["domains"]) > 1:
            said.append("One domain at a time: a text that belongs to several gets one correction, or none.")
    longest = _longest(folder)
    if longest and any(each["module"] in TABLES for each in manifest["corrections"].values()):
        said.append(f"Positions from {longest} on get no position term; the rest of the correction still acts there.")
    return "\n".join(f"- {line}" for line in [*said, *_router(manifest.get("router"))]) + "\n"


def _router(figures: Mapping[str, Any] | None) -> list[str]:
    if not figures:
        return []
    said = ["The router (`auto`) chooses by the prompt, and corrects nothing where it abstains."]
    for name, words in (
        ("accuracy", "It named the right domain for {} of the held-out prompts on which it decided."),
        ("abstained", "It abstained on {} of the domains' own held-out prompts."),
        (
            "outside_abstained",
            "It abstained on {} of text of no domain: the rest gets a correction that is not meant for it.",
        ),
    ):
        if isinstance(figures.get(name), (int, float)):
            said.append(words.format(f"{100 * figures[name]:.1f}%"))
    return [" ".join(said)]


def _longest(folder: Path) -> int | None:
    """Rows of the shortest position table in the checkpoint; None where there is none."""
    config = folder / "config.json"
    modules = json.loads(config.read_text()).get("suture", {}).get("modules", []) if config.exists() else []
    return min((each["t_max"] for each in modules if each["module"] in TABLES), default=None)


def _licences(licences: Mapping[str, str | None]) -> str:
    if not licences:
        return "Not known: the recipe names no parents.\n"
    lines = [f"- `{name}`: {licence or 'unknown'}" for name, licence in licences.items()]
    said = "A merge is under the licences of what was merged. As their cards and files say:\n"
    unknown = [name for name, licence in licences.items() if not licence]
    if unknown:
        lines.append("\nThe licence of this model is therefore not known: ask those who made the unknown ones.")
    return said + "\n" + "\n".join(lines) + "\n"


def _made(manifest: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    lines = [
        "`suture.json` holds the whole recipe under `recipe`: the merge, targets, prompts and every setting. As a YAML "
        "file, with local folders put back where names stand for them, it makes this model again:\n",
        f"```bash\nsuture export recipe.yaml --to {manifest['to']} --out DIR\n```\n",
        f"Calculated in {str(manifest['dtype']).removeprefix('torch.')}. Versions: {versions}.\n",
        *(f"- {note}" for note in manifest.get("notes") or []),
    ]
    return "\n".join(lines).rstrip() + "\n"
