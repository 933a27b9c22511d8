"""A patch: changes of some linears, as LoRA factors or as full matrices; tensors on disk, PEFT's format for factors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from suture.errors import StoreError, SurgeryError

PREFIX = "base_model.model."


@dataclass(frozen=True)
class Change:
    """What is added to one weight: up @ down ([out, r] @ [r, in]), or a full [out, in] where `down` is None."""

    up: Tensor
    down: Tensor | None = None

    def delta(self) -> Tensor:
        """[out, in] in float32."""
        return self.up.float() if self.down is None else self.up.float() @ self.down.float()

    def apply(self, inputs: Tensor) -> Tensor:
        """[n, in] → [n, out] in float32: what the change adds to the linear's output."""
        up = self.up.to(inputs.device).float()
        if self.down is None:
            return inputs.float() @ up.T
        return (inputs.float() @ self.down.to(inputs.device).float().T) @ up.T

    @property
    def rank(self) -> int | None:
        """r, or None for a full matrix."""
        return None if self.down is None else len(self.down)

    def count(self) -> int:
        """Numbers that it holds."""
        return self.up.numel() + (0 if self.down is None else self.down.numel())

    def to(self, dtype: torch.dtype) -> Change:
        """Rounded to a dtype."""
        return Change(self.up.to(dtype), None if self.down is None else self.down.to(dtype))


@dataclass(frozen=True)
class Patch:
    """Changes by the path of their linear in the model; `transposed` are stored [in, out] there (GPT-2)."""

    changes: Mapping[str, Change]
    transposed: frozenset[str] = field(default_factory=frozenset)
    strength: float = 1.0

    @property
    def full(self) -> bool:
        """Whether it holds full matrices, and so cannot be an adapter."""
        return any(change.down is None for change in self.changes.values())

    def count(self) -> int:
        """Numbers that it holds."""
        return sum(change.count() for change in self.changes.values())

    def delta(self, name: str) -> Tensor:
        """What is added to a weight, in the shape it is stored in, float32."""
        change = self.strength * self.changes[name].delta()
        return change.T if name in self.transposed else change

    def at(self, strength: float) -> Patch:
        """The same at another strength: 0 changes nothing, 1 is as it was fitted."""
        return replace(self, strength=strength)

    def save(self, folder: Path, base: str, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write a patch: low-rank ones are a PEFT LoRA adapter, full ones a file of their own.

        Args:
            base: what an adapter says it belongs to.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self.full:
            tensors = {name: (self.strength * change.delta()).to(dtype) for name, change in self.changes.items()}
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "patch.safetensors")
            kept = {"transposed": sorted(self.transposed)}
            (folder / "patch.json").write_text(json.dumps(kept, indent=2) + "\n")
            return
        tensors, ranks = {}, {}
        for name, change in self.changes.items():
            assert change.down is not None
            # alpha equals the rank, so that PEFT scales by one; the strength is part of B
            tensors[f"{PREFIX}{name}.lora_A.weight"] = change.down.to(dtype).contiguous()
            tensors[f"{PREFIX}{name}.lora_B.weight"] = (self.strength * change.up.float()).to(dtype).contiguous()
            ranks[name] = len(change.down)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        most = max(ranks.values(), default=1)
        uneven = {name: rank for name, rank in ranks.items() if rank != most}
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": most,
            "lora_alpha": most,
            "rank_pattern": uneven,
            "alpha_pattern": uneven,
            "target_modules": sorted(ranks),
            "fan_in_fan_out": bool(self.transposed),
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Patch:
        """Read what `save` wrote.

        Raises:
            StoreError: when the folder holds no patch.
        """
        if (folder / "patch.safetensors").exists():
            tensors = load_file(folder / "patch.safetensors")
            transposed = json.loads((folder / "patch.json").read_text())["transposed"]
            return cls({name: Change(tensor) for name, tensor in tensors.items()}, frozenset(transposed))
        if not (folder / "adapter_model.safetensors").exists():
            raise StoreError(f"{folder} holds no patch (patch.safetensors or adapter_model.safetensors)")
        tensors = load_file(folder / "adapter_model.safetensors")
        settings = json.loads((folder / "adapter_config.json").read_text())
        names = [key.removeprefix(PREFIX).removesuffix(".lora_A.weight") for key in tensors if ".lora_A." in key]
        changes = {
            name: Change(tensors[f"{PREFIX}{name}.lora_B.weight"], tensors[f"{PREFIX}{name}.lora_A.weight"])
            for name in names
        }
        return cls(changes, frozenset(names) if settings["fan_in_fan_out"] else frozenset())


@contextmanager
def patched(model: Any, patch: Patch) -> Iterator[Any]:
    """A model with a patch added to its weights inside the block; afterwards the weights are what they were.

    Raises:
        SurgeryError: for a linear that the model does not have, or has in another shape.
    """
    kept: dict[str, Tensor] = {}
    try:
        for name in patch.changes:
            weight = weight_of(model, name)
            delta = patch.delta(name)
            if weight.shape != delta.shape:
                raise SurgeryError(f"{name} is {list(weight.shape)} in the model, {list(delta.shape)} in the patch")
            kept[name] = weight.detach().clone()
            add(weight, delta)
        yield model
    finally:
        with torch.no_grad():
            for name, before in kept.items():
                weight_of(model, name).copy_(before)


class Folding:
    """A patch added to a checkpoint's tensors as they go by, whatever prefix their names have.

    Args:
        patch: full or low-rank.
    """

    def __init__(self, patch: Patch) -> None:
        self.patch = patch
        self.left = set(patch.changes)

    def _find(self, name: str) -> str | None:
        path = name.removesuffix(".weight")
        if not name.endswith(".weight"):
            return None
        return next((each for each in self.left if each == path or each.endswith(f".{path}")), None)

    def touches(self, name: str) -> bool:
        """Whether a tensor of this name changes."""
        return self._find(name) is not None

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor with its change added, in its own dtype."""
        found = self._find(name)
        if found is None:
            return tensor
        self.left.discard(found)
        changed = tensor.clone()
        add(changed, self.patch.delta(found))
        return changed

    def finish(self, folder: Path) -> None:
        """Refuse a checkpoint, written into a folder, that went by without some of the linears.

        Raises:
            SurgeryError: naming the first of them.
        """
        if self.left:
            raise SurgeryError(f"the checkpoint has no tensor for {min(self.left)}, which the patch changes")


@torch.no_grad()
def add(weight: Tensor, delta: Tensor) -> None:
    """Add to a weight in place, summed in float32 at least."""
    exact = torch.promote_types(weight.dtype, torch.float32)
    weight.copy_((weight.to(exact) + delta.to(device=weight.device, dtype=exact)).to(weight.dtype))


def weight_of(model: nn.Module, name: str) -> Tensor:
    """The weight of a linear, by its path.

    Raises:
        SurgeryError: for a linear that the model does not have.
    """
    try:
        found = model.get_submodule(name).weight
    except AttributeError as error:
        raise SurgeryError(f"{type(model).__name__} has no linear {name}, which the patch changes") from error
    assert isinstance(found, Tensor)
    return found
