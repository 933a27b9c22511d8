"""A recipe made ready: its models found, its prompts split, everything checked, before any weight is read.

Also what each artifact is made of: content hashes and settings, nothing of this machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from suture.checkpoint import Checkpoint, parse_reference, resolve
from suture.errors import PromptError, RecipeError, StoreError, SutureError, did_you_mean
from suture.family import check_readers
from suture.losses import get_loss
from suture.merge import Merge
from suture.models import choose_device, choose_dtype, load_tokenizer, need_memory, tokenizer_folder
from suture.progress import SILENT, Progress
from suture.prompts import Split, split_prompts, tokenize
from suture.recipe import Domain, Recipe, Surgery
from suture.states import Tokens
from suture.store import FileHashes, Store, need_disk
from suture.surgery import make_surgery


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


@contextmanager
def _named(field: str) -> Iterator[None]:
    """Put the recipe's field in front of what is wrong with it."""
    try:
        yield
    except SutureError as error:
        raise type(error)(f"{field}: {error}") from error


class Plan:
    """A recipe whose inputs are found, checked and fit together. Making one loads no weights.

    Raises:
        SutureError: whatever is wrong with recipe, models, prompts, disk or memory, before any work.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        store: Store | None = None,
        progress: Progress = SILENT,
        started: float | None = None,
    ) -> None:
        self.recipe, self.progress = recipe, progress
        self.store = store or Store()
        self.hashes = FileHashes()
        self.started = time.monotonic() if started is None else started
        self.reused: list[str] = []
        self._written: dict[tuple[str, str], Tokens] = {}  # what targets wrote, by domain and split, once it is read
        self.device = choose_device(recipe.device)
        self.dtype = choose_dtype(recipe.dtype, self.device)
        for index, surgery in enumerate(recipe.surgery):
            with _named(f"surgery.{index}"):
                make_surgery(surgery.module, hidden=1 << 16, rank=1, t_max=1)
                get_loss(surgery.loss)
        self.merge: Merge | None = None
        if recipe.merge is not None:
            config, folder = recipe.merge_config()
            remote = recipe.trust_remote_code
            self.merge = Merge(config, folder, seed=recipe.merge_seed, trust_remote_code=remote)
            for note in self.merge.notes:
                self.progress.note(note)
            _ = self.merge.weights  # what mergekit cannot plan, or read of an adapter, is told now
            self.donor = self.merge.donor
            self.fingerprint = self.merge.fingerprint(self.hashes)
        else:
            with _named("merged"):
                self.donor = resolve(parse_reference(recipe.merged or "", recipe.folder))
            self.fingerprint = self.donor.fingerprint(self.hashes)
        self.members = {name: self._member(name, domain) for name, domain in recipe.domains.items()}
        self._check()

    def _member(self, name: str, domain: Domain) -> Member:
        recipe = self.recipe
        with _named(f"domains.{name}.target"):
            checkpoint = resolve(parse_reference(domain.target, recipe.folder))
        heldout = recipe.heldout.samples
        split = split_prompts(domain, name, recipe.folder, recipe.samples, heldout, recipe.split_seed)
        if split.dropped:
            self.progress.note(f"{name}: {split.dropped} prompts repeat earlier ones and are left out")
        tokenizer = load_tokenizer(tokenizer_folder(checkpoint), trust_remote_code=recipe.trust_remote_code)

        def encode(texts: list[str]) -> Tokens:
            return tokenize(
                tokenizer, texts, chat_template=domain.chat_template, system=domain.system, max_length=recipe.max_length
            )

        with _named(f"domains.{name}"):
            calibration, prompts = encode(split.calibration), encode(split.heldout)
        cut = int((calibration.lengths == recipe.max_length).sum())
        if cut:
            self.progress.note(f"{name}: {cut} calibration prompts reach max_length {recipe.max_length} and may be cut")
        fingerprint = checkpoint.fingerprint(self.hashes)
        return Member(name, domain, checkpoint, fingerprint, tokenizer, split, calibration, prompts)

    def _check(self) -> None:
        """What can be known before any weight is read: widths, vocabularies, lengths, overlap, disk and memory."""
        targets = {name: member.checkpoint for name, member in self.members.items()}
        built = self.merge.tokenizer if self.merge is not None and self.merge.resized else None
        for note in check_readers(self.donor, built.get_vocab() if built else None, targets):
            self.progress.note(note)
        settings = self.donor.text_config
        width = int(settings.get("hidden_size") or settings.get("n_embd") or 0)
        self.rows = len(built) if built else int(settings.get("vocab_size") or 0)
        for index, surgery in enumerate(self.recipe.surgery):
            if width:
                with _named(f"surgery.{index}"), torch.device("meta"):
                    make_surgery(surgery.module, width, surgery.rank, surgery.t_max)
        for member in self.members.values():
            self._check_tokens(member)
        tokens = 0
        for member in self.members.values():
            for split in self.splits:
                prompts, more = self.to_continue(member, split)
                tokens += len(prompts.ids) + len(prompts) * more
        size = self.dtype.itemsize
        heads = (1 + len(self.members)) * self.rows * width * size
        need_disk(self.store.root, 2 * tokens * width * size + heads + (1 << 20), "storing hidden states")
        if not self.captured():
            self.need_memory(*targets.values())

    def need_memory(self, *others: Checkpoint) -> None:
        """Refuse when the largest of the merged model and these others does not fit the device.

        Raises:
            ResourceError: with what is needed and what is free.
        """
        largest = max(model.count for model in (self.donor, *others)) * self.dtype.itemsize
        need_memory(int(1.2 * largest) + 500_000_000, "the largest model with its activations", self.device)

    def _check_tokens(self, member: Member) -> None:
        """One domain's tokens: none twice, none too long for a model, none unknown to the merged model."""
        where = f"domains.{member.name}"
        calibrated = member.calibration.prompts()
        both = sum(tuple(row.tolist()) in calibrated for row in member.prompts.sequences)
        if both:
            raise PromptError(
                f"{where}: {both} held-out prompts are calibration prompts token for token once they are cut to "
                f"max_length {self.recipe.max_length}: raise it"
            )
        texts = [self.to_continue(member, split) for split in self.splits]
        longest = max(int(prompts.lengths.max()) + more for prompts, more in texts)
        for model in (self.donor, member.checkpoint):
            limit = model.text_config.get("max_position_embeddings") or model.text_config.get("n_positions")
            if limit and longest > limit:
                raise PromptError(
                    f"{where}: texts of up to {longest} tokens, but {model.reference} reads {limit} at most: lower "
                    "max_length or heldout.tokens"
                )
        highest = max(int(member.calibration.ids.max()), int(member.prompts.ids.max()))
        if self.rows and highest >= self.rows:
            token = member.tokenizer.convert_ids_to_tokens(highest)
            raise PromptError(
                f"{where}: the prompts hold the token {token!r} ({highest}), which the merged model, with {self.rows} "
                "rows, does not have: write them without it, or merge with mergekit's `tokenizer_source`"
            )

    @property
    def splits(self) -> list[str]:
        """What is read in each domain: the text that surgeries are trained on, and held-out text."""
        wanted = dict.fromkeys(surgery.split for surgery in self.recipe.surgery)
        return [*sorted(wanted), "heldout"]

    def captured(self) -> bool:
        """Whether no language model is needed any more."""
        return all(
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
        """What makes a trained module: both models' states and the settings, but not its label."""
        return {
            "models": [self.fingerprint, member.fingerprint],
            "dtype": str(self.dtype),
            "calibration": self.tokens(member, surgery.split).first(surgery.samples).fingerprint(),
            "heldout": self.tokens(member, "heldout").fingerprint(),
            "settings": surgery.model_dump(exclude={"name"}),
        }

    # Choices that commands make

    def chosen(self, names: list[str] | None) -> list[Member]:
        """Members by name, all of them where none is named.

        Raises:
            RecipeError: for an unknown domain, with the nearest.
        """
        for name in names or []:
            if name not in self.members:
                raise RecipeError(f"unknown domain {name!r}; {did_you_mean(name, self.members)}")
        return [self.members[name] for name in names or self.members]

    def surgery(self, label: str | None) -> Surgery:
        """A surgery of the recipe by its label; the last one where none is named.

        Raises:
            RecipeError: for an unknown label, with the nearest.
        """
        known = {surgery.label: surgery for surgery in self.recipe.surgery}
        if label is not None and label not in known:
            raise RecipeError(f"unknown surgery {label!r}; {did_you_mean(label, known)}")
        return known[label] if label is not None else self.recipe.surgery[-1]
