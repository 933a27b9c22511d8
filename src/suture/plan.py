"""A recipe made ready: its models found, its prompts split, everything checked, before any weight is read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from suture.calibrate import check_table
from suture.checkpoint import Checkpoint, parse_reference, resolve
from suture.corrections import AUTO, LAYERED, Surgery
from suture.errors import PromptError, RecipeError, SurgeryError, SutureError, did_you_mean
from suture.family import check_readers
from suture.inputs import RESIDUAL, Inputs, Member, runs
from suture.losses import get_loss
from suture.merge import Merge
from suture.models import choose_device, choose_dtype, load_tokenizer, need_memory, tokenizer_folder
from suture.progress import SILENT, Progress
from suture.prompts import read_prompts, split_prompts, tokenize
from suture.recipe import Domain, Recipe
from suture.states import Tokens
from suture.store import FileHashes, Store, need_disk
from suture.surgery import MODULES, make_surgery


@contextmanager
def _named(field: str) -> Iterator[None]:
    """Put the recipe's field in front of what is wrong with it."""
    try:
        yield
    except SutureError as error:
        raise type(error)(f"{field}: {error}") from error


def _check_names(surgery: Surgery) -> None:
    """Refuse modules and losses that do not exist, and settings that do not fit a module."""
    known = [*MODULES, *LAYERED]
    for name in surgery.among or []:
        if name not in known:
            raise SurgeryError(f"among: unknown module {name!r}; {did_you_mean(name, known)}")
        if not runs(surgery.engine, name):
            raise SurgeryError(f"among: {name} is nothing that engine {surgery.engine} can run: leave one of them out")
    if surgery.module not in (*known, AUTO):
        raise SurgeryError(f"unknown surgery module {surgery.module!r}; {did_you_mean(surgery.module, [*known, AUTO])}")
    if surgery.module in MODULES:
        get_loss(str(surgery.loss))
        check_table(surgery.module, surgery.smooth, surgery.shrink, surgery.start)


class Plan(Inputs):
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
                _check_names(surgery)
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
        self.guard = self._guard()
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

    def _guard(self) -> tuple[Tokens, Tokens] | None:
        """(text that holds `heal` back, text that perplexity is measured on), none of it of any domain."""
        if self.recipe.guard is None:
            return None
        with _named("guard"):
            texts = list(dict.fromkeys(read_prompts(self.recipe.guard, self.recipe.folder, "guard")))
            if len(texts) < 2:
                raise PromptError(
                    f"{len(texts)} different texts, but half of them hold and half are measured: give more"
                )
            tokenizer = load_tokenizer(self.donor.base, trust_remote_code=self.recipe.trust_remote_code)
            one, two = (
                tokenize(tokenizer, part, chat_template=False, system=None, max_length=self.recipe.max_length)
                for part in (texts[1::2], texts[::2])
            )
            self._check_length(self.donor, max(int(part.lengths.max()) for part in (one, two)), "lower max_length")
        return one, two

    def _check(self) -> None:
        """What can be known before any weight is read: widths, vocabularies, lengths, overlap, disk and memory."""
        targets = {name: member.checkpoint for name, member in self.members.items()}
        built = self.merge.tokenizer if self.merge is not None and self.merge.resized else None
        for note in check_readers(self.donor, built.get_vocab() if built else None, targets):
            self.progress.note(note)
        settings = self.donor.text_config
        self.width = width = int(settings.get("hidden_size") or settings.get("n_embd") or 0)
        self.rows = len(built) if built else int(settings.get("vocab_size") or 0)
        for index, surgery in enumerate(self.recipe.surgery):
            if width and surgery.module in MODULES:
                with _named(f"surgery.{index}"), torch.device("meta"):
                    make_surgery(surgery.module, width, surgery.rank or 16, surgery.t_max)
        for member in self.members.values():
            self._check_tokens(member)
        tokens = 0
        for member in self.members.values():
            for split in self.splits:
                prompts, more = self.to_continue(member, split)
                tokens += len(prompts.ids) + len(prompts) * more
        for index, surgery in enumerate(self.recipe.surgery):
            with _named(f"surgery.{index}"):
                self._check_choice(surgery)
        size = self.dtype.itemsize
        if any(surgery.module in RESIDUAL for surgery in self.wanted()):
            # twice a layer, of each target, until the repair is done
            layers = int(settings.get("num_hidden_layers") or settings.get("n_layer") or 0)
            tokens += layers * sum(
                len(prompts.ids) + len(prompts) * more
                for member in self.members.values()
                for prompts, more in (self.to_continue(member, split) for split in self.splits if split != "heldout")
            )
        heads = (1 + len(self.members)) * self.rows * width * size
        need_disk(self.store.root, 2 * tokens * width * size + heads + (1 << 20), "storing hidden states")
        if not self.captured():
            self.need_memory(*targets.values())

    def _check_choice(self, surgery: Surgery) -> None:
        """Whether there is something for `auto` to choose from, and whether the model has the linears to change."""
        if surgery.module == AUTO:
            self.choices(surgery)
        stored = [name.removesuffix(".weight") for name in self.donor.tensors if name.endswith(".weight")]
        known = dict.fromkeys(name.rsplit(".", 1)[-1] for name in stored)
        for name in surgery.linears or []:
            if name not in known:
                raise SurgeryError(f"linears: the merged model has no {name!r}; {did_you_mean(name, known)}")

    def need_memory(self, *others: Checkpoint) -> None:
        """Refuse when the largest of the merged model and these others does not fit the device.

        Raises:
            ResourceError: with what is needed and what is free.
        """
        largest = max(model.count for model in (self.donor, *others)) * self.dtype.itemsize
        if any(surgery.module in ("svd", "asvd") for surgery in self.wanted()):
            largest *= 2  # the only ones that compare a target's weights with the merged ones
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
            with _named(where):
                self._check_length(model, longest, "lower max_length or heldout.tokens")
        highest = max(int(member.calibration.ids.max()), int(member.prompts.ids.max()))
        if self.rows and highest >= self.rows:
            token = member.tokenizer.convert_ids_to_tokens(highest)
            raise PromptError(
                f"{where}: the prompts hold the token {token!r} ({highest}), which the merged model, with {self.rows} "
                "rows, does not have: write them without it, or merge with mergekit's `tokenizer_source`"
            )

    @staticmethod
    def _check_length(model: Checkpoint, longest: int, mend: str) -> None:
        limit = model.text_config.get("max_position_embeddings") or model.text_config.get("n_positions")
        if limit and longest > limit:
            raise PromptError(f"texts of up to {longest} tokens, but {model.reference} reads {limit} at most: {mend}")

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
