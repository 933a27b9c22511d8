"""One recipe, stage by stage: merge → states → bias → surgery → scores. What exists is not made again."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from suture.bias import BiasReport, measure_bias
from suture.capture import capture
from suture.correcting import Correcting
from suture.errors import PromptError, RecipeError
from suture.evaluate.heldout import GUARD, Score, perplexity, score_calibration, score_heldout
from suture.history import patch_key, read_history
from suture.inputs import Member
from suture.recipe import Recipe, load_recipe, parse_recipe
from suture.repair.patch import Patch, patched
from suture.states import HiddenCache, Tokens
from suture.store import Artifact, versions, write_json
from suture.surgery import load_surgery


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


class Run(Correcting):
    """A checked recipe that can be carried out, as a whole or stage by stage.

    Raises:
        SutureError: whatever is wrong with recipe, models, prompts, disk or memory, before any work.
    """

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
            kept = json.loads((found.path / "summary.json").read_text())["sensitivity"]
            report = replace(measure_bias(merged, target), sensitivity=kept)
        return report, self.store.get("bias", inputs)

    def score(self, member: Member) -> list[Score]:
        """Held-out and calibration scores of one domain, whose corrections are made if they are not yet."""
        made = self.corrections(member)
        inputs = {
            "domain": member.name,
            "surgeries": {label: found.key for label, found in made.items()},
            "heads": [self.fingerprint, member.fingerprint],
            "states": self.states_keys(member, "heldout"),
        }
        found = self.store.find("scores", inputs)
        if found is None:
            merged, target = self.states(member, "heldout")
            for split in self.splits:
                if split != "heldout":
                    self._check_disjoint(member, self.tokens(member, split), target.tokens)
            corrections = {
                label: load_surgery(artifact.path)
                if (artifact.path / "surgery.json").exists()
                else self.patched_states(member, patch_key(artifact))
                for label, artifact in made.items()
            }
            with self.store.create("scores", inputs) as folder:
                scores = score_heldout(
                    member.name,
                    merged,
                    target,
                    corrections,
                    self.merged_head,
                    self.head(member.fingerprint),
                    progress=self.progress,
                    stage=f"score {member.name}",
                )
                histories = {label: read_history(artifact, member.name) for label, artifact in made.items()}
                scores += score_calibration(member.name, histories)
                write_json(folder / "scores.json", [score.row() for score in scores])
            return scores
        self._reuse(f"scores of {member.name}")
        return [Score(**row) for row in json.loads((found.path / "scores.json").read_text())]

    def score_guard(self) -> list[Score]:
        """Perplexity of the merged model, and of what acts in all domains, on text of no domain."""
        if self.guard is None:
            return []
        healed = [each for each in self.recipe.surgery if each.module == "heal"]
        member = next(iter(self.members.values()))
        made = {"merged": None} | {each.label: self.calibrate(member, each) for each in healed}
        scores = []
        for label, artifact in made.items():
            inputs = self.patched_inputs(artifact.key if artifact else "", self.guard[1])
            if not self.store.find("states", inputs):
                patch = Patch.load(artifact.path) if artifact else Patch({})
                with patched(self.model, patch) as model, self.store.create("states", inputs) as folder:
                    stage = f"read guard text, {label}"
                    capture(model, self.guard[1], progress=self.progress, stage=stage).save(folder)
            cache = HiddenCache.load(self.store.get("states", inputs).path)
            value, count = perplexity(cache, self.merged_head)
            scores.append(Score(GUARD, label, "perplexity", "heldout", value, count))
        return scores

    def run(self, out: Path) -> RunResult:
        """Every stage, and the folder that shows what came of it."""
        from suture.report.folder import write_folder

        self.capture()
        reports, biases, made, scores = {}, {}, {}, []
        for name, member in self.members.items():
            reports[name], biases[name] = self.bias(member)
            scores += self.score(member)
            made[name] = self.corrections(member)
        scores += self.score_guard()
        self.release()
        with self.progress.stage("figures", 1):
            write_folder(
                out,
                name=str(self.recipe.name),
                scores=scores,
                reports=reports,
                biases=biases,
                surgeries=made,
                about=self.about(),
            )
        seconds = time.monotonic() - self.started
        summaries = {name: report.summary() for name, report in reports.items()}
        result = RunResult(out, scores, seconds, peak_memory(), list(self.reused), summaries)
        write_json(out / "run.json", self.provenance(result))
        return result

    def about(self) -> list[str]:
        """What a reader of the report should know first, a line each."""
        said = [
            f"Merged: `{self.recipe.merged}`" if self.merge is None else f"Merged by `{self.merge.config.merge_method}`"
        ]
        said += [weight.sentence() for weight in self.merge.weights] if self.merge else []
        for name, member in self.members.items():
            count = f"{len(member.split.calibration)} prompts to calibrate, {len(member.split.heldout)} held out"
            said.append(f"{name}: target `{member.domain.target}`, {count}")
        for surgery in self.recipe.surgery:
            settings = surgery.model_dump(exclude={"name"}, by_alias=True)
            said.append(f"{surgery.label}: " + ", ".join(f"{key} {value}" for key, value in settings.items()))
        return said

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

    @staticmethod
    def _check_disjoint(member: Member, trained: Tokens, heldout: Tokens) -> None:
        """Compare the prompts of held-out text with those that trained, as tokens."""
        both = trained.prompts() & heldout.prompts()
        if both:
            raise PromptError(f"domains.{member.name}: {len(both)} prompts both calibrate and evaluate")


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    try:
        import resource
    except ImportError:  # not on Windows
        import psutil

        return int(psutil.Process().memory_info().rss)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
