"""Prompts: read from files or data sets, split into calibration and held-out ones, tokenised one way for everything."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from suture.errors import PromptError, did_you_mean
from suture.recipe import Domain, Prompts
from suture.states import Tokens


@dataclass(frozen=True)
class Split:
    """A domain's prompts, taken apart. The indices are rows of the source, disjoint by construction."""

    calibration: list[str]
    heldout: list[str]
    calibration_rows: list[int]
    heldout_rows: list[int]
    dropped: int  # rows that repeat an earlier one


def read_prompts(source: Prompts, folder: Path, where: str) -> list[str]:
    """All prompts of a source, in its order.

    Raises:
        PromptError: for a missing or empty file, an unknown field, an empty prompt; names `where` and the row.
    """
    rows = _rows(source, folder, where)
    texts = [_render(source, row, index, where) for index, row in enumerate(rows)]
    if not texts:
        raise PromptError(f"{where}: {source.path or source.dataset} holds no prompts")
    empty = [index for index, text in enumerate(texts) if not text.strip()]
    if empty:
        raise PromptError(f"{where}: empty prompts in rows {empty[:10]} of {source.path or source.dataset}")
    return texts


def _rows(source: Prompts, folder: Path, where: str) -> list[Any]:
    if source.dataset is not None:
        import datasets

        try:
            return list(
                datasets.load_dataset(source.dataset, source.name, split=source.split, revision=source.revision)
            )
        except Exception as error:  # the library's errors share no base; all mean the same here
            raise PromptError(f"{where}: cannot load the data set {source.dataset}: {error}") from error
    path = folder / Path(source.path or "").expanduser()
    if not path.is_file():
        raise PromptError(f"{where}: no such file: {path}")
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            return list(parquet.read_table(path).to_pylist())
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".txt":
            return [line for line in text.splitlines() if line.strip()]
        if path.suffix == ".json":
            loaded = json.loads(text)
            if not isinstance(loaded, list):
                raise PromptError(f"{where}: {path} should hold a list")
            return loaded
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, OSError) as error:
        raise PromptError(f"{where}: cannot read {path}: {error}") from error


def _render(source: Prompts, row: Any, index: int, where: str) -> str:
    if isinstance(row, str):
        row = {source.field or "prompt": row}
    if not isinstance(row, dict):
        raise PromptError(f"{where}: row {index} is a {type(row).__name__}, not a text or an object")
    template = source.template or "{" + (source.field or "prompt") + "}"
    for _, name, _, _ in string.Formatter().parse(template):
        if name and name not in row:
            raise PromptError(f"{where}: row {index} has no field {name!r}; {did_you_mean(name, map(str, row))}")
    if source.template is None:
        return str(row[source.field or "prompt"])
    return source.template.format_map(row)


def apply_template(source: Prompts, text: str) -> str:
    """A new prompt in the form that a source gives its own: its template's first field is filled with the text.

    Raises:
        PromptError: for a template with several fields, which one text cannot fill.
    """
    if source.template is None:
        return text
    fields = list(dict.fromkeys(name for _, name, _, _ in string.Formatter().parse(source.template) if name))
    if len(fields) != 1:
        raise PromptError(f"the template {source.template!r} has fields {fields}: write the whole prompt and use --raw")
    return source.template.format_map({fields[0]: text})


def split_prompts(domain: Domain, name: str, folder: Path, calibration: int, heldout: int, seed: int) -> Split:
    """Take calibration and held-out prompts of one domain; a prompt that occurs twice counts once.

    Raises:
        PromptError: when there are too few, or when a separate held-out source shares prompts with the other.
    """
    where = f"domains.{name}"
    texts = read_prompts(domain.prompts, folder, f"{where}.prompts")
    rows = _unique(texts)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = [rows[index] for index in order]
    if domain.heldout is None:
        if len(rows) < calibration + heldout:
            raise PromptError(
                f"{where}.prompts: {len(rows)} different prompts, but {calibration} to calibrate and {heldout} "
                "held out are asked for: add prompts, or lower surgery.samples or heldout.samples"
            )
        held = shuffled[calibration : calibration + heldout]
        held_texts = [texts[row] for row in held]
    else:
        if len(rows) < calibration:
            raise PromptError(
                f"{where}.prompts: {len(rows)} different prompts, but {calibration} to calibrate are asked for"
            )
        others = read_prompts(domain.heldout, folder, f"{where}.heldout")
        unique = _unique(others)
        if len(unique) < heldout:
            raise PromptError(f"{where}.heldout: {len(unique)} different prompts, but {heldout} are asked for")
        held = [unique[i] for i in torch.randperm(len(unique), generator=torch.Generator().manual_seed(seed)).tolist()]
        held = held[:heldout]
        held_texts = [others[row] for row in held]
        calibrated = {texts[row].strip(): row for row in shuffled[:calibration]}
        shared = [
            (calibrated[text.strip()], row)
            for row, text in zip(held, held_texts, strict=True)
            if text.strip() in calibrated
        ]
        if shared:
            shown = ", ".join(f"row {one} = held-out row {two}" for one, two in shared[:5])
            raise PromptError(
                f"{where}: {len(shared)} prompts would both calibrate and evaluate: {shown}; remove them from one"
            )
    chosen = shuffled[:calibration]
    return Split([texts[row] for row in chosen], held_texts, chosen, held, len(texts) - len(rows))


def _unique(texts: Sequence[str]) -> list[int]:
    first: dict[str, int] = {}
    for row, text in enumerate(texts):
        first.setdefault(text.strip(), row)
    return list(first.values())


def tokenize(
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    chat_template: bool = False,
    system: str | None = None,
    max_length: int = 512,
) -> Tokens:
    """Tokenise prompts the one way that calibration, generation and evaluation share.

    With `chat_template` the template itself writes all special tokens, so none are added twice; without, the
    tokenizer adds those it always adds. Sequences are cut to `max_length` from the right.

    Raises:
        PromptError: when a template is asked for that the tokenizer does not have, or a prompt has no tokens.
    """
    if chat_template:
        if not getattr(tokenizer, "chat_template", None):
            raise PromptError("chat_template is on, but the target's tokenizer has none: turn it off or add one")
        before = [{"role": "system", "content": system}] if system else []
        texts = [
            tokenizer.apply_chat_template(
                [*before, {"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
        encoded = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    else:
        encoded = [tokenizer(prompt).input_ids for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise PromptError(f"the tokenizer makes no tokens of {prompt[:60]!r}")
    return Tokens.of([ids[:max_length] for ids in encoded])
