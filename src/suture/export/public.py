"""What may be told of a recipe's models: names without this machine's folders, and the licences they are under."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from suture.checkpoint import Reference, parse_reference, read_json
from suture.errors import ModelError
from suture.store import home

HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # org/name; a name alone is a local folder's
MODELS = ("model", "base_model", "merged", "target", "tokenizer_source", "source")  # fields that hold references
FILES = ("path", "prompts", "heldout", "guard", "merge", "dataset")  # fields that may hold paths
DRIVE = re.compile(r"[A-Za-z]:[\\/]|\\\\")
# words of a licence's beginning, white space made single → the hub's name for it
TEXTS = {
    "apache-2.0": ("apache license", "version 2.0"),
    "mit": ("mit license", "permission is hereby granted, free of charge"),
    "gemma": ("gemma terms of use",),
    "llama2": ("llama 2 community license",),
    "llama3": ("llama 3 community license",),
    "llama3.1": ("llama 3.1 community license",),
    "llama3.2": ("llama 3.2 community license",),
    "llama3.3": ("llama 3.3 community license",),
}
BEGINNING = 2000  # characters
TIMEOUT = 10.0  # seconds that the hub may take


def public_reference(text: str, folder: Path | None = None) -> str:
    """A model reference in which a local folder is its last name alone; hub ids stay as they are.

    Copies in the hub's cache and in `$SUTURE_HOME/models` get back the id that they are a copy of.

    Args:
        folder: where relative paths start, the recipe's folder; the working folder by default.
    """
    found = parse_reference(text, folder)
    adapter = _public(found.adapter) if found.adapter else None
    return str(Reference(_public(found.path), found.revision, adapter, found.adapter_revision))


def public_recipe(recipe: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """A recipe as plain data, or a part of one, with `public_reference` in every field that names a model.

    Of absolute paths in fields that name files the last name is kept.
    """
    return {key: _told(value, key, folder) for key, value in recipe.items()}


def _told(value: Any, key: str, folder: Path | None) -> Any:
    if isinstance(value, Mapping):
        return public_recipe(value, folder)
    if isinstance(value, list):
        return [_told(item, key, folder) for item in value]
    if isinstance(value, str) and key in MODELS:
        return public_reference(value, folder)
    return _public(value) if isinstance(value, str) and key in FILES and _is_absolute(value) else value


def _is_absolute(text: str) -> bool:
    return text.startswith(("/", "~")) or DRIVE.match(text) is not None


def _public(name: str) -> str:
    if not (_is_absolute(name) or name.startswith(".") or name.count("/") > 1):
        return name
    cached = [part for part in Path(name).parts if part.startswith("models--")]
    if cached:
        return cached[-1].removeprefix("models--").replace("--", "/")
    kept = (home() / "models").resolve()
    path = Path(name).expanduser()
    if path.is_relative_to(kept) and len(path.relative_to(kept).parts) == 2:
        return path.relative_to(kept).as_posix()
    return re.split(r"[\\/]+", name.rstrip("\\/"))[-1]


def parents(recipe: Mapping[str, Any]) -> list[str]:
    """References of what was merged, base first, as the recipe writes them; or of the checkpoint that was given."""
    if recipe.get("merged"):
        return [str(recipe["merged"])]
    found: list[str] = []

    def walk(value: Any, key: str) -> None:
        if isinstance(value, Mapping):
            for name in sorted(value, key=lambda each: each != "base_model"):
                walk(value[name], name)
        elif isinstance(value, list):
            for item in value:
                walk(item, key)
        elif isinstance(value, str) and key in ("base_model", "model"):
            found.append(value)

    walk(recipe.get("merge"), "")
    return list(dict.fromkeys(found))


def names_in(reference: str) -> list[str]:
    """Base and adapter that a public reference names, without revisions."""
    return [part.partition("@")[0] for part in reference.split("+")]


def licences_of(references: Iterable[str], folder: Path | None = None) -> dict[str, str | None]:
    """Public name → licence of each base and adapter, as the hub writes licences; None where it is not known.

    Looked for in the model card, in a LICENSE file and in the config, on disk and in the hub's cache, then at the hub
    unless `HF_HUB_OFFLINE` is set. A hub that does not answer is no error.

    Args:
        references: as the recipe writes them; an adapter alone also counts for the base that its config names.
        folder: where relative paths start, the recipe's folder; the working folder by default.
    """
    found: dict[str, str | None] = {}
    for text in references:
        reference = parse_reference(text, folder)
        wanted = [(reference.path, reference.revision)]
        if reference.adapter:
            wanted.append((reference.adapter, reference.adapter_revision))
        elif (Path(reference.path) / "adapter_config.json").exists():
            settings = read_json(Path(reference.path) / "adapter_config.json", "")
            base = parse_reference(str(settings.get("base_model_name_or_path") or reference.path), Path(reference.path))
            wanted.insert(0, (base.path, base.revision))
        for name, revision in wanted:
            if _public(name) not in found:
                found[_public(name)] = _licence(name, revision)
    return found


def card_licence(file: Path) -> str | None:
    """`license` in the front matter of a model card; None without one."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    front = re.match(r"\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", text, re.DOTALL)
    try:
        return _of_data(yaml.safe_load(front[1])) if front else None
    except yaml.YAMLError:
        return None


def _licence(name: str, revision: str | None) -> str | None:
    kept = home() / "models" / name
    place = next((path for path in (Path(name), kept) if path.is_dir()), None)
    found = _of_folder(place) if place else None
    public = _public(name)
    return found if found or not HUB.fullmatch(public) else _of_hub(public, revision)


def _of_folder(folder: Path) -> str | None:
    return (
        card_licence(folder / "README.md")
        or next((_of_text(file) for pattern in ("LICEN[CS]E*", "COPYING*") for file in folder.glob(pattern)), None)
        or _of_config(folder / "config.json")
    )


def _of_hub(name: str, revision: str | None) -> str | None:
    import huggingface_hub
    from huggingface_hub import constants

    for file, read in (("README.md", card_licence), ("LICENSE", _of_text), ("config.json", _of_config)):
        kept = huggingface_hub.try_to_load_from_cache(name, file, revision=revision)
        found = read(Path(kept)) if isinstance(kept, str) else None
        if found:
            return found
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        card = huggingface_hub.HfApi().model_info(name, revision=revision, timeout=TIMEOUT).card_data
    except Exception:  # no connection, no such model, no access: the licence is not known then
        return None
    return _of_data(vars(card)) if card is not None else None


def _of_text(file: Path) -> str | None:
    if not file.is_file():
        return None
    text = " ".join(file.read_text(encoding="utf-8", errors="replace")[:BEGINNING].lower().split())
    return next((name for name, words in TEXTS.items() if all(each in text for each in words)), "other")


def _of_config(file: Path) -> str | None:
    try:
        return _of_data(read_json(file, "")) if file.exists() else None
    except ModelError:
        return None


def _of_data(data: Any) -> str | None:
    """`license` of a card's front matter; of an `other` its name, too."""
    licence = data.get("license") if isinstance(data, Mapping) else None
    if isinstance(licence, list):
        licence = ", ".join(map(str, licence))
    if not licence or not isinstance(licence, str):
        return None
    named = data.get("license_name")
    return f"other ({named})" if licence == "other" and named else licence
