"""Models as they lie on disk: references, where they are, what their files hold. No weights are loaded here."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from suture.errors import ModelError
from suture.store import FileHashes, digest, home

LFS_MARK = b"version https://git-lfs"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
SIDE_FILES = ("*.json", "*.jinja", "*.model", "tokenizer*", "*.txt", "*.py")
# fields of a config that say where it came from, not what it computes
PROVENANCE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")


@dataclass(frozen=True)
class Reference:
    """A model as a user writes it: `path`, `org/name@revision`, `base+adapter`, or an adapter alone.

    `path` is a local folder or a hub id; `adapter` likewise, or None for a full checkpoint.
    """

    path: str
    revision: str | None = None
    adapter: str | None = None
    adapter_revision: str | None = None

    def __str__(self) -> str:
        text = self.path + (f"@{self.revision}" if self.revision else "")
        if self.adapter:
            text += f"+{self.adapter}" + (f"@{self.adapter_revision}" if self.adapter_revision else "")
        return text


def parse_reference(text: str, folder: Path | None = None) -> Reference:
    """Read a reference. Relative paths that exist are taken from `folder` (that of the recipe).

    Raises:
        ModelError: for a text that cannot be read.
    """
    base_text, plus, adapter_text = text, "", ""
    if not _existing(text, folder):
        # a folder's own name may hold a +: of all places to part the text, one whose halves are there comes first
        cuts = [(text[:at], "+", text[at + 1 :]) for at, sign in enumerate(text) if sign == "+"]
        there = [sum(bool(half and _existing(half, folder)) for half in (cut[0], cut[2])) for cut in cuts]
        base_text, plus, adapter_text = cuts[there.index(max(there))] if cuts else (text, "", "")
    if not base_text or (plus and not adapter_text) or ("+" in adapter_text and not _existing(adapter_text, folder)):
        raise ModelError(
            f"cannot read the model reference {text!r}: write a folder, org/name[@revision], or base+adapter"
        )
    path, revision = _split_revision(base_text, folder)
    if not plus:
        return Reference(path, revision)
    adapter, adapter_revision = _split_revision(adapter_text, folder)
    return Reference(path, revision, adapter, adapter_revision)


def _existing(text: str, folder: Path | None) -> Path | None:
    path = Path(text).expanduser()
    if not path.is_absolute() and folder is not None:
        path = folder / path
    return path.resolve() if path.exists() else None


def _split_revision(text: str, folder: Path | None) -> tuple[str, str | None]:
    local = _existing(text, folder)
    if local is not None:
        return str(local), None
    name, at, revision = text.partition("@")
    if at and not revision:
        raise ModelError(f"{text!r} ends in @ without a revision")
    if at and _existing(name, folder):
        raise ModelError(f"{text!r} asks for a revision, but {name} is a local folder, which has none: leave out the @")
    return name, (revision or None)


def locate(name: str, revision: str | None = None) -> Path:
    """The local folder of a checkpoint or adapter: itself, a copy under `$SUTURE_HOME/models`, or the hub's cache.

    Raises:
        ModelError: when it is none of these, with what the hub said.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"no such folder: {name}")
    kept = home() / "models" / name
    if kept.is_dir() and revision is None:
        return kept.resolve()

    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=[*WEIGHTS, *SIDE_FILES])
    except Exception as error:  # the hub's client raises many kinds; each ends in the same advice
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        at = f"@{revision}" if revision else ""
        without = f" and leave out {at}" if at else ""
        raise ModelError(
            f"{name}{at} is neither a local folder nor to be had from the hub ({reason}); "
            f"without a connection, put the checkpoint into {kept}{without}"
        ) from error
    return Path(found)


@dataclass(frozen=True)
class Checkpoint:
    """One folder with a config and safetensors weights, or an adapter beside its base."""

    reference: Reference
    base: Path
    adapter: Path | None = None

    @property
    def folder(self) -> Path:
        """Where the tokenizer and config are."""
        return self.base

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json of the base."""
        return read_json(self.base / "config.json", "a model folder needs one")

    @cached_property
    def adapter_config(self) -> dict[str, Any]:
        """adapter_config.json, or an empty dict for a full checkpoint."""
        return read_json(self.adapter / "adapter_config.json", "an adapter needs one") if self.adapter else {}

    @cached_property
    def shards(self) -> list[Path]:
        """The base's weight files, each checked to be there and to hold weights."""
        return weight_files(self.base)

    @cached_property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """name → (dtype, shape) of every tensor of the base, from the files' headers alone."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for shard in self.shards:
            found.update(header(shard))
        return found

    @property
    def text_config(self) -> dict[str, Any]:
        """Settings of the language model, which a multimodal config keeps a level deeper."""
        return {**self.config, **(self.config.get("text_config") or {})}

    @property
    def count(self) -> int:
        """Numbers that the base's tensors hold."""
        return sum(math.prod(shape) for _, shape in self.tensors.values())

    @property
    def size(self) -> int:
        """Bytes of the base's weights."""
        return sum(shard.stat().st_size for shard in self.shards)

    def fingerprint(self, hashes: FileHashes) -> str:
        """A hash of weights, of the config fields that change what is computed, of end tokens and modelling code."""
        generation = self.base / "generation_config.json"
        settings = read_json(generation, "") if generation.exists() else {}
        parts: dict[str, Any] = {
            "weights": sorted(hashes.of(shard) for shard in self.shards),
            "config": {key: value for key, value in self.config.items() if key not in PROVENANCE},
            "ends": settings.get("eos_token_id"),  # where a target's held-out text stops
        }
        if self.config.get("auto_map"):
            parts["code"] = sorted(hashes.of(file) for file in self.base.glob("*.py"))
        if self.adapter:
            parts["adapter"] = [hashes.of(file) for file in weight_files(self.adapter)]
            dropped = ("base_model_name_or_path", "peft_version", "revision", "inference_mode")
            settings = {key: value for key, value in self.adapter_config.items() if key not in dropped}
            targets = settings.get("target_modules")
            settings["target_modules"] = sorted(targets) if isinstance(targets, list) else targets
            parts["adapter_config"] = settings
        return digest(parts)


