"""What writing exports of a 7B-shaped checkpoint takes: seconds, peak memory above the start, bytes written.

The shards are sparse files of zeros in Llama-2-7B's shapes, so that they take no disk and can be made anywhere; what is
linked, read and written is the same as with real weights.

    python benchmarks/export.py [FOLDER]
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from suture.checkpoint import parse_reference, resolve
from suture.export.head import HeadFolding, head_lora
from suture.export.remote import write_remote
from suture.export.shards import link_shards
from suture.surgery import Linear, make_surgery

SHARD = 5_000_000_000
DOMAINS = ("code", "math", "instruct")


def sparse_checkpoint(folder: Path, model: torch.nn.Module) -> None:
    """Shards of at most 5 GB in bf16, all zeros, with headers and an index as transformers writes them."""
    shards: list[dict[str, tuple[list[int], int]]] = [{}]
    size = 0
    for name, tensor in model.state_dict().items():
        count = 2 * tensor.numel()
        if size + count > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = (list(tensor.shape), count)
        size += count
    places = {}
    for number, tensors in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, offset = {}, 0
        for name, (shape, count) in tensors.items():
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + count]}
            offset += count
            places[name] = file.name
        text = json.dumps(header).encode()
        with file.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + offset)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def measured(call: Callable[[], object]) -> tuple[float, int]:
    """(seconds, highest private memory above the start in bytes) of a call; pages of mapped files do not count."""
    process, stop, most = psutil.Process(), threading.Event(), 0

    def private() -> int:
        found = process.memory_info()
        return int(found.rss - found.shared)

    start = private()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.01):
            most = max(most, private() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.monotonic()
    call()
    seconds = time.monotonic() - began
    stop.set()
    thread.join()
    return seconds, most


def main() -> None:
    config = LlamaConfig(architectures=["LlamaForCausalLM"], tie_word_embeddings=False)  # its defaults are a 7B
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as place:
        source = Path(place) / "merged"
        source.mkdir()
        sparse_checkpoint(source, model)
        config.save_pretrained(source)
        stored = resolve(parse_reference(str(source))).tensors
        linear = make_surgery("linear", config.hidden_size)
        assert isinstance(linear, Linear)

        def bring(folder: Path, change: HeadFolding | None = None) -> None:
            folder.mkdir()
            (folder / "config.json").write_bytes((source / "config.json").read_bytes())
            notes = link_shards(source, folder, change)
            assert not notes, notes

        def plain() -> None:
            change = HeadFolding(model, linear, stored)
            bring(Path(place) / "plain", change)
            change.finish(Path(place) / "plain")

        def remote() -> None:
            bring(Path(place) / "hf")
            modules = {name: make_surgery("darts", config.hidden_size) for name in DOMAINS}
            write_remote(Path(place) / "hf", modules, model)

        def adapter() -> None:
            bring(Path(place) / "adapter")
            weight = HeadFolding(model, linear, stored).read(Path(place) / "adapter")
            for name in DOMAINS:
                head_lora(model, linear, weight).save(Path(place) / "adapter" / name, "merged")

        kept = {file.stat().st_ino for file in source.iterdir()}
        shards = [f"{file.stat().st_size / 1e9:.2f}" for file in sorted(source.glob("*.safetensors"))]
        print(f"merged: shards of {', '.join(shards)} GB")
        for name, write in (("hf", remote), ("adapter", adapter), ("plain", plain)):
            seconds, memory = measured(write)
            new = [
                file for file in (Path(place) / name).rglob("*") if file.is_file() and file.stat().st_ino not in kept
            ]
            written = sum(file.stat().st_size for file in new)
            print(f"{name}: {seconds:.1f} s, {memory / 1e9:.2f} GB of memory, {written / 1e9:.3f} GB written")


if __name__ == "__main__":
    main()
