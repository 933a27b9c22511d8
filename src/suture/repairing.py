"""Repairing: corrections inside the layers of the merged model, each with what it does to held-out text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from suture.bias import bias, reduction
from suture.calibrate import rho_rows
from suture.capture import capture
from suture.corrections import GATED, Surgery
from suture.gate import Gate, choose_strength, held_back, joint_strength
from suture.inputs import RESIDUAL, Member
from suture.layers import Layers
from suture.models import DTYPES
from suture.reading import Reading, free_memory
from suture.repair.distil import distil
from suture.repair.fit import Lesson, repair
from suture.repair.patch import Patch, patched
from suture.repair.residuals import Residuals, write_residuals
from suture.repair.svd import svd_patch
from suture.states import HiddenCache, Tokens
from suture.store import Artifact, write_json
from suture.weights import Weights
from suture.wiring import shape_of

ANCHOR = 1.0  # weight of text of no domain beside a domain's, in a joint fit
INSIDE = (0.5, 1.0)  # strengths to try: each but the last is another forward pass


class Repairing(Reading):
    """A reading whose merged model can be repaired."""

    @cached_property
    def layers(self) -> Layers:
        """The merged model's layers; the model stays in memory until `release`."""
        return Layers(self.model)

    @property
    def model(self) -> Any:
        """The merged model, which stays in memory until `release`."""
        self._kept = self.merged_model()
        return self._kept

    def release(self) -> None:
        """Give the merged model back, and remove residual streams."""
        self.release_model()
        self.remove_residuals()

    def remove_residuals(self) -> None:
        """Remove residual streams: large, and of no use once the repairs are made."""
        for member in self.members.values():
            for split in self.splits:
                if self.find_tokens(member, split) is not None:
                    self.store.remove("residuals", self.residual_inputs(member, split))
        if self.guard is not None:
            self.store.remove("residuals", self._anchor_inputs(self.guard[0]))

    def release_model(self) -> None:
        """Let the merged model go; it is made again when it is needed again."""
        self.__dict__.pop("layers", None)
        self._kept = None
        free_memory()

    def repair(self, member: Member, surgery: Surgery) -> Artifact:
        """A patch with its history; `heal` is one for all domains. States of held-out text are kept beside it."""
        inputs = self.surgery_inputs(member, surgery)
        members = list(self.members.values()) if surgery.module == "heal" else [member]
        key = self.store.key("surgery", inputs)
        found = self.store.find("surgery", inputs)
        missing = [each for each in members if not self.store.find("states", self._patched_inputs(key, each))]
        if found is not None and not missing:
            self._reuse(surgery.label if surgery.module == "heal" else f"{surgery.label} for {member.name}")
            return found
        if found is not None:
            with patched(self.layers.model, Patch.load(found.path)) as model:
                self._keep_patched(model, key, missing)
            return found
        began = time.monotonic()
        patch, history, states = self._fit(members, surgery)
        history |= {"seconds": time.monotonic() - began, "parameters": patch.count()}
        patch, gates = self._gated(members, surgery, patch, states)
        with patched(self.layers.model, patch) as model:
            self._keep_patched(model, key, members)
            if 0 < patch.strength < 1:
                states = {each.name: capture(model, self._text(each, surgery)).states for each in members}
        if patch.strength == 0:
            states = {each.name: self.calibration_states(each, surgery)[0].states for each in members}
        domains = {each.name: self._said(each, surgery, key, states[each.name], gates) for each in members}
        with self.store.create("surgery", inputs) as folder:
            patch.save(folder, self._name(), DTYPES[surgery.dtype])
            write_json(
                folder / "history.json", {**history, "strength": patch.strength if gates else None, "domains": domains}
            )
        return self.store.get("surgery", inputs)

    def patched_states(self, member: Member, key: str) -> HiddenCache:
        """Held-out states of the merged model under a patch, by the patch's key."""
        return HiddenCache.load(self.store.get("states", self._patched_inputs(key, member)).path)

    def _fit(self, members: Sequence[Member], surgery: Surgery) -> tuple[Patch, dict[str, Any], dict[str, Tensor]]:
        """(patch, what was chosen and how it went, domain → states of the patched model on the calibration text)."""
        layers, dtype = self.layers, DTYPES[surgery.dtype]
        names = ", ".join(each.name for each in members)
        stage = f"{surgery.label} for {names}"
        if surgery.module in RESIDUAL:
            lessons = [self._lesson(each, surgery) for each in members]
            if surgery.module == "heal" and self.guard is not None:
                lessons.append(self._anchor(self.guard[0]))
            only = self._only(surgery)
            rank = self._rank(surgery, only) if surgery.rank or surgery.budget else None
            done = repair(layers, lessons, rank=rank, only=only, dtype=dtype, progress=self.progress, stage=stage)
            left = layers.left_alone()
            if left:
                self.progress.note(
                    f"{surgery.label} leaves {', '.join(left)} alone: fused, or not passed by every token"
                )
            history = {"losses": [], "rank": rank, "linears": done.choices, "left_alone": left}
            return done.patch, history, done.states
        (member,) = members
        losses: list[float] = []
        if surgery.module == "distil":
            known = self.calibration_states(member, surgery)[1]
            patch, losses = distil(
                layers.model,
                list(layers.linears()),
                known.first(len(known.tokens) - self._held(member, surgery)),
                self.head(member.fingerprint).differentiable,
                rank=self._rank(surgery),
                **surgery.model_dump(include={"steps", "lr", "batch", "seed"}),
                dtype=dtype,
                progress=self.progress,
                stage=stage,
            )
        else:
            text = self._text(member, surgery)
            fitted = text.first(len(text) - self._held(member, surgery)) if surgery.module == "asvd" else None
            with self.progress.stage(stage, 1):
                patch = svd_patch(layers, Weights(member.checkpoint), self._budget(surgery), tokens=fitted, dtype=dtype)
        with patched(layers.model, patch) as model:
            states = {member.name: capture(model, self._text(member, surgery)).states}
        return patch, {"losses": losses}, states

    def _lesson(self, member: Member, surgery: Surgery) -> Lesson:
        text = self._text(member, surgery)
        residuals = Residuals(self.store.get("residuals", self.residual_inputs(member, surgery.split)).path)
        count = len(text.ids)
        return Lesson(
            member.name,
            text,
            lambda layer, writer: residuals(layer, writer)[:count],
            held=self._held(member, surgery),
            weights=Weights(member.checkpoint),
        )

    def _anchor(self, tokens: Tokens) -> Lesson:
        """Text of no domain, whose target is the merged model itself: what it does there should stay."""
        inputs = self._anchor_inputs(tokens)
        if not self.store.find("residuals", inputs):
            with self.store.create("residuals", inputs) as folder:
                write_residuals(self.layers, tokens, folder, progress=self.progress, stage="read guard text, merged")
        residuals = Residuals(self.store.get("residuals", inputs).path)
        return Lesson("", tokens, residuals, held=0, itself=True, weight=ANCHOR)

    def _anchor_inputs(self, tokens: Tokens) -> dict[str, Any]:
        return {"model": self.fingerprint, "dtype": str(self.dtype), "tokens": tokens.fingerprint()}

    def _gated(
        self, members: Sequence[Member], surgery: Surgery, patch: Patch, states: Mapping[str, Tensor]
    ) -> tuple[Patch, dict[str, Gate]]:
        """The patch at the strength that held-back prompts choose: one strength for all its domains."""
        if not surgery.gate:
            return patch, {}
        gates = {}
        for member in members:
            held = self._held(member, surgery)
            if not held:
                return patch, {}
            merged, target = self.gate_states(member, surgery, held)
            known = states[member.name][-len(merged.states) :] if surgery.split == GATED else None

            def corrected(strength: float, known: Tensor | None = known, text: Tokens = merged.tokens) -> Tensor:
                if strength == 1 and known is not None:
                    return known
                with patched(self.layers.model, patch.at(strength)) as model:
                    return capture(model, text).states

            heads = self.merged_head, self.head(member.fingerprint)
            gates[member.name] = choose_strength(merged, target, corrected, *heads, strengths=INSIDE)
        return patch.at(joint_strength(list(gates.values()))), gates

    def _said(
        self, member: Member, surgery: Surgery, key: str, states: Tensor, gates: Mapping[str, Gate]
    ) -> dict[str, Any]:
        """What a history says of one domain."""
        held = self._held(member, surgery)
        merged, target = self.calibration_states(member, surgery)
        fitted = merged.first(len(merged.tokens) - held)
        rows = rho_rows(fitted)
        heldout = self.states(member, "heldout")
        after = self.patched_states(member, key)
        out = rho_rows(heldout[0])
        return {
            "rho_calibration": reduction(
                bias(merged.states[rows], target.states[rows]), bias(states[rows], target.states[rows])
            ),
            "rho_heldout": reduction(
                bias(heldout[0].states[out], heldout[1].states[out]), bias(after.states[out], heldout[1].states[out])
            ),
            "calibration_tokens": len(rows),
            "calibration_rows": member.split.calibration_rows[: len(fitted.tokens)],
            "heldout_rows": member.split.heldout_rows,
            "gate": gates[member.name].row() if member.name in gates else None,
        }

    def _keep_patched(self, model: Any, key: str, members: Sequence[Member]) -> None:
        for member in members:
            tokens = self.tokens(member, "heldout")
            inputs = self._patched_inputs(key, member)
            if not self.store.find("states", inputs):
                with self.store.create("states", inputs) as folder:
                    stage = f"read {member.name} heldout, repaired"
                    capture(model, tokens, progress=self.progress, stage=stage).save(folder)

    def _patched_inputs(self, key: str, member: Member) -> dict[str, Any]:
        return self.patched_inputs(key, self.tokens(member, "heldout"))

    def _text(self, member: Member, surgery: Surgery) -> Tokens:
        return self.tokens(member, surgery.split).first(surgery.samples)

    def calibration_states(self, member: Member, surgery: Surgery) -> tuple[HiddenCache, HiddenCache]:
        """(merged, target) states on a surgery's calibration text, what is held back of it included."""
        merged, target = self.states(member, surgery.split)
        return merged.first(surgery.samples), target.first(surgery.samples)

    def gate_states(self, member: Member, surgery: Surgery, held: int) -> tuple[HiddenCache, HiddenCache]:
        """(merged, target) states on what the target wrote for the prompts that are held back."""
        merged, target = self.states(member, GATED)
        return merged.first(surgery.samples).last(held), target.first(surgery.samples).last(held)

    def _held(self, member: Member, surgery: Surgery) -> int:
        """How many of the last calibration prompts are held back: by the gate, or to choose ridges and ranks."""
        return held_back(len(self._text(member, surgery))) if surgery.gate or surgery.module in RESIDUAL else 0

    def _only(self, surgery: Surgery) -> Sequence[str]:
        """Last names of the linears to change, none for all: where a budget is less than rank 1 of all, the writers."""
        if surgery.linears is not None or surgery.budget is None or self._budget(surgery) >= self._cost():
            return surgery.linears or ()
        writers = {writer.name.rsplit(".", 1)[-1] for each in self.layers.writers for writer in each}
        self.progress.note(
            f"{surgery.label}: budget {surgery.budget:g} is less than rank 1 of all linears, which takes "
            f"{self._cost() / self.donor.count:.2g}: only {', '.join(sorted(writers)) or 'all'} are changed"
        )
        return sorted(writers)

    def _rank(self, surgery: Surgery, only: Sequence[str] = ()) -> int:
        """The mean rank over the linears that are changed; 1 at least, also where the budget is for less."""
        return surgery.rank or max(1, self._budget(surgery) // self._cost(only))

    def _budget(self, surgery: Surgery) -> int:
        """Numbers that a patch may hold."""
        if surgery.budget is not None:
            return int(surgery.budget * self.donor.count)
        return (surgery.rank or 16) * self._cost(surgery.linears or ())

    def _cost(self, only: Sequence[str] = ()) -> int:
        """Numbers that rank 1 takes."""
        return max(1, sum(sum(shape_of(module)) for module in self.layers.linears(only).values()))

    def _name(self) -> str:
        """What an adapter says it belongs to: the merged model, which only its maker can name."""
        return str(self.recipe.merged or self.recipe.name)
