"""What each artifact of a recipe is made of: content hashes and settings, nothing of this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from suture.checkpoint import Checkpoint
from suture.corrections import AUTO, GATED, LAYERED, Surgery
from suture.errors import StoreError, SurgeryError
from suture.prompts import Split
from suture.recipe import Domain, Recipe
from suture.states import Tokens
from suture.store import Artifact, Store
from suture.surgery import MODULES, make_surgery

RESIDUAL = ("deep", "heal")  # need the targets' residual streams
_LAST = tuple(name for name in MODULES if name not in ("add", "parallel", "linear"))
FITTING = {
    "anything": (*_LAST, "deep"),
    "plain": ("linear", "deep"),
    "adapter": ("linear", "deep"),
}


SHARED = {
    "samples",
    "seed",
    "calibrate_on",
    "dtype",
    "batch",
    "steps",
    "lr",
    "t_max",
    "waves",
    "entropy_power",
    "entropy_floor",
}


def runs(engine: str, module: str) -> bool:
    """Whether an engine can run a module; all that act inside the layers are LoRAs there, and fold into weights."""
    return engine == "anything" or module in LAYERED or module in FITTING[engine]


@dataclass
class Member:
    """One domain, found and checked: its target, its prompts, its calibration tokens."""

    name: str
    domain: Domain
    checkpoint: Checkpoint
    fingerprint: str
    tokenizer: Any
    split: Split
    calibration: Tokens
    prompts: Tokens  # held-out prompts, before the target continues them


class Inputs:
    """A recipe whose models and prompts are known; `Plan` finds them."""

    recipe: Recipe
    store: Store
    dtype: torch.dtype
    fingerprint: str  # of the merged model
    donor: Checkpoint
    members: dict[str, Member]
    guard: tuple[Tokens, Tokens] | None
    width: int  # H
    rows: int  # of the merged model's vocabulary
    _written: dict[tuple[str, str], Tokens]

    @property
    def splits(self) -> list[str]:
        """What is read in each domain: the text that surgeries are trained on, and held-out text."""
        wanted = {split for surgery in self.recipe.surgery for split in surgery.splits}
        return [*sorted(wanted), "heldout"]

    def wanted(self) -> list[Surgery]:
        """The recipe's corrections, with what `auto` chooses from in its place."""
        found: list[Surgery] = []
        for surgery in self.recipe.surgery:
            found += self.choices(surgery) if surgery.module == AUTO else [surgery]
        return found

    def choices(self, auto: Surgery) -> list[Surgery]:
        """What `auto` chooses from, all on the same prompts and with its settings.

        Raises:
            SurgeryError: when nothing fits its engine and budget.
        """
        shared = auto.model_dump(include=SHARED)
        full = self.width or 16
        linear = (16,) if auto.engine == "adapter" else (16, full)  # a LoRA of full rank is as large as the head
        ranks: dict[str, tuple[int | None, ...]] = {"affine": (16, full), "linear": linear, "deep": (4, 16)}
        most = auto.budget * self.donor.count if auto.budget else float("inf")
        found = []
        for name in auto.among or FITTING[auto.engine]:
            for rank in dict.fromkeys(ranks.get(name, (16,))):
                if name in LAYERED and auto.budget:
                    rank = None
                one = Surgery(module=name, rank=rank, budget=auto.budget if rank is None else None, **shared)
                fits = name in LAYERED or self._size(one) <= most
                if fits and one not in found:
                    found.append(one)
        if not found:
            tried = ", ".join(auto.among or FITTING[auto.engine])
            raise SurgeryError(
                f"auto: nothing fits engine {auto.engine} and budget {auto.budget}: each of {tried} is larger: "
                "raise the budget, or let it choose from deep"
            )
        return found

    def _size(self, surgery: Surgery) -> int:
        with torch.device("meta"):
            return make_surgery(
                surgery.module, self.width, min(surgery.rank or 16, self.width), surgery.t_max, surgery.waves
            ).parameter_count()

    def captured(self) -> bool:
        """Whether no language model is needed any more."""
        return all(self.repaired(member) for member in self.members.values()) and all(
            self.find_tokens(member, split) is not None
            and self.store.find("head", self.head_inputs(fingerprint))
            and self.store.find("states", self.states_inputs(fingerprint, member, split))
            for member in self.members.values()
            for fingerprint in (member.fingerprint, self.fingerprint)
            for split in self.splits
        )

    # What each artifact is made of

    def head_inputs(self, fingerprint: str) -> dict[str, Any]:
        """What makes a kept head: the model and the dtype."""
        return {"model": fingerprint, "dtype": str(self.dtype)}

    def response_inputs(self, member: Member, split: str = "heldout") -> dict[str, Any]:
        """What makes text that a target writes: the target, its dtype, the prompts and how much it writes."""
        prompts, tokens = self.to_continue(member, split)
        return {
            "model": member.fingerprint,
            "dtype": str(self.dtype),
            "prompts": prompts.fingerprint(),
            "tokens": tokens,
        }

    def to_continue(self, member: Member, split: str) -> tuple[Tokens, int]:
        """(prompts, how many tokens the target writes after each) of a split."""
        if split == "heldout":
            return member.prompts, self.recipe.heldout.tokens
        return member.calibration, self.recipe.response_tokens if split == "responses" else 0

    def find_tokens(self, member: Member, split: str) -> Tokens | None:
        """The tokens of one split: prompts as they are, or with what the target wrote for them, if it has."""
        if split == "calibration":
            return member.calibration
        if (member.name, split) in self._written:
            return self._written[member.name, split]
        found = self.store.find("responses", self.response_inputs(member, split))
        if found is None:
            return None
        rows = json.loads((found.path / "responses.json").read_text())
        # a token that only the target has ends the text: the merged model cannot read it
        ids = [list(takewhile(lambda token: token < self.rows, row)) if self.rows else row for row in rows["ids"]]
        self._written[member.name, split] = Tokens.of(ids, rows["prompt_lengths"])
        return self._written[member.name, split]

    def tokens(self, member: Member, split: str) -> Tokens:
        """As `find_tokens`, for tokens that must be there.

        Raises:
            StoreError: when the target has not written them.
        """
        found = self.find_tokens(member, split)
        if found is None:
            raise StoreError(f"the {split} text of domain {member.name} is not captured yet: run `suture capture`")
        return found

    def states_inputs(self, fingerprint: str, member: Member, split: str) -> dict[str, Any]:
        """What makes captured states: the model, its dtype, the tokens, and whether entropies are kept too."""
        tokens = self.tokens(member, split)
        # a target's states carry its entropies, and are the same for every recipe that shares it
        entropy = fingerprint == member.fingerprint
        return {"model": fingerprint, "dtype": str(self.dtype), "tokens": tokens.fingerprint(), "entropy": entropy}

    def states_keys(self, member: Member, split: str) -> list[str]:
        """Keys of the merged model's and the target's states."""
        return [
            self.store.key("states", self.states_inputs(found, member, split))
            for found in (self.fingerprint, member.fingerprint)
        ]

    def surgery_inputs(self, member: Member, surgery: Surgery) -> dict[str, Any]:
        """What makes a correction: the models, the text of its domain (`heal`: of all), the settings, not its label."""
        members = list(self.members.values()) if surgery.module == "heal" else [member]
        inputs = {
            "models": [self.fingerprint, *(each.fingerprint for each in members)],
            "dtype": str(self.dtype),
            "calibration": [self.tokens(each, surgery.split).first(surgery.samples).fingerprint() for each in members],
            "heldout": [self.tokens(each, "heldout").fingerprint() for each in members],
            "settings": surgery.model_dump(exclude={"name"}),
        }
        if surgery.gate:
            written = [self.tokens(each, GATED).first(surgery.samples) for each in members]
            inputs["gate"] = [tokens.fingerprint() for tokens in written]
        if surgery.module == "heal" and self.guard is not None:
            inputs["guard"] = [tokens.fingerprint() for tokens in self.guard]
        return inputs

    def find_surgery(self, member: Member, surgery: Surgery) -> Artifact | None:
        """A correction, if it is made; what acts for all domains is known by the text of all."""
        members = self.members.values() if surgery.module == "heal" else [member]
        splits = (*surgery.splits, "heldout")
        if any(self.find_tokens(each, split) is None for each in members for split in splits):
            return None
        return self.store.find("surgery", self.surgery_inputs(member, surgery))

    def patched_inputs(self, patch: str, tokens: Tokens) -> dict[str, Any]:
        """What makes states of the merged model under a patch: its key and the tokens."""
        return {"model": self.fingerprint, "patch": patch, "dtype": str(self.dtype), "tokens": tokens.fingerprint()}

    def residual_inputs(self, member: Member, split: str) -> dict[str, Any]:
        """What makes a target's residual stream on a split."""
        tokens = self.tokens(member, split).fingerprint()
        return {"model": member.fingerprint, "dtype": str(self.dtype), "tokens": tokens}

    def repaired(self, member: Member) -> bool:
        """Whether everything inside the layers that the recipe wants for a domain is there."""
        for surgery in self.wanted():
            if surgery.inside:
                found = self.find_surgery(member, surgery)
                if found is None:
                    return False
                tokens = self.tokens(member, "heldout")
                if self.store.find("states", self.patched_inputs(found.key, tokens)) is None:
                    return False
        return True
