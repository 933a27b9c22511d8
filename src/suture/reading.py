"""Reading: whatever needs a language model in memory. At most one is there at any time.

Targets come first, one after the other; the merged model is made once and reads the text of all domains.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from suture.capture import capture, check_head, entropies, respond
from suture.checkpoint import Checkpoint, parse_reference, resolve
from suture.errors import RecipeError
from suture.inputs import RESIDUAL, Member
from suture.layers import Layers
from suture.models import Head, load_model, need_memory
from suture.plan import Plan
from suture.repair.residuals import write_residuals
from suture.sidecars import copy_code
from suture.states import HiddenCache
from suture.store import Artifact, replaced_folder


class Reading(Plan):
    """A plan whose models can be loaded, merged and made to read; what they leave is in the store."""

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
            for split in self.splits
            if not self.store.find("states", self.states_inputs(self.fingerprint, member, split))
        ]
        repairs = not all(self.repaired(member) for member in chosen)
        if missing or not self.store.find("head", self.head_inputs(self.fingerprint)):
            model = self.merged_model()
            self._keep_head(model, self.fingerprint, self.donor)
            for member, split in missing:
                self._keep_states(model, self.fingerprint, member, split, f"read {member.name} {split}, merged")
            # what is repaired inside the layers is this model
            self._kept = model if keep or repairs else None
            del model
            free_memory()
        else:
            self._reuse("states of the merged model")

    def _capture_target(self, member: Member) -> None:
        if self.store.find("head", self.head_inputs(member.fingerprint)) and all(
            self.find_tokens(member, split) is not None
            and self.store.find("states", self.states_inputs(member.fingerprint, member, split))
            and not self.lacks_residuals(member, split)
            for split in self.splits
        ):
            return self._reuse(f"states of the target of {member.name}")
        name = member.name
        with self.progress.stage(f"load the target of {name}", 1):
            remote = self.recipe.trust_remote_code
            model = load_model(member.checkpoint, self.dtype, self.device, trust_remote_code=remote)
        self._keep_head(model, member.fingerprint, member.checkpoint)
        for split in self.splits:
            if self.find_tokens(member, split) is None:
                self._write(model, member, split)
            if self.lacks_residuals(member, split):
                self._keep_residuals(model, member, split)
            self._keep_states(model, member.fingerprint, member, split, f"read {name} {split}, target")
        del model
        free_memory()

    def _write(self, model: Any, member: Member, split: str) -> None:
        """Let a target continue the prompts of a split."""
        prompts, more = self.to_continue(member, split)
        what = "held-out text" if split == "heldout" else "responses"
        with self.store.create("responses", self.response_inputs(member, split)) as folder:
            tokens = respond(model, prompts, more, progress=self.progress, stage=f"write {member.name} {what}")
            rows = {
                "ids": [row.tolist() for row in tokens.sequences],
                "prompt_lengths": tokens.prompt_lengths.tolist(),
            }
            (folder / "responses.json").write_text(json.dumps(rows))

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
        tokens = self.tokens(member, split)
        with self.store.create("states", inputs) as folder:
            capture(model, tokens, entropy=inputs["entropy"], progress=self.progress, stage=stage).save(folder)

    def lacks_residuals(self, member: Member, split: str) -> bool:
        """Whether a repair that is still to be made needs a target's residual stream that is not there."""
        wanted = [each for each in self.wanted() if each.module in RESIDUAL and each.split == split]
        if not wanted or self.find_tokens(member, split) is None:
            return bool(wanted)
        missing = any(self.find_surgery(member, each) is None for each in wanted)
        return missing and self.store.find("residuals", self.residual_inputs(member, split)) is None

    def _keep_residuals(self, model: Any, member: Member, split: str) -> None:
        """The residual stream of a target, and its final states, from one pass."""
        tokens = self.tokens(member, split)
        check_head(model)
        stage = f"read {member.name} {split}, inside the target"
        with self.store.create("residuals", self.residual_inputs(member, split)) as folder:
            states = write_residuals(Layers(model), tokens, folder, progress=self.progress, stage=stage)
        inputs = self.states_inputs(member.fingerprint, member, split)
        if not self.store.find("states", inputs):
            with self.store.create("states", inputs) as folder:
                HiddenCache(tokens, states, entropies(states, Head(model))).save(folder)

    def describe_states(self, member: Member) -> list[dict[str, Any]]:
        """A row for each captured cache of a domain: which model and split, its tokens and folder."""
        rows = []
        for split in self.splits:
            for model, fingerprint in (("merged", self.fingerprint), ("target", member.fingerprint)):
                found = self.store.get("states", self.states_inputs(fingerprint, member, split))
                cache = HiddenCache.load(found.path)
                shape = {"sequences": len(cache.tokens), "tokens": len(cache.states), "width": cache.states.shape[1]}
                rows.append({"domain": member.name, "model": model, "split": split, **shape, "path": str(found.path)})
        return rows

    def merged_model(self) -> Any:
        """The merged model in memory: from its checkpoint where one was written, else merged now."""
        if self._kept is not None:
            return self._kept
        self.need_memory()
        written = self.merged_artifact()
        remote = self.recipe.trust_remote_code
        if self.merge is not None and written is None:
            need_memory(int(1.2 * self.merge.need()), "merging in memory", torch.device("cpu"))
            return self.merge.model(self.dtype, self.device, self.progress)
        found = resolve(parse_reference(str(written.path))) if written else self.donor
        with self.progress.stage("load the merged model", 1):
            return load_model(found, self.dtype, self.device, trust_remote_code=remote)

    def merged_artifact(self) -> Artifact | None:
        """The merged checkpoint in the store, if `suture merge` has written it there."""
        return self.store.find("merged", {"merge": self.fingerprint})

    def write_merged(self, out: Path | None = None, force: bool = False) -> Path:
        """The merged checkpoint on disk: in a new folder, or in the store, where later stages find it.

        Raises:
            RecipeError: when there is nothing to merge, or the folder exists and `force` is off.
        """
        if self.merge is None:
            raise RecipeError("the recipe names a `merged` checkpoint: there is nothing to merge")
        if out is not None:
            check_checkpoint_folder(out, force)
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

    def _reuse(self, what: str) -> None:
        self.reused.append(what)
        self.progress.note(f"reused: {what}")


def check_checkpoint_folder(out: Path, force: bool) -> None:
    """Refuse a place for a checkpoint that is taken.

    Raises:
        RecipeError: when the folder holds something else, or a checkpoint and `force` is off.
    """
    ours = not out.exists() or (out.is_dir() and (not any(out.iterdir()) or (out / "config.json").exists()))
    if not ours:
        raise RecipeError(f"{out} exists and is no checkpoint, so it is not replaced: choose another folder")
    if out.exists() and not force:
        raise RecipeError(f"{out} exists: choose another folder, or --force to replace it")


def free_memory() -> None:
    """Give what no model holds any more back to the device, for other processes too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
