"""Correcting: each correction that a recipe asks for, at the last layer, inside the layers or chosen; made or found."""

from __future__ import annotations

import shutil
from functools import cached_property
from typing import Any

from suture.calibrate import calibrate, rho, rho_rows
from suture.corrections import AUTO, Surgery
from suture.gate import at_strength, choose_strength, held_back
from suture.history import read_history
from suture.inputs import Member
from suture.losses import NEED_HEADS
from suture.models import DTYPES
from suture.repairing import Repairing
from suture.store import Artifact, write_json
from suture.surgery import save_surgery

ARGUMENTS = {
    "module",
    "loss",
    "rank",
    "t_max",
    "waves",
    "steps",
    "lr",
    "batch",
    "seed",
    "smooth",
    "shrink",
    "start",
    "entropy_power",
    "entropy_floor",
    "early_stopping",
}


class Correcting(Repairing):
    """A reading that makes corrections; what exists is not made again."""

    @cached_property
    def _made(self) -> dict[str, Artifact]:
        return {}

    def calibrate(self, member: Member, surgery: Surgery) -> Artifact:
        """One correction of one domain, with its history; `heal` is one for all domains."""
        if surgery.module == AUTO:
            return self._choose(member, surgery)
        key = self.store.key("surgery", self.surgery_inputs(member, surgery))
        if key not in self._made:  # `heal` is asked for by every domain
            self._made[key] = self.repair(member, surgery) if surgery.inside else self._train(member, surgery)
        return self._made[key]

    def corrections(self, member: Member) -> dict[str, Artifact]:
        """All corrections of one domain, by label."""
        return {surgery.label: self.calibrate(member, surgery) for surgery in self.recipe.surgery}

    def _train(self, member: Member, surgery: Surgery) -> Artifact:
        """A module on the final hidden states, at the strength that held-back prompts choose."""
        inputs = self.surgery_inputs(member, surgery)
        found = self.store.find("surgery", inputs)
        if found is not None:
            self._reuse(f"{surgery.label} for {member.name}")
            return found
        merged, target = self.calibration_states(member, surgery)
        heldout = self.states(member, "heldout")
        held = held_back(len(merged.tokens)) if surgery.gate or surgery.early_stopping else 0
        text = merged.first(len(merged.tokens) - held), target.first(len(target.tokens) - held)
        back = (merged.last(held), target.last(held)) if held else None
        judged = self.gate_states(member, surgery, held) if surgery.gate and held else None
        heads = surgery.loss in NEED_HEADS or judged is not None
        decode = self.merged_head.differentiable if heads else None
        decode_target = self.head(member.fingerprint).differentiable if heads else None
        dtype = DTYPES[surgery.dtype]
        with self.store.create("surgery", inputs) as folder:
            done = calibrate(
                *text,
                **surgery.model_dump(include=ARGUMENTS),
                validation=back,
                dtype=dtype,
                decode=decode,
                decode_target=decode_target,
                device=self.device,
                progress=self.progress,
                stage=f"train {surgery.label} for {member.name}",
            )
            gate = None
            if judged is not None and decode is not None and decode_target is not None:
                gate = choose_strength(*judged, at_strength(done.surgery, judged[0]), decode, decode_target)
                done.surgery.strength = gate.strength
            save_surgery(done.surgery, folder, dtype)
            history = {
                "rho_calibration": rho(done.surgery, *text),
                "rho_heldout": rho(done.surgery, *heldout),
                "seconds": done.seconds,
                "parameters": done.surgery.parameter_count(),
                "calibration_tokens": len(rho_rows(text[0])),
                "calibration_rows": member.split.calibration_rows[: len(text[0].tokens)],
                "heldout_rows": member.split.heldout_rows,
                "gate": gate.row() if gate else None,
                "losses": done.losses,
                **done.details,
            }
            write_json(folder / "history.json", history)
        return self.store.get("surgery", inputs)

    def _choose(self, member: Member, auto: Surgery) -> Artifact:
        """The correction with the least KL on held-back prompts, and what else was tried."""
        tried = [(each, self.calibrate(member, each)) for each in self.choices(auto)]
        inputs = {"auto": [found.key for _, found in tried]}
        found = self.store.find("surgery", inputs)
        if found is not None:
            return found
        rows = []
        for each, artifact in tried:
            history = read_history(artifact, member.name)
            gate = history["gate"]
            rows.append(
                {
                    "surgery": each.label,
                    "rank": each.rank or history.get("rank"),
                    "parameters": history["parameters"],
                    "strength": history["strength"],
                    "kl": gate["kl"][f"{history['strength']:g}"],
                    "kl_uncorrected": gate["kl"]["0"],
                    "key": artifact.key,
                }
            )
        best = min(range(len(rows)), key=lambda index: (rows[index]["kl"], rows[index]["parameters"]))
        with self.store.create("surgery", inputs) as folder:
            shutil.copytree(tried[best][1].path, folder, dirs_exist_ok=True)
            write_json(folder / "auto.json", {"chosen": rows[best], "tried": rows})
        return self.store.get("surgery", inputs)

    def describe_surgery(self, member: Member, surgery: Surgery) -> dict[str, Any]:
        """A row for a correction; makes it if that has not been done."""
        found = self.calibrate(member, surgery)
        history = read_history(found, member.name)
        kept = {key: history[key] for key in ("rho_calibration", "rho_heldout", "seconds", "parameters")}
        strength = {"strength": history["strength"]}
        return {"domain": member.name, "surgery": surgery.label, **strength, **kept, "path": str(found.path)}
