"""A target's weights, one linear at a time: from its shards by memory map, an adapter added where there is one."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from suture.adapter import lora_factors, with_lora
from suture.checkpoint import Checkpoint, header


class Weights:
    """Reads weights of a checkpoint by the path that their linear has in the model.

    Raises:
        MergeError: for an adapter that is more than plain LoRA.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.factors = lora_factors(checkpoint) if checkpoint.adapter else {}
        self.transposed = bool(checkpoint.adapter_config.get("fan_in_fan_out"))  # GPT-2 stores [in, out]

    @cached_property
    def _files(self) -> dict[str, Path]:
        return {name: shard for shard in self.checkpoint.shards for name in header(shard)}

    def __call__(self, path: str) -> Tensor | None:
        """The weight as it is stored, float32; None where the checkpoint keeps it under another name."""
        wanted = f"{path}.weight"
        # checkpoints may leave out the name of the decoder, or the model may
        name = next((name for name in self._files if _same(name, wanted)), None)
        if name is None:
            return None
        with safe_open(self._files[name], framework="pt") as shard:
            weight: Tensor = shard.get_tensor(name).float()
        if name in self.factors:
            weight = with_lora(weight, self.factors[name], self.transposed)
        return weight


def _same(stored: str, wanted: str) -> bool:
    return stored == wanted or wanted.endswith(f".{stored}") or stored.endswith(f".{wanted}")
