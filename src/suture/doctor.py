"""What this machine and environment offer, and the command that mends what is missing."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass

from suture.store import existing, home

REQUIRED = (
    "torch",
    "transformers",
    "mergekit",
    "peft",
    "safetensors",
    "pydantic",
    "typer",
    "rich",
    "pyarrow",
    "matplotlib",
)
LOW_DISK = 5e9


@dataclass(frozen=True)
class Check:
    """One line of the report: `state` is ok, note or missing; `mend` is a command or empty."""

    what: str
    state: str
    found: str
    mend: str = ""


def examine() -> list[Check]:
    """All checks, in the order that they matter."""
    checks = [_python(), *(_package(name) for name in REQUIRED)]
    return [*checks, _device(), _memory(), _disk(), _hub()]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", "ok", version)


def _package(name: str) -> Check:
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "missing", "not installed", f"pip install {name}")


def _device() -> Check:
    try:
        import torch
    except ImportError:
        return Check("device", "missing", "torch does not import", "pip install --force-reinstall torch")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return Check("device", "ok", f"{torch.cuda.get_device_name()}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
    threads = f"CPU, {torch.get_num_threads()} threads"
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        return Check("device", "note", f"{threads}; this torch has no CUDA", "pip install --force-reinstall torch")
    return Check("device", "ok", threads)


def _memory() -> Check:
    try:
        import psutil
    except ImportError:
        return Check("memory", "missing", "psutil is not installed", "pip install psutil")
    memory = psutil.virtual_memory()
    return Check("memory", "ok", f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB available")


def _disk() -> Check:
    place = home()
    free = shutil.disk_usage(existing(place)).free
    found = f"{free / 1e9:.1f} GB free at {place}"
    return (
        Check("disk", "ok", found)
        if free > LOW_DISK
        else Check("disk", "note", found, "export SUTURE_HOME=<a larger disk>")
    )


def _hub() -> Check:
    try:
        from huggingface_hub import constants
    except ImportError:
        return Check("hub", "missing", "huggingface_hub is not installed", "pip install huggingface_hub")
    if constants.HF_HUB_OFFLINE:
        return Check("hub", "note", "switched off by HF_HUB_OFFLINE", "unset HF_HUB_OFFLINE")
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:
        pass  # an answer, whatever it says, is a connection
    except OSError as error:
        kept = home() / "models"
        return Check("hub", "note", f"not reached ({error})", f"put checkpoints into {kept}/<org>/<name>")
    return Check("hub", "ok", "reached")
