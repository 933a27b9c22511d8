"""A target's residual stream behind every linear that writes to it, a file a layer: what a merged model should have."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from suture.errors import SurgeryError
from suture.layers import Layers
from suture.progress import SILENT, Progress
from suture.states import Tokens


@torch.inference_mode()
def write_residuals(
    layers: Layers, tokens: Tokens, folder: Path, *, progress: Progress = SILENT, stage: str = "residuals"
) -> Tensor:
    """Read tokens layer by layer and write `layer-000.safetensors`, …: [N, H] a writer, in the model's dtype.

    Returns:
        [N, H] final states, as `capture` gives them.
    """
    batches = layers.begin(tokens)
    with progress.stage(stage, len(layers)) as advance:
        for index, writers in enumerate(layers.writers):
            found: list[Tensor] = []
            for batch in batches:
                seen = layers.tap(index, batch, writers, whole=True)
                for place in range(len(writers)):
                    rows = seen.residual(batch, writers[: place + 1]).cpu()  # [n, H]
                    if place == len(found):
                        found.append(rows.new_empty(len(tokens.ids), rows.shape[-1]))
                    found[place][batch.rows] = rows
                assert seen.out is not None
                batch.states = seen.out
            save_file({str(place): rows for place, rows in enumerate(found)}, folder / _name(index))
            advance(1)
    return layers.finish(batches, len(tokens.ids))


class Residuals:
    """Residuals on disk; calling it reads those behind one linear."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, layer: int, writer: int) -> Tensor:
        """[N, H].

        Raises:
            SurgeryError: for a layer or linear that the target did not have.
        """
        file = self.folder / _name(layer)
        if file.exists():
            with safe_open(file, framework="pt") as found:
                if str(writer) in found.keys():  # noqa: SIM118 - not a mapping
                    rows: Tensor = found.get_tensor(str(writer))
                    return rows
        raise SurgeryError(f"the target has no linear {writer} in layer {layer}: its architecture differs")


def _name(layer: int) -> str:
    return f"layer-{layer:03}.safetensors"
