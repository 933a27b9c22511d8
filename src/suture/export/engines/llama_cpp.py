"""Load a GGUF with llama-cpp-python and compare it with reference logits: `PYTHON llama_cpp.py REQUEST.json`.

Stands alone: the interpreter may be another environment's, which needs llama-cpp-python (and numpy, which that brings).
The last line of what it prints is a JSON document.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOAT32 = 0  # of ggml's types
READ = {"I64": np.int64, "F32": np.float32}


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a safetensors file, mapped; without the library, which this environment may lack."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", offset=8 + length)
    return {
        name: data[slice(*entry["data_offsets"])].view(READ[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in entries.items()
    }


def check(request_file: Path) -> dict[str, object]:
    """What llama.cpp makes of each case's tokens, one sequence at a time.

    Raises:
        SystemExit: when the folder does not hold one GGUF file, or its logits are not as many as the reference's.
    """
    llama_cpp = importlib.import_module("llama_cpp")
    request = json.loads(request_file.read_text())
    tensors = read_tensors(request_file.parent / request["tensors"])
    files = sorted(Path(request["folder"]).glob("*.gguf"))
    if len(files) != 1:
        sys.exit(f"{request['folder']} holds {len(files)} .gguf files; one is expected")
    longest = max(len(tensors[f"ids.{case['index']}"]) for case in request["cases"]) + request["new_tokens"]
    model = llama_cpp.Llama(
        str(files[0]),
        n_ctx=longest,
        n_gpu_layers=0,
        logits_all=True,
        type_k=FLOAT32,  # the cache is half precision otherwise
        type_v=FLOAT32,
        verbose=False,
    )
    cases = [_case(model, request, tensors, case["index"]) for case in request["cases"]]
    versions = {"llama-cpp-python": llama_cpp.__version__, "numpy": np.__version__}
    return {"engine": "llama.cpp", "versions": versions, "cases": cases}


def _case(model: Any, request: dict[str, Any], tensors: dict[str, NDArray[Any]], index: int) -> dict[str, object]:
    ids, known = tensors[f"ids.{index}"], tensors[f"logits.{index}"]  # [T], [T, V]
    if model.n_vocab() != known.shape[1]:
        sys.exit(f"the file has {model.n_vocab()} tokens, the reference {known.shape[1]}")
    model.reset()
    model.eval(ids.tolist())
    found = model.scores[: len(ids)].copy()  # [T, V]
    greedy = []
    for _ in range(request["new_tokens"]):
        greedy.append(int(model.scores[model.n_tokens - 1].argmax()))
        if len(greedy) < request["new_tokens"]:
            model.eval(greedy[-1:])
    difference = float(np.abs(found - known).max() / np.abs(known).max())
    return {"index": index, "logits": difference, "greedy": greedy}


if __name__ == "__main__":
    # a script's folder comes first on the path, and this file bears the engine's name
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]
    print(json.dumps(check(Path(sys.argv[1]))))
