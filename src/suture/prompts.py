"""Prompts: read from files or data sets, split into calibration and held-out ones, tokenised one way for everything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from suture.errors import PromptError, did_you_mean
from suture.recipe import Domain, Prompts, template_fields
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

        beside = folder / source.dataset  # a data set kept with the recipe
        name = str(beside) if beside.is_dir() else source.dataset
        try:
            return list(datasets.load_dataset(name, source.name, split=source.split, revision=source.revision))
        except Exception as error:  # the library's errors share no base; all mean the same here
            raise PromptError(f"{where}: cannot load the data set {source.dataset}: {error}") from error
    path = (folder / Path(source.path or "").expanduser()).resolve()
    if not path.is_file():
        raise PromptError(f"{where}: no such file: {path}")
    kind = path.suffix.lower()
    if kind not in (".jsonl", ".json", ".parquet", ".txt"):
        raise PromptError(f"{where}: {path} should end in .jsonl, .json, .parquet or .txt")
    try:
        if kind == ".parquet":
            import pyarrow.parquet as parquet

            return list(parquet.read_table(path).to_pylist())
        text = path.read_text(encoding="utf-8-sig")
        if kind == ".json":
            loaded = json.loads(text)
            if not isinstance(loaded, list):
                raise PromptError(f"{where}: {path} should hold a list")
            return loaded
        # not splitlines: JSON texts may hold other separators of Unicode as they are
        lines = text.split("\n")
        if kind == ".txt":
            return [line for line in lines if line.strip()]
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                raise PromptError(f"{where}: line {number} of {path} is not JSON: {error}") from error
        return rows
    except UnicodeDecodeError as error:
        raise PromptError(f"{where}: {path} is not UTF-8 text: save it as UTF-8") from error
    except (ValueError, OSError) as error:
        raise PromptError(f"{where}: cannot read {path}: {error}") from error


def _render(source: Prompts, row: Any, index: int, where: str) -> str:
    if isinstance(row, str):
        row = {source.field or "prompt": row}
    if not isinstance(row, dict):
        raise PromptError(f"{where}: row {index} is a {type(row).__name__}, not a text or an object")
    names = [source.field or "prompt"] if source.template is None else template_fields(source.template)
    for name in names:
        if name not in row:
            unset = source.template is None and source.field is None
            choose = " (set `field` or `template` to choose)" if unset else ""
            raise PromptError(
                f"{where}: row {index} has no field {name!r}; {did_you_mean(name, map(str, row))}{choose}"
            )
        if row[name] is None or isinstance(row[name], (list, dict)):
            kind = "empty" if row[name] is None else f"a {type(row[name]).__name__}"
            raise PromptError(f"{where}: field {name!r} of row {index} is {kind}, not a text")
    if source.template is None:
        return str(row[names[0]])
    return _fill(source.template, row, where)


def _fill(template: str, row: dict[str, Any], where: str) -> str:
    try:
        return template.format_map(row)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise PromptError(f"{where}: the template {template!r} cannot be filled: {error}") from error


def apply_template(source: Prompts, text: str) -> str:
    """A new prompt in the form that a source gives its own: its template's first field is filled with the text.

    Raises:
        PromptError: for a template with several fields, which one text cannot fill.
    """
    if source.template is None:
        return text
    fields = template_fields(source.template)
    if len(fields) != 1:
        raise PromptError(f"the template {source.template!r} has fields {fields}: write the whole prompt and use --raw")
    return _fill(source.template, {fields[0]: text}, "prompt")


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
        held = shuffled[len(shuffled) - heldout :]  # from the other end: more calibration leaves them alone
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
        PromptError: when a template is asked for that the tokenizer does not have or that refuses the messages, or a
            prompt has no tokens.
    """
    if chat_template:
        from jinja2 import TemplateError

        if not getattr(tokenizer, "chat_template", None):
            raise PromptError("chat_template is on, but the target's tokenizer has none: turn it off or add one")
        before = [{"role": "system", "content": system}] if system else []
        try:
            texts = [
                tokenizer.apply_chat_template(
                    [*before, {"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
                )
                for prompt in prompts
            ]
        except TemplateError as error:  # templates refuse what they do not know, often a system message
            raise PromptError(f"the target's chat template refuses these messages: {error}") from error
        encoded = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    else:
        encoded = [tokenizer(prompt).input_ids for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise PromptError(f"the tokenizer makes no tokens of {prompt[:60]!r}")
    return Tokens.of([ids[:max_length] for ids in encoded])
