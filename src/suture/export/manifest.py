"""What suture.json says of an export; nothing in it is about the machine that made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suture.checkpoint import read_json
from suture.correcting import Correcting
from suture.corrections import AUTO, Surgery
from suture.evaluate.heldout import Score
from suture.export.public import public_recipe, public_reference
from suture.history import read_history
from suture.store import Artifact, versions

FORMAT = 1


@dataclass(frozen=True)
class Exported:
    """What came of an export: its folder and manifest, scores, time in seconds, peak memory in bytes."""

    folder: Path
    manifest: dict[str, Any]
    scores: list[Score]
    seconds: float
    peak: int

    def document(self) -> dict[str, Any]:
        """As plain data, for `--json`."""
        return {
            "folder": str(self.folder),
            **{key: self.manifest[key] for key in ("to", "domains", "default", "corrections", "notes", "verified")},
            "scores": [score.row() for score in self.scores],
            "seconds": self.seconds,
            "peak_bytes": self.peak,
        }


def describe(job: Correcting, kind: str, made: Mapping[str, Artifact], scores: Sequence[Score]) -> dict[str, Any]:
    """The manifest of one correction of a run, before it is verified.

    Args:
        kind: hf, plain, adapter, vllm or gguf.
        made: domain → correction.
    """
    (surgery,), folder = job.recipe.surgery, job.recipe.folder
    told = public_recipe(job.recipe.model_dump(mode="json", by_alias=True, exclude_none=True), folder)
    if job.merge is not None:
        told["merge"] = public_recipe(job.merge.written, folder)
    corrections = {name: _row(surgery, artifact, name) for name, artifact in made.items()}
    if surgery.module == "heal":
        corrections = {"*": next(iter(corrections.values()))}
    return {
        "format": FORMAT,
        "to": kind,
        "name": str(job.recipe.name),
        "domains": list(made),
        "default": None,
        "corrections": corrections,
        "router": None,
        "dtype": str(job.dtype),
        "merged": job.fingerprint,
        "base": public_reference(str(job.donor.reference), folder),
        "targets": {name: public_reference(member.domain.target, folder) for name, member in job.members.items()},
        "recipe": told,
        "scores": [score.row() for score in scores],
        "notes": [],
        "verified": [],
        "versions": versions(),
    }


def _row(surgery: Surgery, artifact: Artifact, domain: str) -> dict[str, Any]:
    """One correction: what `auto` chose is named by its module."""
    history = read_history(artifact, domain)
    chosen, settings = artifact.path / "auto.json", artifact.path / "surgery.json"
    picked = read_json(chosen, "")["chosen"] if chosen.exists() else {}
    module = read_json(settings, "")["module"] if settings.exists() else surgery.module
    return {
        "surgery": surgery.label,
        "module": picked["surgery"] if module == AUTO else module,
        "rank": picked.get("rank") or surgery.rank or history.get("rank"),
        "strength": history["strength"],
        "parameters": history["parameters"],
    }
