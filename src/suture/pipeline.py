"""One recipe, stage by stage: merge → states → bias → surgery → scores. What exists is not made again.

At any time at most one language model is in memory. Targets come first, one after the other; the merged model is made
once and reads the text of all domains.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from suture.bias import BiasReport, measure_bias
from suture.calibrate import calibrate
from suture.capture import capture, respond
from suture.checkpoint import Checkpoint, parse_reference, resolve
from suture.errors import PromptError, RecipeError
from suture.evaluate.heldout import Score, score_calibration, score_heldout
from suture.losses import NEED_HEADS
from suture.models import Head, load_model, need_memory
from suture.plan import SPLITS, Member, Plan
from suture.recipe import Recipe, Surgery, load_recipe, parse_recipe
from suture.sidecars import copy_code
from suture.states import HiddenCache, Tokens
from suture.store import Artifact, replaced_folder, versions, write_json
from suture.surgery import load_surgery, save_surgery


@dataclass(frozen=True)
class RunResult:
    """What came of a run: scores, bias summaries by domain, time in seconds, peak memory in bytes, stages reused."""

    folder: Path
    scores: list[Score]
    seconds: float
    peak: int
    reused: list[str]
    bias: dict[str, dict[str, Any]]

    def document(self) -> dict[str, Any]:
        """As plain data, for `--json`."""
        return {
            "folder": str(self.folder),
            "scores": [score.row() for score in self.scores],
            "bias": self.bias,
            "seconds": self.seconds,
            "peak_bytes": self.peak,
            "reused": self.reused,
        }


def read_recipe(path: Path) -> Recipe:
    """A recipe file, or the recipe that a run's folder keeps.

    Raises:
        RecipeError: for a path that is neither.
    """
    kept = path / "run.json"
    if not path.is_dir():
        return load_recipe(path)
    if not kept.exists():
        raise RecipeError(f"{path} is neither a recipe file nor the folder of a run (it has no run.json)")
    found = json.loads(kept.read_text())
    return parse_recipe(found["recipe"], Path(found["folder"]), source=str(kept))


class Run(Plan):
    """A checked recipe that can be carried out, as a whole or stage by stage.

    Raises:
        SutureError: whatever is wrong with recipe, models, prompts, disk or memory, before any work.
    """

    _kept: Any = None

    def capture(self, members: Sequence[Member] | None = None, *, keep: bool = False) -> None:
        """States of targets and of the merged model on calibration and held-out text, and their heads.

        Args:
            members: which domains; all by default.
            keep: hold on to the merged model, should it be made, for what comes next.
        """
        chosen = list(self.members.values()) if members is None else members
        for member in chosen:
            self._capture_target(member)
        missing = [
            (member, split)
            for member in chosen
            for split in SPLITS
            if not self.store.find("states", self.states_inputs(self.fingerprint, member, split))
        ]
        if missing or not self.store.find("head", self.head_inputs(self.fingerprint)):
            model = self.merged_model()
            self._keep_head(model, self.fingerprint, self.donor)
            for member, split in missing:
                self._keep_states(model, self.fingerprint, member, split, f"read {member.name} {split}, merged")
            self._kept = model if keep else None
            del model
            _free()
        else:
            self._reuse("states of the merged model")

    def _capture_target(self, member: Member) -> None:
        known = self.find_heldout(member) is not None
        if (
            known
            and all(
                self.store.find("states", self.states_inputs(member.fingerprint, member, split)) for split in SPLITS
            )
            and self.store.find("head", self.head_inputs(member.fingerprint))
        ):
            return self._reuse(f"states of the target of {member.name}")
        name = member.name
        with self.progress.stage(f"load the target of {name}", 1):
            remote = self.recipe.trust_remote_code
            model = load_model(member.checkpoint, self.dtype, self.device, trust_remote_code=remote)
        self._keep_head(model, member.fingerprint, member.checkpoint)
        self._keep_states(model, member.fingerprint, member, "calibration", f"read {name} calibration, target")
        if not known:
            with self.store.create("responses", self.response_inputs(member)) as folder:
                tokens = respond(
                    model,
                    member.prompts,
                    self.recipe.heldout.tokens,
                    progress=self.progress,
                    stage=f"write {name} held-out text",
                )
                rows = {
                    "ids": [row.tolist() for row in tokens.sequences],
                    "prompt_lengths": tokens.prompt_lengths.tolist(),
                }
                (folder / "responses.json").write_text(json.dumps(rows))
        self._keep_states(model, member.fingerprint, member, "heldout", f"read {name} heldout, target")
        del model
        _free()

    def _keep_head(self, model: Any, fingerprint: str, checkpoint: Checkpoint) -> None:
        inputs = self.head_inputs(fingerprint)
        if not self.store.find("head", inputs):
            with self.store.create("head", inputs) as folder:
                Head(model).save(folder)
                copy_code(checkpoint.base, folder)

    def _keep_states(self, model: Any, fingerprint: str, member: Member, split: str, stage: str) -> None:
        inputs = self.states_inputs(fingerprint, member, split)
        if self.store.find("states", inputs):
            return
        tokens = member.calibration if split == "calibration" else self.heldout_tokens(member)
        with self.store.create("states", inputs) as folder:
            capture(model, tokens, entropy=inputs["entropy"], progress=self.progress, stage=stage).save(folder)

    def describe_states(self, member: Member) -> list[dict[str, Any]]:
        """A row for each captured cache of a domain: which model and split, its tokens and folder."""
        rows = []
        for split in SPLITS:
            for model, fingerprint in (("merged", self.fingerprint), ("target", member.fingerprint)):
                found = self.store.get("states", self.states_inputs(fingerprint, member, split))
                cache = HiddenCache.load(found.path)
                shape = {"sequences": len(cache.tokens), "tokens": len(cache.states), "width": cache.states.shape[1]}
                rows.append({"domain": member.name, "model": model, "split": split, **shape, "path": str(found.path)})
        return rows

    def describe_surgery(self, member: Member, surgery: Surgery) -> dict[str, Any]:
        """A row for a trained module; trains it if that has not been done."""
        found = self.calibrate(member, surgery)
        history = json.loads((found.path / "history.json").read_text())
        kept = {key: history[key] for key in ("rho_calibration", "rho_heldout", "seconds", "parameters")}
        return {"domain": member.name, "surgery": surgery.label, **kept, "path": str(found.path)}

    def merged_model(self) -> Any:
        """The merged model in memory: from its checkpoint where one was written, else merged now."""
        if self._kept is not None:
            return self._kept
        self.need_memory()
        written = self.store.find("merged", {"merge": self.fingerprint})
        remote = self.recipe.trust_remote_code
        if self.merge is not None and written is None:
            need_memory(int(1.2 * self.merge.need()), "merging in memory", torch.device("cpu"))
            return self.merge.model(self.dtype, self.device, self.progress)
        found = resolve(parse_reference(str(written.path))) if written else self.donor
        with self.progress.stage("load the merged model", 1):
            return load_model(found, self.dtype, self.device, trust_remote_code=remote)

    def write_merged(self, out: Path | None = None, force: bool = False) -> Path:
        """The merged checkpoint on disk: in a new folder, or in the store, where later stages find it.

        Raises:
            RecipeError: when there is nothing to merge, or the folder exists and `force` is off.
        """
        if self.merge is None:
            raise RecipeError("the recipe names a `merged` checkpoint: there is nothing to merge")
        if out is not None:
            if out.exists() and not force:
                raise RecipeError(f"{out} exists: choose another folder, or --force to replace it")
            with replaced_folder(out) as folder:
                self.merge.write(folder, self.progress)
            return out
        inputs = {"merge": self.fingerprint}
        if self.store.find("merged", inputs):
            self._reuse("the merged checkpoint")
        else:
            with self.store.create("merged", inputs) as folder:
                self.merge.write(folder, self.progress)
        return self.store.get("merged", inputs).path

    def states(self, member: Member, split: str) -> tuple[HiddenCache, HiddenCache]:
        """(merged, target) states of one domain and split, captured before."""
        one, two = (
            HiddenCache.load(self.store.get("states", self.states_inputs(fingerprint, member, split)).path)
            for fingerprint in (self.fingerprint, member.fingerprint)
        )
        return one, two

    def head(self, fingerprint: str) -> Head:
        """A captured head, on this run's device."""
        folder = self.store.get("head", self.head_inputs(fingerprint)).path
        return Head.load(folder, device=self.device, trust_remote_code=self.recipe.trust_remote_code)

    @cached_property
    def merged_head(self) -> Head:
        """The merged model's head: it reads corrected states too."""
        return self.head(self.fingerprint)

    def bias(self, member: Member) -> tuple[BiasReport, Artifact]:
        """The bias report of one domain on its held-out text."""
        import pyarrow
        import pyarrow.parquet as parquet

        keys = self.states_keys(member, "heldout")
        inputs = {"states": keys, "head": self.head_inputs(member.fingerprint)}
        found = self.store.find("bias", inputs)
        merged, target = self.states(member, "heldout")
        if found is None:
            with self.progress.stage(f"bias of {member.name}", 1), self.store.create("bias", inputs) as folder:
                report = measure_bias(merged, target, self.head(member.fingerprint))
                parquet.write_table(pyarrow.table(report.columns()), folder / "bias.parquet")
                write_json(folder / "summary.json", report.summary())
        else:
            self._reuse(f"bias of {member.name}")
            report = measure_bias(merged, target)
            kept = json.loads((found.path / "summary.json").read_text())["sensitivity"]
            report.sensitivity.extend(kept)
        return report, self.store.get("bias", inputs)

    def calibrate(self, member: Member, surgery: Surgery) -> Artifact:
        """One trained module, with its loss curve, rho and time."""
        inputs = self.surgery_inputs(member, surgery)
        found = self.store.find("surgery", inputs)
        if found is not None:
            self._reuse(f"{surgery.label} for {member.name}")
            return found
        merged, target = (cache.first(surgery.samples) for cache in self.states(member, "calibration"))
        heads = surgery.loss in NEED_HEADS
        with self.store.create("surgery", inputs) as folder:
            dtype = torch.bfloat16 if surgery.dtype == "bfloat16" else torch.float32
            done = calibrate(
                merged,
                target,
                **surgery.model_dump(include={"module", "loss", "rank", "t_max", "steps", "lr", "batch", "seed"}),
                dtype=dtype,
                heldout=self.states(member, "heldout"),
                decode=self.merged_head.differentiable if heads else None,
                decode_target=self.head(member.fingerprint) if heads else None,
                device=self.device,
                progress=self.progress,
                stage=f"train {surgery.label} for {member.name}",
            )
            save_surgery(done.surgery, folder, dtype)
            history = {
                "rho_calibration": done.rho_calibration,
                "rho_heldout": done.rho_heldout,
                "seconds": done.seconds,
                "parameters": done.surgery.parameter_count(),
                "calibration_rows": member.split.calibration_rows[: surgery.samples],
                "heldout_rows": member.split.heldout_rows,
                "losses": done.losses,
            }
            write_json(folder / "history.json", history)
        return self.store.get("surgery", inputs)

    def score(self, member: Member) -> list[Score]:
        """Held-out and calibration scores of one domain, whose modules are trained if they are not yet."""
        modules = {surgery.label: self.calibrate(member, surgery) for surgery in self.recipe.surgery}
        inputs = {
            "domain": member.name,
            "surgeries": {label: found.key for label, found in modules.items()},
            "heads": [self.fingerprint, member.fingerprint],
            "states": [self.states_keys(member, split) for split in SPLITS],
        }
        found = self.store.find("scores", inputs)
        if found is None:
            surgeries = {label: load_surgery(found.path) for label, found in modules.items()}
            heldout = self.states(member, "heldout")
            self._check_disjoint(member, heldout[1].tokens)
            with self.store.create("scores", inputs) as folder:
                scores = score_heldout(
                    member.name,
                    *heldout,
                    surgeries,
                    self.merged_head,
                    self.head(member.fingerprint),
                    progress=self.progress,
                    stage=f"score {member.name}",
                ) + score_calibration(member.name, *self.states(member, "calibration"), surgeries)
                write_json(folder / "scores.json", [score.row() for score in scores])
            return scores
        self._reuse(f"scores of {member.name}")
        return [Score(**row) for row in json.loads((found.path / "scores.json").read_text())]

    def run(self, out: Path) -> RunResult:
        """Every stage, and the folder that shows what came of it."""
        from suture.report.folder import write_folder

        self.capture()
        reports, biases, modules, scores = {}, {}, {}, []
        for name, member in self.members.items():
            reports[name], biases[name] = self.bias(member)
            scores += self.score(member)
            modules[name] = {
                each.label: self.store.get("surgery", self.surgery_inputs(member, each)) for each in self.recipe.surgery
            }
        with self.progress.stage("figures", 1):
            write_folder(
                out, name=str(self.recipe.name), scores=scores, reports=reports, biases=biases, surgeries=modules
            )
        seconds = time.monotonic() - self.started
        summaries = {name: report.summary() for name, report in reports.items()}
        result = RunResult(out, scores, seconds, peak_memory(), list(self.reused), summaries)
        write_json(out / "run.json", self.provenance(result))
        return result

    def provenance(self, result: RunResult) -> dict[str, Any]:
        """What made a run: recipe, contents, versions, rows, time and memory."""
        return {
            "name": self.recipe.name,
            "recipe": self.recipe.model_dump(mode="json", by_alias=True, exclude_none=True),
            "folder": str(self.recipe.folder),
            "merged": self.fingerprint,
            "weights": [vars(weight) for weight in self.merge.weights] if self.merge else [],
            "domains": {
                name: {
                    "target": member.fingerprint,
                    "calibration_rows": member.split.calibration_rows,
                    "heldout_rows": member.split.heldout_rows,
                }
                for name, member in self.members.items()
            },
            "device": str(self.device),
            "dtype": str(self.dtype),
            "versions": versions(),
            "seconds": result.seconds,
            "peak_bytes": result.peak,
            "reused": result.reused,
        }

    def _check_disjoint(self, member: Member, heldout: Tokens) -> None:
        """Compare the prompts of captured held-out text with those that trained, as tokens."""
        trained = {tuple(row.tolist()) for row in self.states(member, "calibration")[1].tokens.sequences}
        prompts = [row[:end] for row, end in zip(heldout.sequences, heldout.prompt_lengths.tolist(), strict=True)]
        both = sum(tuple(prompt.tolist()) in trained for prompt in prompts)
        if both:
            raise PromptError(f"domains.{member.name}: {both} prompts both calibrate and evaluate")

    def _reuse(self, what: str) -> None:
        self.reused.append(what)
        self.progress.note(f"reused: {what}")


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    try:
        import resource
    except ImportError:  # not on Windows
        import psutil

        return int(psutil.Process().memory_info().rss)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
