"""From a run to a folder that others load: a correction is written, checked in a process of its own, and described."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from suture.attach import attach, detach
from suture.checkpoint import header, weight_files
from suture.corrections import AUTO
from suture.errors import SurgeryError, did_you_mean
from suture.export.card import write_card
from suture.export.gguf import check_written, convert, find_converter, refuse_early, try_vocabulary
from suture.export.head import HeadFolding, head_lora, head_path
from suture.export.kinds import CODE, WEIGHTS
from suture.export.manifest import Exported, describe
from suture.export.plain import write_checkpoint
from suture.export.public import licences_of, parents
from suture.export.remote import class_names, write_remote
from suture.export.shards import Change
from suture.export.verify import (
    GGUF_LIMITS,
    LIMITS,
    MOST,
    ROUNDED,
    Case,
    Group,
    VerificationError,
    need_engine,
    reference,
    verify,
)
from suture.models import empty_model
from suture.pipeline import Run, peak_memory
from suture.reading import check_checkpoint_folder
from suture.repair.patch import Folding, Patch, patched
from suture.report.figures import draw_scores
from suture.router import LEAST
from suture.store import Artifact, replaced_folder, write_json
from suture.surgery import Affine, Surgery, load_surgery

PROMPTS = 2  # of each domain's held-out ones, to compare an export with
FIGURE = "figures/scores.png"


@dataclass(frozen=True)
class Options:
    """What a user may choose of an export.

    Attributes:
        default: the domain that acts when none is asked for, of exports that hold several.
        python: the interpreter of the engine's environment.
        converter: llama.cpp's, or a folder that holds it.
        outtype: of the GGUF file.
    """

    default: str | None = None
    force: bool = False
    python: Path | None = None
    converter: Path | None = None
    outtype: str = "f32"


class Exporting:
    """One correction of a run, on its way into a folder."""

    def __init__(self, job: Run, kind: str, options: Options) -> None:
        self.job, self.kind, self.options = job, kind, options
        self.notes: list[str] = []
        self.exact = False  # whether all that is compared is stored and computed in float32

    @cached_property
    def stock(self) -> Any:
        """A model of the merged one's class, without weights."""
        return empty_model(self.job.donor.base, trust_remote_code=self.job.recipe.trust_remote_code)

    @property
    def engine(self) -> str:
        """Which one loads the export to compare it."""
        return {"vllm": "vllm", "gguf": "llama_cpp"}.get(self.kind, "transformers")

    def check(self, out: Path) -> None:
        """Refuse what cannot be exported, before any work.

        Raises:
            SutureError: with what to do instead.
        """
        job, (surgery,) = self.job, self.job.recipe.surgery
        check_checkpoint_folder(out, self.options.force)
        for place, mark in ((out, "suture.json"), (failed_folder(out), "failed.json")):
            if place.exists() and not (place.is_dir() and (not any(place.iterdir()) or (place / mark).exists())):
                raise SurgeryError(f"{place} is no export, so it is not replaced: choose another folder")
        taken = {AUTO, "none"} & set(job.members)
        if taken and self.kind in CODE:
            raise SurgeryError(f"a domain cannot be called {min(taken)!r} in an export: rename it in the recipe")
        if self.options.outtype not in GGUF_LIMITS:
            raise SurgeryError(f"--outtype: {did_you_mean(self.options.outtype, GGUF_LIMITS)}")
        self._default(list(job.members))
        need_engine(self.engine, self.options.python, *(["peft"] if self.kind == "adapter" else []))
        if self.kind in CODE:
            class_names(self.stock)
            few = [name for name, member in job.members.items() if len(member.calibration) < LEAST]
            if few and len(job.members) > 1:
                raise SurgeryError(
                    f"domains.{few[0]}: the router needs {LEAST} calibration prompts or more of each domain"
                )
        elif surgery.module in ("affine", "linear"):
            path = head_path(self.stock)
            if surgery.module == "affine" and (
                self.kind == "adapter" or self.stock.get_output_embeddings().bias is None
            ):
                holder = "a LoRA" if self.kind == "adapter" else f"the head {path}"
                job.recipe.surgery = [surgery.model_copy(update={"module": "linear", "name": None})]
                self._note(f"{holder} holds no constant: affine is fitted without its own, as linear")
        if self.kind == "gguf":
            config = self.job.donor.config
            refuse_early(config, surgery.module in ("affine", "linear", AUTO))
            converter = find_converter(self.options.converter)
            remote = job.recipe.trust_remote_code
            try_vocabulary(job.donor.base, converter, trust_remote_code=remote)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.job.progress.note(text)

    def export(self, out: Path) -> Exported:
        """Make what is missing, write, verify, describe.

        Raises:
            VerificationError: when the export does not do what was scored; it lies in `<out>.failed` then.
        """
        job, shown, out = self.job, out, out.expanduser().resolve()
        self.check(out)
        job.capture(keep=True)
        scores = [score for member in job.members.values() for score in job.score(member)] + job.score_guard()
        (surgery,) = job.recipe.surgery
        made = {name: job.calibrate(member, surgery) for name, member in job.members.items()}
        job.remove_residuals()
        parts = {name: _load(artifact) for name, artifact in made.items()}
        router, routing = self._router(parts)
        if self.kind not in WEIGHTS and job.merge is not None:
            job.release_model()
            job.write_merged()  # kept in the store, where the export's shards are linked to
        with job.progress.stage("what the attached model does", 1):
            cases = self._reference(parts, router)
        job.release_model()
        manifest = describe(job, self.kind, made, scores)
        manifest |= {"default": self._default(list(made)), "router": routing}
        failed = failed_folder(out)
        with replaced_folder(out) as folder:
            with job.progress.stage("write", 1):
                self._write(folder, parts, router, manifest["default"])
            draw_scores(scores, folder / FIGURE)
            manifest["notes"] = self.notes
            try:
                with job.progress.stage("load it in a process of its own, and compare", 1):
                    manifest["verified"] = self._verify(folder, cases)
            except VerificationError as error:
                write_json(folder / "failed.json", error.report)
                with replaced_folder(failed) as place:
                    place.rmdir()
                    folder.rename(place)
                raise VerificationError(f"{error}; it is kept as {failed} with failed.json", error.report) from error
            write_json(folder / "suture.json", manifest)
            references = parents(job.recipe.model_dump(mode="json", by_alias=True, exclude_none=True))
            licences = licences_of(references, job.recipe.folder)
            write_card(folder, manifest, licences=licences, figure=folder / FIGURE)
        job.release()
        seconds = time.monotonic() - job.started
        return Exported(shown, manifest, scores, seconds, peak_memory())

    # Writing

    def _write(self, folder: Path, parts: Mapping[str, Surgery | Patch], router: Any, default: str | None) -> None:
        job = self.job
        first = next(iter(parts.values()))
        if self.kind in WEIGHTS:
            if isinstance(first, Patch):
                self._bring(folder, Folding(first))
            else:
                assert isinstance(first, Affine)
                self._bring(folder, HeadFolding(self.stock, first, job.donor.tensors))
            self.exact = job.dtype == torch.float32 and _exact(folder)
            if self.kind == "gguf":
                self._convert(folder)
            return
        self._bring(folder)
        self.exact = job.dtype == torch.float32  # no weight is rounded anew
        if self.kind in CODE:
            surgeries = {name: part for name, part in parts.items() if isinstance(part, Surgery)}
            write_remote(folder, surgeries, self.stock, router=router, default=default)
            return
        for name, part in parts.items():
            patch = part if isinstance(part, Patch) else self._head_lora(folder, part)
            # a patch is stored as it was scored; W A is new
            dtype = torch.bfloat16 if isinstance(part, Patch) else torch.float32
            patch.save(folder / "adapters" / name, str(job.recipe.name), dtype)

    def _bring(self, folder: Path, change: Change | None = None) -> None:
        for note in write_checkpoint(self.job, folder, change):
            self._note(note)

    def _head_lora(self, folder: Path, surgery: Surgery) -> Patch:
        assert isinstance(surgery, Affine)
        return head_lora(self.stock, surgery, HeadFolding(self.stock, surgery, self.job.donor.tensors).read(folder))

    def _convert(self, folder: Path) -> None:
        """Turn the plain checkpoint in a folder into one GGUF file."""
        options, remote = self.options, self.job.recipe.trust_remote_code
        plain = folder / "plain"
        plain.mkdir()
        for file in list(folder.iterdir()):
            if file != plain:
                file.rename(plain / file.name)
        file = folder / f"{self.job.recipe.name}-{options.outtype}.gguf"
        converter = find_converter(options.converter)
        convert(plain, file, converter, outtype=options.outtype, trust_remote_code=remote)
        check_written(file, plain)
        shutil.copyfile(plain / "config.json", folder / "config.json")
        shutil.rmtree(plain)

    # Comparing

    def _reference(self, parts: Mapping[str, Surgery | Patch], router: Any) -> list[Case]:
        """What the attached model does with the first held-out prompts of each domain, corrected, routed and not."""
        job = self.job
        model = job.model
        texts = {name: list(member.prompts.sequences[:PROMPTS]) for name, member in job.members.items()}
        surgeries = {name: part for name, part in parts.items() if isinstance(part, Surgery)}
        attached = attach(model, surgeries) if surgeries else None

        def acting(domain: str | None) -> AbstractContextManager[Any]:
            part = parts[domain] if domain is not None else None
            if isinstance(part, Patch):
                return patched(model, part)
            return attached.domain(domain) if attached is not None else nullcontext(model)

        def routed(ids: Tensor) -> str | None:
            with torch.inference_mode():
                states = model.get_decoder()(input_ids=ids[None].to(model.device), use_cache=False).last_hidden_state
            index = int(router(states[:, -1].float().cpu())[0])
            return list(parts)[index] if index >= 0 else None

        first = next(iter(texts))
        groups: list[Group] = [(first, acting(first), [ids for each in texts.values() for ids in each])]
        if self.kind not in WEIGHTS:
            groups = [(name, acting(name), each) for name, each in texts.items()]
            groups.append((None, acting(None), texts[first]))
        if router is not None:
            groups += [(AUTO, acting(routed(each[0][:MOST])), each[:1]) for each in texts.values()]
        try:
            return reference(model, groups)
        finally:
            if attached is not None:
                detach(model)
                for each in surgeries.values():
                    each.cpu()  # where checkpoints are written

    def _verify(self, folder: Path, cases: Sequence[Case]) -> list[dict[str, Any]]:
        job, python = self.job, self.options.python
        limit = LIMITS[self.engine] if self.exact else ROUNDED[self.engine]
        if self.kind == "gguf":
            limit = max(GGUF_LIMITS[self.options.outtype], limit)
        remote = job.recipe.trust_remote_code
        found = []
        if self.kind == "vllm":  # transformers loads it too
            found.append(verify(folder, "hf", "transformers", cases, dtype=job.dtype, limit=limit))
        how: dict[str, Any] = {"dtype": job.dtype, "limit": limit, "python": python, "trust_remote_code": remote}
        return [*found, verify(folder, self.kind, self.engine, cases, **how)]

    # Describing

    def _router(self, parts: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
        """What chooses a domain by a prompt, and how well it does; only where several domains lie in one model."""
        if self.kind not in CODE or len(parts) < 2:
            return None, None
        from suture.routing import fit, measure

        return fit(self.job), measure(self.job).row()

    def _default(self, domains: Sequence[str]) -> str | None:
        """What acts when no domain is asked for."""
        wanted, routed = self.options.default, self.kind in CODE and len(domains) > 1
        if wanted is None:
            return AUTO if routed else domains[0] if self.kind in CODE else None
        known = [*domains, *([AUTO] if routed else []), "none"]
        if wanted not in known or self.kind not in CODE:
            raise SurgeryError(
                f"--default: {wanted!r} is none of {', '.join(known)}, or --to {self.kind} has none to choose"
            )
        return None if wanted == "none" else wanted


def failed_folder(out: Path) -> Path:
    """Where an export is kept that does not do what was scored."""
    return out.with_name(f"{out.name}.failed")


def _load(artifact: Artifact) -> Surgery | Patch:
    if (artifact.path / "surgery.json").exists():
        return load_surgery(artifact.path)
    return Patch.load(artifact.path)


def _exact(folder: Path) -> bool:
    """Whether all weights of a checkpoint are stored in float32."""
    stored = [entry for shard in weight_files(folder) for entry in header(shard).items()]
    kinds = {dtype for name, (dtype, _) in stored if ".suture." not in name}  # modules are computed in float32
    return not kinds & {"F16", "BF16", "F8_E4M3", "F8_E5M2"}