def resolve(reference: Reference) -> Checkpoint:
    """Find a reference's files. An adapter alone names its base in its own config.

    Raises:
        ModelError: for a folder that is neither a checkpoint nor an adapter, pickled weights, missing shards.
    """
    folder = locate(reference.path, reference.revision)
    if reference.adapter is None and (folder / "adapter_config.json").exists():
        settings = read_json(folder / "adapter_config.json", "an adapter needs one")
        base = settings.get("base_model_name_or_path")
        if not base:
            raise ModelError(f"{folder}/adapter_config.json names no base model: write it as base+{reference.path}")
        # a relative path is PEFT's, from the working folder; an adapter that moved with its base finds it beside itself
        near = None if Path(base).is_dir() else _existing(str(base), folder)
        reference = Reference(str(near or base), settings.get("revision"), reference.path, reference.revision)
        try:
            folder = locate(reference.path, None if near else reference.revision)
        except ModelError as error:
            config = folder / "adapter_config.json"
            raise ModelError(f"the base that {config} names: {error}, or write base+{reference.adapter}") from error
    adapter = locate(reference.adapter, reference.adapter_revision) if reference.adapter else None
    checkpoint = Checkpoint(replace(reference), folder, adapter)
    _ = checkpoint.config, checkpoint.shards  # fail here, before any work
    if adapter:
        _ = checkpoint.adapter_config, weight_files(adapter)
    return checkpoint


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those its index names, or the only one.

    Raises:
        ModelError: for a missing shard, a Git LFS pointer, a broken header, or pickled weights only.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = read_json(index, "the index of the shards").get("weight_map")
        names = sorted(set(listed.values())) if isinstance(listed, dict) else []
        if not names:
            raise ModelError(f"{index} names no shards (weight_map): download it again")
        if (folder / "model.safetensors").exists():
            raise ModelError(
                f"{folder} has both model.safetensors and an index of shards, and libraries differ in which they "
                "read: remove the one that is out of date"
            )
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise ModelError(
                f"{folder} lacks {len(missing)} of its {len(names)} shards: {', '.join(missing)}; "
                "download the checkpoint again"
            )
        files = [folder / name for name in names]
    else:
        single = [folder / name for name in ("model.safetensors", "adapter_model.safetensors")]
        files = [path for path in single if path.exists()][:1]
        if not files:
            pickled = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
            if pickled:
                raise ModelError(
                    f"{folder} has only pickled weights ({pickled[0].name}), which can run code when read: "
                    "convert them to safetensors"
                )
            raise ModelError(f"{folder} holds no model.safetensors, no index and no adapter_model.safetensors")
    for file in files:
        header(file)
    return files


def header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """name → (dtype, shape) from a safetensors header, without reading weights.

    Raises:
        ModelError: for a Git LFS pointer, a truncated file or one that is not safetensors.
    """
    size = file.stat().st_size
    with file.open("rb") as handle:
        start = handle.read(8)
        if size < 2048 and (start + handle.read(len(LFS_MARK))).startswith(LFS_MARK):
            raise ModelError(
                f"{file} is a Git LFS pointer, not weights: run `git lfs pull` in its folder or download it again"
            )
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        handle.seek(8)
        if length == 0 or 8 + length > size:
            raise ModelError(f"{file} is not a safetensors file, or is cut short: download it again")
        try:
            entries: dict[str, Any] = json.loads(handle.read(length))
            entries.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            found = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise ModelError(f"{file} has a broken safetensors header: download it again") from error
    if 8 + length + end > size:
        raise ModelError(f"{file} is cut short ({size} of {8 + length + end} bytes): download it again")
    return found


def read_json(path: Path, why: str) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint; `why` ends the message when there is none.

    Raises:
        ModelError: for a missing file, a Git LFS pointer, or anything but a JSON object.
    """
    if not path.exists():
        raise ModelError(f"{path} is missing: {why}")
    content = path.read_bytes()
    if content.startswith(LFS_MARK):
        raise ModelError(f"{path} is a Git LFS pointer: run `git lfs pull` in its folder or download it again")
    try:
        loaded = json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} should hold a JSON object")
    return loaded
