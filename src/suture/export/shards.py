"""A checkpoint's shards: linked where nothing in them changes, written anew one at a time where something does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from suture.checkpoint import header, read_json, weight_files
from suture.errors import ModelError
from suture.store import write_json

INDEX = "model.safetensors.index.json"


class Change(Protocol):
    """A correction that is folded into a checkpoint's tensors as they go by."""

    def touches(self, name: str) -> bool:
        """Whether a tensor of this name changes."""

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """What is stored instead."""

    def finish(self, folder: Path) -> None:
        """What is left to do once all tensors are written; raises where one of them never came by."""


def link(source: Path, target: Path) -> bool:
    """Give a file a second name; where the disk or file system refuses, copy it.

    Returns:
        Whether it was linked, so that no byte was copied.
    """
    real = source.resolve()  # the hub's cache holds links to blobs
    try:
        os.link(real, target)
    except OSError:
        shutil.copyfile(real, target)
        return False
    return True


def link_shards(source: Path, folder: Path, change: Change | None = None) -> list[str]:
    """Bring a checkpoint's weights into a folder; at most one shard is in memory.

    Args:
        source: the checkpoint's folder.
        change: what is stored instead of some tensors. A shard none of whose tensors changes is linked.

    Returns:
        What was copied rather than linked, and why, a sentence each.
    """
    notes = []
    for shard in weight_files(source):
        target = folder / shard.name
        if change is not None and any(change.touches(name) for name in header(shard)):
            tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(shard).items()}
            save_file(tensors, target, metadata={"format": "pt"})
            del tensors
        elif not link(shard, target):
            notes.append(f"{shard.name} was copied: it lies on another disk, or on one that knows no hard links")
    if (source / INDEX).exists():
        shutil.copyfile(source / INDEX, folder / INDEX)
    return notes


def add_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors into one more shard of the checkpoint in a folder, and name it in the index.

    A lone `model.safetensors` is renamed, so that every library reads the index.

    Raises:
        ModelError: for a tensor that the checkpoint has already.
    """
    shards = weight_files(folder)
    known = {name: shard.name for shard in shards for name in header(shard)}
    twice = sorted(set(known) & set(tensors))
    if twice:
        raise ModelError(f"{folder} has a tensor {twice[0]} already")
    total = len(shards) + 1
    names = {shard.name: f"model-{place:05d}-of-{total:05d}.safetensors" for place, shard in enumerate(shards, 1)}
    kept = {shard: shard.with_name(f".{names[shard.name]}") for shard in shards}
    for shard, hidden in kept.items():  # in two steps: an old name may be another shard's new one
        shard.rename(hidden)
    for hidden in kept.values():
        hidden.rename(hidden.with_name(hidden.name[1:]))
    last = f"model-{total:05d}-of-{total:05d}.safetensors"
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        folder / last,
        metadata={"format": "pt"},
    )
    places = {name: names[shard] for name, shard in known.items()} | dict.fromkeys(tensors, last)
    size = sum(_bytes(folder / name) for name in (*names.values(), last))
    index: dict[str, Any] = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    write_json(folder / INDEX, index)


def _bytes(file: Path) -> int:
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
    return file.stat().st_size - 8 - length


def read_tensor(folder: Path, name: str) -> Tensor | None:
    """One tensor of a checkpoint; None where it has none of this name."""
    for shard in weight_files(folder):
        if name in header(shard):
            with safe_open(shard, framework="pt") as file:
                found: Tensor = file.get_tensor(name)
            return found
    return None


def replace_tensor(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Rewrite the shard that holds a tensor, with that tensor changed; files that are linked to it stay as they are.

    Raises:
        ModelError: where there is none of this name.
    """
    shard = next((shard for shard in weight_files(folder) if name in header(shard)), None)
    if shard is None:
        raise ModelError(f"{folder} has no tensor {name}")
    tensors = load_file(shard)
    tensors[name] = change(tensors[name])
    work = shard.with_name(f".{shard.name}")
    save_file(tensors, work, metadata={"format": "pt"})
    os.replace(work, shard)


def change_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a checkpoint's config.json; `change` works on the loaded document in place."""
    settings = read_json(folder / "config.json", "a checkpoint needs one")
    change(settings)
    (folder / "config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
