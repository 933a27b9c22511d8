"""Adapters as full weights, one tensor at a time: what mergekit reads when a parent is `base+adapter`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from suture.checkpoint import Checkpoint, weight_files
from suture.errors import MergeError

# settings under which an adapter is more than W + (alpha / r) B A
UNUSUAL = ("use_dora", "modules_to_save", "layer_replication", "trainable_token_indices", "lora_bias")
KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.\w+)?\.weight")


class AdapterReader:
    """Reads tensors for mergekit: W + (alpha / r) B A where an adapter changes W (PEFT's own formula), else W.

    Raises:
        MergeError: for adapters that are more than plain LoRA, or touch weights the base does not store.
    """

    def __init__(self, base: Any, checkpoint: Checkpoint) -> None:
        self.base, self.index = base, base.index
        self.factors = lora_factors(checkpoint)
        self.transposed = bool(checkpoint.adapter_config.get("fan_in_fan_out"))  # GPT-2 stores [in, out]

    def get_tensor(
        self, key: str, device: str = "cpu", aliases: list[str] | None = None, raise_on_missing: bool = True
    ) -> Tensor | None:
        """One tensor, in the base's dtype; the sum is made in float32."""
        tensor: Tensor | None = self.base.get_tensor(key, device, aliases, raise_on_missing)
        if tensor is None or key not in self.factors:
            return tensor
        return with_lora(tensor, self.factors[key], self.transposed)

    def flush(self) -> None:
        """Close the base's shard."""
        self.base.flush()


def with_lora(weight: Tensor, factors: tuple[Tensor, Tensor, float], transposed: bool) -> Tensor:
    """W + (alpha / r) B A in W's dtype, summed in float32; `transposed` weights are stored [in, out]."""
    down, up, scale = factors
    delta = (up.to(weight.device).float() @ down.to(weight.device).float()) * scale  # [out, in]
    return (weight.float() + (delta.T if transposed else delta)).to(weight.dtype)


def lora_factors(checkpoint: Checkpoint) -> dict[str, tuple[Tensor, Tensor, float]]:
    """base tensor name → (A [r, in], B [out, r], alpha / r) of an adapter.

    Raises:
        MergeError: for adapters that are more than plain LoRA, or touch weights the base does not store.
    """
    settings = checkpoint.adapter_config
    unusual = [name for name in UNUSUAL if settings.get(name)]
    if settings.get("peft_type") != "LORA" or unusual:
        what = ", ".join(unusual) or str(settings.get("peft_type"))
        raise MergeError(
            f"the adapter {checkpoint.reference} is not a plain LoRA ({what}): merge it into its base first "
            "(peft's merge_and_unload) and give the checkpoint"
        )
    assert checkpoint.adapter is not None
    sides: dict[str, dict[str, Tensor]] = {}
    for file in weight_files(checkpoint.adapter):
        for key, tensor in load_file(file).items():
            match = KEY.fullmatch(key)
            if match is None:
                raise MergeError(f"the adapter {checkpoint.reference} has a tensor that is no LoRA factor: {key}")
            sides.setdefault(match["module"], {})[match["side"]] = tensor
    factors = {}
    for module, pair in sides.items():
        name = f"{module}.weight"
        if set(pair) != {"A", "B"}:
            raise MergeError(f"the adapter {checkpoint.reference} lacks one factor of {module}")
        if name not in checkpoint.tensors:
            raise MergeError(f"the adapter {checkpoint.reference} changes {name}, which its base does not store")
        rank = _pattern(settings.get("rank_pattern"), module, settings["r"])
        alpha = _pattern(settings.get("alpha_pattern"), module, settings["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        factors[name] = (pair["A"], pair["B"], scale)
    return factors


def _pattern(patterns: Mapping[str, float] | None, module: str, default: float) -> float:
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return float(value)
    return float(default)
