"""A plain checkpoint: a patch folded into the merged weights. Stock classes load it, and it costs nothing to run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from suture.capture import capture
from suture.checkpoint import parse_reference, resolve
from suture.errors import SurgeryError
from suture.models import load_model
from suture.repair.patch import Folding, Patch, patched
from suture.repairing import Repairing
from suture.sidecars import copy_code, copy_tokenizer
from suture.states import Tokens
from suture.store import replaced_folder

SEQUENCES = 2  # of each domain's held-out text, to compare with
EXACT, ROUNDED = 1e-3, 1e-1  # of the largest state: in float32 throughout, and where weights are stored in less


def write_plain(job: Repairing, patch: Patch, out: Path, *, extra: Callable[[Path], None] | None = None) -> float:
    """Write the merged checkpoint with a patch in its weights; it is loaded and compared before it is kept.

    Args:
        out: a folder, which is replaced.
        extra: writes further files into the folder.

    Returns:
        Largest difference of held-out states between the checkpoint and what was scored, over the largest state.

    Raises:
        SurgeryError: when the checkpoint lacks a linear of the patch, or does not do what was scored: it is not kept.
    """
    texts = [job.tokens(member, "heldout").first(SEQUENCES) for member in job.members.values()]
    with replaced_folder(out) as folder:
        with patched(job.layers.model, patch) as model:
            known = [capture(model, text).states for text in texts]
            if job.merge is None:
                model.save_pretrained(folder)
        job.release_model()
        if job.merge is not None:
            folding = Folding(patch)
            job.merge.write(folder, job.progress, folding)
            folding.check()
        else:
            copy_tokenizer(job.donor.base, folder)
            copy_code(job.donor.base, folder)
        if extra is not None:
            extra(folder)
        difference = _difference(job, folder, texts, known)
        half = any(dtype != "F32" for dtype, _ in resolve(parse_reference(str(folder))).tensors.values())
        allowed = ROUNDED if half or job.dtype != torch.float32 else EXACT
        if not difference <= allowed:
            raise SurgeryError(
                f"the checkpoint's states differ from those that were scored by {difference:.2g} of the largest, more "
                f"than {allowed:g}: it is not kept"
            )
    return difference


def _difference(job: Repairing, folder: Path, texts: list[Tokens], known: list[Tensor]) -> float:
    with job.progress.stage("check the checkpoint", 1):
        remote = job.recipe.trust_remote_code
        written = load_model(resolve(parse_reference(str(folder))), job.dtype, job.device, trust_remote_code=remote)
        found = [capture(written, text).states.float() for text in texts]
    largest = max(float(states.abs().max()) for states in known)
    return max(float((one - two.float()).abs().max()) for one, two in zip(found, known, strict=True)) / largest
