"""GGUF for llama.cpp, by llama.cpp's own converter; what it wrote is compared with the checkpoint's head."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from suture.checkpoint import header, read_json, weight_files
from suture.errors import ModelError, SurgeryError

SCRIPT = "convert_hf_to_gguf.py"
OUTTYPES = ("f32", "f16", "bf16", "q8_0")
# model types whose own head is left out without a word, so that llama.cpp reads the embedding, or stops the converter
DROPPED, STOPS = ("gemma", "gemma2"), ("cohere", "cohere2")
INSTEAD = (
    "export with --to plain for engines that run on PyTorch, or choose a correction inside the layers (deep, heal), "
    "which leaves the head alone"
)
LAST_LINES = 6
ROWS = 4096  # of a matrix, compared at a time
# allowed between stored and exact weights, as parts of the row's largest: half a step of each type, and a little
ROUNDING = {"F32": 1e-6, "F16": 6e-4, "BF16": 5e-3, "Q8_0": 5e-3}
SMALLEST = 1e-2  # rows below lose more: the steps of half precision, q8_0's scales too, get no smaller there
Rows = NDArray[np.float32]


def find_converter(named: Path | None = None) -> Path:
    """llama.cpp's converter: in the folder that is named, in that of `$LLAMA_CPP`, or on `PATH`.

    Args:
        named: the script itself, a folder of llama.cpp's source, or one of llama-cpp-python's, which holds it.

    Raises:
        ModelError: when it is not there, with where to get it.
    """
    place, said = (named, "--llama-cpp") if named else (os.environ.get("LLAMA_CPP"), "$LLAMA_CPP")
    if place:
        folder = Path(place).expanduser()
        for file in (folder, folder / SCRIPT, folder / "vendor" / "llama.cpp" / SCRIPT):
            if file.is_file():
                return file.resolve()
        raise ModelError(f"{said}: {folder} is neither {SCRIPT} nor a folder of llama.cpp's source, which holds it")
    found = shutil.which(SCRIPT)
    if found is None:
        raise ModelError(
            f"GGUF is written by llama.cpp's {SCRIPT}, which is not on PATH: get the source "
            "(git clone https://github.com/ggml-org/llama.cpp) and name its folder with --llama-cpp or $LLAMA_CPP"
        )
    return Path(found).resolve()


def refuse_early(config: dict[str, Any], changes_head: bool) -> None:
    """Refuse, before any work, what would fail after it.

    Args:
        config: config.json of the checkpoint that is going to be converted.
        changes_head: whether the correction changes the head's weights.

    Raises:
        SurgeryError: for a correction in the head, and an architecture whose head GGUF has no place for.
    """
    kind = config.get("model_type")
    if changes_head and kind in DROPPED + STOPS:
        does = "drops" if kind in DROPPED else "does not take"
        raise SurgeryError(
            f"the correction is in the head, and llama.cpp's converter {does} a head of {kind} models that is not "
            f"their embedding: {INSTEAD}"
        )


def try_vocabulary(folder: Path, converter: Path, *, trust_remote_code: bool = False) -> None:
    """Have the converter write a checkpoint's vocabulary only: seconds, before any weight is read.

    This finds an architecture or a tokenizer that it does not know, and Python packages that it lacks.

    Args:
        folder: config and tokenizer; weights may be there.

    Raises:
        ModelError: with the last lines of what the converter said.
    """
    _need_reader()  # to compare what it writes, later
    with tempfile.TemporaryDirectory() as work:
        _run(folder, Path(work) / "vocabulary.gguf", converter, ["--vocab-only"], trust_remote_code)


def convert(
    checkpoint: Path,
    out: Path,
    converter: Path,
    *,
    outtype: str = "f32",
    trust_remote_code: bool = False,
) -> Path:
    """Write a checkpoint as GGUF. `check_written` then has to compare the two.

    Args:
        checkpoint: a folder that transformers' own classes load.
        out: the file, which is replaced.
        outtype: one of `OUTTYPES`.
        trust_remote_code: allow the converter, which never asks, to run code that the checkpoint brings.

    Returns:
        `out`.

    Raises:
        ModelError: for an unknown `outtype`, code in the checkpoint that is not allowed, or a converter that fails,
            with the last lines of what it said.
    """
    if outtype not in OUTTYPES:
        raise ModelError(f"outtype: {outtype!r} is not one of {', '.join(OUTTYPES)}")
    _run(checkpoint, out, converter, ["--outtype", outtype], trust_remote_code)
    return out


def _run(folder: Path, out: Path, converter: Path, flags: list[str], trusted: bool) -> None:
    if not trusted:
        _refuse_code(folder)
    command = [sys.executable, str(converter), str(folder), "--outfile", str(out), *flags]
    out.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},  # all that it needs is in the folder
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise ModelError(f"cannot run {command[0]}: {error}") from error
    if done.returncode == 0 and out.is_file():
        return
    out.unlink(missing_ok=True)  # half a file
    said = "\n".join([line for line in done.stderr.splitlines() if line.strip()][-LAST_LINES:])
    how = f"ended with status {done.returncode}" if done.returncode else f"wrote no {out.name}"
    raise ModelError(f"{converter} {how}; its last lines:\n{said or '(none)'}")


def _need_reader() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("reading a GGUF file takes the package gguf: pip install 'suture[gguf]'")


def _refuse_code(folder: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).exists() and read_json(folder / name, "").get("auto_map"):
            raise ModelError(
                f"{folder / name} brings code of its own (auto_map), which llama.cpp's converter would run: "
                "allow it with trust_remote_code in the recipe"
            )


def check_written(gguf: Path, checkpoint: Path) -> None:
    """Compare the head in a GGUF file with the checkpoint's, up to the rounding of the type that it is stored in.

    llama.cpp reads `output.weight`, or the embedding where there is none. A converter that drops the head leaves the
    second behind, and the engine then runs an uncorrected model without an error.

    Raises:
        ModelError: without the package gguf, or for a file that it cannot read.
        SurgeryError: when the head was dropped or changed on the way.
    """
    _need_reader()
    from gguf import MODEL_TENSOR, GGUFReader
    from gguf.tensor_mapping import TensorNameMap

    try:
        tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    except (ValueError, LookupError, OSError) as error:
        raise ModelError(f"{gguf} cannot be read as GGUF ({error})") from error
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{gguf} holds no token_embd.weight: it is not a language model")
    head = _find(checkpoint, TensorNameMap.mappings_cfg[MODEL_TENSOR.OUTPUT])
    embedding = _find(checkpoint, TensorNameMap.mappings_cfg[MODEL_TENSOR.TOKEN_EMBD])
    stored = tensors.get("output.weight")
    if stored is None:
        if head and (embedding is None or _difference(_rows(*head), _rows(*embedding)) > 0):
            raise SurgeryError(
                f"{gguf.name} has no head of its own, though {head[1]} in the checkpoint is not the embedding: "
                f"llama.cpp's converter dropped it, and the model would run without its correction; {INSTEAD}"
            )
        return
    own = head or embedding  # a checkpoint without a head of its own reads its embedding
    if own is None:
        raise ModelError(f"{checkpoint} holds neither a head nor an embedding whose name the package gguf knows")
    kind = stored.tensor_type.name
    if kind not in ROUNDING:
        raise ModelError(f"{gguf.name} stores its head as {kind}; choose an outtype of {', '.join(OUTTYPES)}")
    # Falcon-H1's logits are multiplied by a number, which the converter puts into the head
    factor = read_json(checkpoint / "config.json", "a checkpoint needs one").get("lm_head_multiplier", 1.0)
    difference = _difference(_rows(*own, factor), _dequantized(stored))
    if not difference <= ROUNDING[kind]:
        raise SurgeryError(
            f"the head in {gguf.name} differs from {own[1]} in the checkpoint by {difference:.2g} of a row's largest "
            f"weight, more than {kind} can explain ({ROUNDING[kind]:g}): llama.cpp's converter changed it; {INSTEAD}"
        )


def _find(checkpoint: Path, names: tuple[str, ...]) -> tuple[Path, str] | None:
    """The shard and name of the tensor that the converter would take for one of these."""
    for shard in weight_files(checkpoint):
        for name in header(shard):
            stem = name.removesuffix(".weight")
            # multimodal checkpoints keep the language model deeper; a lone last part (`output`) would fit other tensors
            if stem in names or stem.endswith(tuple(f"language_model.{known}" for known in names)):
                return shard, name
    return None


def _rows(shard: Path, name: str, factor: float = 1.0) -> Iterator[Rows]:
    """[V, H] in float32, `ROWS` rows at a time."""
    with safe_open(shard, framework="pt") as file:
        part = file.get_slice(name)
        for start in range(0, part.get_shape()[0], ROWS):
            yield (part[start : start + ROWS].float() * factor).numpy()


def _dequantized(tensor: Any) -> Iterator[Rows]:
    """[V, H] in float32, `ROWS` rows at a time, of a tensor in a GGUF file."""
    from gguf import dequantize

    for start in range(0, len(tensor.data), ROWS):
        yield dequantize(tensor.data[start : start + ROWS], tensor.tensor_type)


def _difference(ones: Iterator[Rows], others: Iterator[Rows]) -> float:
    """Largest difference of a weight, as a part of its row's largest; infinite where the shapes differ."""
    worst = 0.0
    for one, other in zip_longest(ones, others):
        if one is None or other is None or one.shape != other.shape:
            return float("inf")
        gap = np.abs(one - other).max(axis=1)  # [rows]
        worst = max(worst, float((gap / np.maximum(np.abs(one).max(axis=1), SMALLEST)).max()))
    return worst
