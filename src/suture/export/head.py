"""A linear correction of the last states, moved into the head: W (h - s (A B h + b)) = (W - s (W A) B) h - s W b."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from suture.errors import SurgeryError
from suture.export.shards import add_tensors, change_config, read_tensor, replace_tensor
from suture.repair.patch import Change, Patch
from suture.surgery import Affine

Stored = Mapping[str, tuple[str, tuple[int, ...]]]
ROWS = 8192  # of a head, worked on at a time in float64


class HeadFolding:
    """A correction added to a head's weight and bias as a checkpoint's tensors go by; a tied head is untied.

    Args:
        model: the merged model, or one of its class without weights.
        surgery: an affine or linear module.
        stored: name → (dtype, shape) of the checkpoint's tensors, or of one with the same names.

    Raises:
        SurgeryError: for a model without a linear head, or a constant that its head cannot hold.
    """

    def __init__(self, model: Any, surgery: Affine, stored: Stored) -> None:
        self.surgery = surgery
        self.path = head_path(model)
        self.name = stored_head(model, self.path, stored)
        self.embedding = _embedding(model, stored)
        self.seen = False  # whether the weight went by
        self.shift: Tensor | None = None  # [V] what a constant takes from the logits, known from then on
        if surgery.offset and model.get_output_embeddings().bias is None:
            raise SurgeryError(f"the head {self.path} holds no bias, which the constant of an affine module needs")

    def touches(self, name: str) -> bool:
        """Whether a tensor is the head's."""
        return self.name is not None and name in (self.name, _bias(self.name))

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """The head's weight [V, H] with its correction; other tensors as they are. A bias waits for `finish`."""
        if name != self.name:
            return tensor
        return self._folded(tensor)

    def _folded(self, weight: Tensor) -> Tensor:
        self.seen = True
        if self.surgery.offset:
            constant = self.surgery.strength * self.surgery.up.bias.double()  # [H]
            self.shift = torch.cat([rows.double() @ constant for rows in torch.split(weight, ROWS)])
        return folded(weight, self.surgery)

    def read(self, folder: Path) -> Tensor:
        """[V, H] of a checkpoint's head, or of what it is tied to.

        Raises:
            SurgeryError: when the checkpoint holds neither.
        """
        for source in (self.name, self.embedding):  # a tied head may have been left out
            tensor = read_tensor(folder, source) if source else None
            if tensor is not None:
                return tensor
        raise SurgeryError(f"the checkpoint holds no tensor for the head {self.path}, which the correction changes")

    def finish(self, folder: Path) -> None:
        """Give a tied head weights of its own, and say so in the config.

        Raises:
            SurgeryError: when the checkpoint holds neither the head nor what it is tied to.
        """
        if not self.seen:
            add_tensors(folder, {f"{self.path}.weight": self._folded(self.read(folder))})
        if self.shift is not None:
            shift = self.shift
            replace_tensor(
                folder, _bias(self.name or f"{self.path}.weight"), lambda bias: (bias.double() - shift).to(bias.dtype)
            )

        def untie(config: dict[str, Any]) -> None:
            for settings in (config, config.get("text_config")):
                if isinstance(settings, dict):
                    settings["tie_word_embeddings"] = False

        change_config(folder, untie)


def head_lora(model: Any, surgery: Affine, weight: Tensor) -> Patch:
    """The correction as a LoRA on the head: lora_A = B, lora_B = -s W A.

    Args:
        weight: [V, H] of the head.

    Raises:
        SurgeryError: for a module with a constant, which no LoRA holds.
    """
    if surgery.offset:
        raise SurgeryError("a LoRA holds no constant: take a linear module instead of an affine one")
    a, b = surgery.up.weight.double(), surgery.down.weight  # [H, r], [r, H]
    up = torch.cat([-surgery.strength * (rows.double() @ a) for rows in torch.split(weight, ROWS)])  # [V, r]
    return Patch({head_path(model): Change(up.float(), b.float())})


def folded(weight: Tensor, surgery: Affine) -> Tensor:
    """W - s (W A) B, [V, H], summed in float64 and rounded once."""
    a, b = surgery.up.weight.double(), surgery.down.weight.double()  # [H, r], [r, H]
    parts = [
        (w - surgery.strength * (w @ a) @ b).to(weight.dtype) for w in map(Tensor.double, torch.split(weight, ROWS))
    ]
    return torch.cat(parts)


def head_path(model: Any) -> str:
    """The path of the head in a model.

    Raises:
        SurgeryError: for a model whose logits do not come from one linear layer.
    """
    head = model.get_output_embeddings()
    found: str | None = next(
        (name for name, module in model.named_modules() if head is not None and module is head), None
    )
    if found is None:
        raise SurgeryError(f"{type(model).__name__} has no linear head to put a correction in: export --to hf")
    return found


def stored_head(model: Any, path: str, stored: Stored) -> str | None:
    """The name that a head's weight is stored under, or None where the checkpoint holds none: it is tied.

    Checkpoints of before a library renamed its modules keep their names: then it is the only matrix of the embedding's
    shape beside the embedding.
    """
    if f"{path}.weight" in stored:
        return f"{path}.weight"
    embedding = _embedding(model, stored)
    shape = stored[embedding][1] if embedding else None
    alike = [name for name, (_, found) in stored.items() if found == shape and not any(map(str.isdigit, name))]
    others = [name for name in alike if name != embedding]
    return others[0] if len(others) == 1 else None


def _embedding(model: Any, stored: Stored) -> str | None:
    """The stored name of the input embedding; checkpoints may leave out the first parts of a path."""
    embedding = model.get_input_embeddings()
    path = next(f"{name}.weight" for name, module in model.named_modules() if module is embedding)
    near = (name for name in stored if name == path or path.endswith(f".{name}") or name.endswith(f".{path}"))
    return next(near, None)


def _bias(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
