"""What lies beside weights: generation settings, tokenizer files, modelling code."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from suture.checkpoint import read_json

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model")


def end_tokens(folders: Iterable[Path]) -> list[int]:
    """End-of-text ids that the generation config or the config of any of these checkpoints names, ascending."""
    found: set[int] = set()
    for folder in folders:
        for name in ("generation_config.json", "config.json"):
            if (folder / name).exists():
                settings = read_json(folder / name, "")
                ends = settings.get("eos_token_id", (settings.get("text_config") or {}).get("eos_token_id"))
                found.update(listed(ends))
    return sorted(found)


def listed(ends: Any) -> list[int]:
    """The ids in an `eos_token_id`, which configs write as none, one or a list."""
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def generation_config(folders: list[Path]) -> Any:
    """The first folder's generation config, stopping at the end tokens of all of them.

    A merged model speaks like its parents, so what ends a text for one of them ends it.
    """
    from transformers import GenerationConfig

    settings = {}
    if (folders[0] / "generation_config.json").exists():
        settings = read_json(folders[0] / "generation_config.json", "")
    ends = end_tokens(folders)
    if ends:
        settings["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return GenerationConfig.from_dict(settings)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Tokenizer and chat template, from one checkpoint to another."""
    for pattern in (*TOKENIZER, "chat_template*"):
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def copy_code(source: Path, folder: Path) -> None:
    """Modelling code that a checkpoint brings; it runs only where `trust_remote_code` allows it."""
    if (source / "config.json").exists() and read_json(source / "config.json", "").get("auto_map"):
        for file in source.glob("*.py"):
            shutil.copyfile(file, folder / file.name)
