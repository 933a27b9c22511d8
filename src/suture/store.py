"""Artifacts: folders found by the content of what made them, written whole or not at all.

An artifact lives at `<root>/<kind>/<key>/`, where the key is a hash of its spec: the content hashes
of its inputs and the settings of the stage. `spec.json` inside says both, and with which versions it
was made. It is written to a temporary folder first and renamed, so that a half-written artifact never
exists under its real name.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suture.errors import ResourceError, StoreError

FORMAT = 1  # raised when an artifact's layout changes: older ones are then made again
VERSIONED = ("suture", "torch", "transformers", "mergekit", "peft", "tokenizers")


def home() -> Path:
    """Where suture keeps artifacts and local model copies: $SUTURE_HOME, or ~/.cache/suture."""
    return Path(os.environ.get("SUTURE_HOME") or Path.home() / ".cache" / "suture").expanduser()


def versions() -> dict[str, str]:
    """Installed versions of everything that can change a number, and of Python."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def digest(value: Any) -> str:
    """A hash of JSON-like data that does not depend on the order of keys (sha256, 64 hex digits)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def need_disk(folder: Path, needed: int, what: str) -> None:
    """Refuse before any work when `folder`'s disk has less than `needed` bytes free.

    Raises:
        ResourceError: with both figures in GB.
    """
    free = shutil.disk_usage(existing(folder)).free
    if free < needed:
        raise ResourceError(
            f"{what} needs {needed / 1e9:.2f} GB on the disk of {folder}, which has {free / 1e9:.2f} GB free: "
            "free some space or set SUTURE_HOME to another disk"
        )


def existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    while not path.exists():
        path = path.parent
    return path


def check_folder(path: Path) -> None:
    """Refuse, before any work, a place where no folder can be.

    Raises:
        StoreError: naming the file that is in the way, or the folder that cannot be written.
    """
    place = existing(path.expanduser().absolute())
    if not place.is_dir():
        raise StoreError(f"{place} is a file where a folder should be written: remove it or choose another name")
    if not os.access(place, os.W_OK | os.X_OK):
        raise StoreError(f"{place} cannot be written to: choose another folder")


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill, which takes the place of `path` when the block ends without an error.

    Raises:
        StoreError: before the block, when `path` is a file.
    """
    path = path.resolve()  # behind a link the folder is replaced, not the link
    check_folder(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        yield work
        _open_to_readers(work)
        old = work.with_name(f"{work.name}.old")
        if path.exists():
            path.rename(old)  # removed only when the new one is in place
        work.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@dataclass(frozen=True)
class Artifact:
    """A finished folder in the store."""

    kind: str
    key: str
    path: Path

    @property
    def spec(self) -> dict[str, Any]:
        """What made it: `inputs`, `versions`, `made` (UTC) and `seconds`."""
        loaded: dict[str, Any] = json.loads((self.path / "spec.json").read_text())
        return loaded


class Store:
    """A folder of artifacts. `find` looks one up by its spec, `create` makes one."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or home() / "store"

    def key(self, kind: str, inputs: Mapping[str, Any]) -> str:
        """The 24-digit name of the artifact that these inputs make."""
        return digest({"kind": kind, "format": FORMAT, "inputs": inputs})[:24]

    def find(self, kind: str, inputs: Mapping[str, Any]) -> Artifact | None:
        """The finished artifact for these inputs, if there is one."""
        key = self.key(kind, inputs)
        path = self.root / kind / key
        return Artifact(kind, key, path) if (path / "spec.json").exists() else None

    def get(self, kind: str, inputs: Mapping[str, Any]) -> Artifact:
        """As `find`, for an artifact that must be there.

        Raises:
            StoreError: if it was removed since.
        """
        found = self.find(kind, inputs)
        if found is None:
            raise StoreError(f"the {kind} artifact {self.key(kind, inputs)} is gone from {self.root}: run again")
        return found

    def remove(self, kind: str, inputs: Mapping[str, Any]) -> None:
        """Delete an artifact, if it is there."""
        found = self.find(kind, inputs)
        if found is not None:
            shutil.rmtree(found.path, ignore_errors=True)

    @contextmanager
    def create(self, kind: str, inputs: Mapping[str, Any]) -> Iterator[Path]:
        """A temporary folder to fill; it gets its real name when the block ends without an error."""
        key = self.key(kind, inputs)
        final = self.root / kind / key
        final.parent.mkdir(parents=True, exist_ok=True)
        self._sweep(final.parent)
        work = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{platform.node()}-{os.getpid()}-"))
        started = time.monotonic()
        try:
            yield work
            spec = {
                "kind": kind,
                "format": FORMAT,
                "inputs": inputs,
                "versions": versions(),
                "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "seconds": round(time.monotonic() - started, 3),
            }
            write_json(work / "spec.json", spec)
            _open_to_readers(work)
            try:
                work.rename(final)
            except OSError:
                # another process finished the same artifact first: same inputs, so theirs is as good
                if not (final / "spec.json").exists():
                    shutil.rmtree(final)  # half deleted by somebody: no artifact any more
                    work.rename(final)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def list(self) -> list[Artifact]:
        """All finished artifacts, oldest first."""
        specs = sorted(self.root.glob("*/[!.]*/spec.json"), key=lambda path: path.stat().st_mtime)
        return [Artifact(spec.parent.parent.name, spec.parent.name, spec.parent) for spec in specs]

    @staticmethod
    def _sweep(folder: Path) -> None:
        """Remove what killed processes of this machine left behind; a shared disk may hold other machines' work."""
        for path in folder.glob(f".{glob.escape(platform.node())}-*-*"):
            owner = path.name.rsplit("-", 2)[1]
            if owner.isdigit() and not _alive(int(owner)):
                shutil.rmtree(path, ignore_errors=True)


def _open_to_readers(folder: Path) -> None:
    """Folders 755 and files 644: some libraries write files that only their owner can read.

    A file with a second name is somebody's, who gave it its mode.
    """
    for path in (folder, *folder.rglob("*")):
        if path.is_file() and path.stat().st_nlink > 1:
            continue
        path.chmod(0o755 if path.is_dir() else 0o644)


def _alive(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid)


class FileHashes:
    """sha256 of large files, remembered by path, size and time of change in `<home>/hashes.json`."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or home() / "hashes.json"
        try:
            known = json.loads(self.path.read_text())
        except (OSError, ValueError):
            known = {}
        self._known: dict[str, str] = known if isinstance(known, dict) else {}

    def of(self, path: Path) -> str:
        """The hash of one file's content (64 hex digits)."""
        real = path.resolve()
        if real.parent.name == "blobs" and len(real.name) == 64:
            return real.name  # the hub's cache names large files by this very hash
        stat = real.stat()
        mark = f"{real}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
        if mark not in self._known:
            with real.open("rb") as file:
                self._known[mark] = _digest_in_blocks(file)
            if stat.st_size > 1 << 20:  # small files are quicker to read than to look up
                write_json(self.path, {key: value for key, value in self._known.items() if _is_large(key)})
        return self._known[mark]


def _is_large(mark: str) -> bool:
    return int(mark.rsplit("|", 3)[1]) > 1 << 20


def _digest_in_blocks(file: Any) -> str:
    total = hashlib.sha256()
    while block := file.read(1 << 22):
        total.update(block)
    return total.hexdigest()
