"""Surgery modules, by name. One file each; a new one is added to MODULES and is tested with the others."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from suture.errors import StoreError, SurgeryError, did_you_mean
from suture.surgery.add import Add
from suture.surgery.affine import Affine
from suture.surgery.base import Surgery
from suture.surgery.cosine import Cosine
from suture.surgery.darts import Darts
from suture.surgery.linear import Linear
from suture.surgery.parallel import Parallel
from suture.surgery.standard import Standard

MODULES: dict[str, type[Surgery]] = {
    "standard": Standard,
    "darts": Darts,
    "add": Add,
    "parallel": Parallel,
    "affine": Affine,
    "linear": Linear,
    "cosine": Cosine,
}

__all__ = [
    "MODULES",
    "Add",
    "Affine",
    "Cosine",
    "Darts",
    "Linear",
    "Parallel",
    "Standard",
    "Surgery",
    "load_surgery",
    "make_surgery",
    "save_surgery",
]


def make_surgery(name: str, hidden: int, rank: int = 16, t_max: int = 512, waves: int = 8) -> Surgery:
    """A new module, which corrects nothing yet.

    Args:
        name: one of MODULES.
        hidden, rank, t_max: as in `Surgery`.
        waves: cosines of position, for `cosine`; the others have none.

    Raises:
        SurgeryError: for an unknown name, with the nearest, a rank above H, or no waves.
    """
    if name not in MODULES:
        raise SurgeryError(f"unknown surgery module {name!r}; {did_you_mean(name, MODULES)}")
    if rank > hidden:
        raise SurgeryError(f"rank is {rank}, above the width of the states, {hidden}: lower it")
    if waves < 1:
        raise SurgeryError(f"waves is {waves}: a correction by position needs 1 or more")
    kind = MODULES[name]
    given = {"waves": waves}
    return kind(hidden, rank, t_max, **{key: given[key] for key in kind.own})


def save_surgery(module: Surgery, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `surgery.safetensors` and `surgery.json` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    name = next(name for name, kind in MODULES.items() if type(module) is kind)
    tensors = {key: value.detach().to(dtype).contiguous().cpu() for key, value in module.state_dict().items()}
    save_file(tensors, folder / "surgery.safetensors")
    settings = {"module": name, "hidden": module.hidden, "rank": module.rank, "t_max": module.t_max}
    settings |= {key: getattr(module, key) for key in module.own}
    settings["strength"] = module.strength
    (folder / "surgery.json").write_text(json.dumps(settings, indent=2) + "\n")


def load_surgery(folder: Path | str) -> Surgery:
    """Read a module that `save_surgery` wrote, in float32.

    Raises:
        StoreError: when the folder holds none.
    """
    path = Path(folder)
    if not (path / "surgery.json").exists() or not (path / "surgery.safetensors").exists():
        raise StoreError(f"{path} holds no surgery module (surgery.json, surgery.safetensors)")
    settings = json.loads((path / "surgery.json").read_text())
    own = {key: settings[key] for key in ("waves",) if key in settings}
    module = make_surgery(settings["module"], settings["hidden"], settings["rank"], settings["t_max"], **own)
    module.load_state_dict({key: value.float() for key, value in load_file(path / "surgery.safetensors").items()})
    module.strength = float(settings.get("strength", 1.0))
    return module.eval().requires_grad_(False)
