"""The merged model as a checkpoint in a folder, as it is or with a correction in its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

from suture.export.shards import Change, link_shards
from suture.repairing import Repairing
from suture.sidecars import copy_code, copy_tokenizer, generation_config


def write_checkpoint(job: Repairing, folder: Path, change: Change | None = None) -> list[str]:
    """Write the merged checkpoint; at most one shard is in memory, and shards that do not change are linked.

    A merge that `suture merge` has not kept is carried out here, tensor by tensor.

    Args:
        folder: an empty one.
        change: a correction to put into the weights.

    Returns:
        What was copied from where, a sentence each.

    Raises:
        SurgeryError: when the checkpoint lacks a tensor that the correction changes.
    """
    kept = job.merged_artifact()
    notes: list[str] = []
    if job.merge is not None and kept is None:
        job.merge.write(folder, job.progress, change)
        notes.append("tokenizer, generation config and chat template: as mergekit writes them")
    elif kept is None and job.donor.adapter is not None:
        job.merged_model().save_pretrained(folder)
        job.release_model()
        _sidecars(job, folder)
        if change is not None:
            work = folder / "merged"
            work.mkdir()
            for file in folder.glob("model*.safetensors*"):
                file.rename(work / file.name)
            link_shards(work, folder, change)  # what is copied here was just made
            shutil.rmtree(work)
    else:
        source = kept.path if kept else job.donor.base
        notes += link_shards(source, folder, change)
        if kept:
            for file in source.iterdir():
                if file.is_file() and ".safetensors" not in file.name and file.name != "spec.json":
                    shutil.copyfile(file, folder / file.name)
            notes.append("tokenizer, generation config and chat template: as mergekit writes them")
        else:
            shutil.copyfile(source / "config.json", folder / "config.json")
            notes += _sidecars(job, folder)
    if change is not None:
        change.finish(folder)
    (folder / "mergekit_config.yml").unlink(missing_ok=True)  # names folders; suture.json has it without them
    return notes


def _sidecars(job: Repairing, folder: Path) -> list[str]:
    """Tokenizer, code and generation settings of the merged checkpoint, which stops where any target stops."""
    source = job.donor.base
    copy_tokenizer(source, folder)
    copy_code(source, folder)
    targets = [member.checkpoint.base for member in job.members.values()]
    generation_config([source, *targets]).save_pretrained(folder)
    missing = (
        [] if (source / "generation_config.json").exists() else ["a generation config was made, the merged has none"]
    )
    if not (folder / "tokenizer_config.json").exists():
        missing.append("the merged checkpoint has no tokenizer: none was copied")
    return [*missing, "tokenizer and chat template: of the merged checkpoint", "end tokens: of it and of all targets"]
