"""What every test stands on: its own SUTURE_HOME and no network."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from handmade import write_adapter, write_checkpoint

# read by huggingface_hub when it is imported: before any test module
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# where transformers copies the code of checkpoints to: not shared with other processes that test at the same time
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="suture-modules-")
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUTURE_HOME", str(tmp_path_factory.mktemp("suture_home")))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """`checkpoint("name", …)` writes a checkpoint by hand."""
    return lambda name, *args, **fields: write_checkpoint(tmp_path / name, *args, **fields)


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., Path]:
    """`adapter("name", base, …)` writes a LoRA by hand."""
    return lambda name, *args, **fields: write_adapter(tmp_path / name, *args, **fields)


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny family: see `relatives`."""
    from relatives import make_family

    return make_family(tmp_path_factory.mktemp("family"))
