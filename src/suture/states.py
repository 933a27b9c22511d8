"""What flows between the stages: token ids, and hidden states on them. Ragged, on disk and in memory; tensors only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from suture.errors import StoreError, SurgeryError
from suture.store import digest


@dataclass(frozen=True)
class Tokens:
    """Token ids of several sequences, ragged: one after another, without padding.

    Attributes:
        ids: [N] token ids of all sequences, N their total length.
        lengths: [S] tokens of each sequence.
        prompt_lengths: [S] how many of them are the prompt; the rest is what a target wrote.
    """

    ids: Tensor
    lengths: Tensor
    prompt_lengths: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> Tensor:
        """[S] index of each sequence's first token."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def positions(self) -> Tensor:
        """[N] position of each token, counted from its sequence's first."""
        return torch.arange(len(self.ids)) - self.starts.repeat_interleave(self.lengths)

    @property
    def prompts_only(self) -> bool:
        """Whether no sequence has a response."""
        return torch.equal(self.prompt_lengths, self.lengths)

    @property
    def sequences(self) -> list[Tensor]:
        """The ids as one tensor a sequence."""
        return list(torch.split(self.ids, self.lengths.tolist()))

    def prompts(self) -> set[tuple[int, ...]]:
        """The prompts alone, as ids."""
        return {
            tuple(row[:end].tolist()) for row, end in zip(self.sequences, self.prompt_lengths.tolist(), strict=True)
        }

    def first(self, sequences: int) -> Tokens:
        """The first sequences only."""
        lengths = self.lengths[:sequences]
        return Tokens(self.ids[: int(lengths.sum())], lengths, self.prompt_lengths[:sequences])

    def last(self, sequences: int) -> Tokens:
        """The last sequences only."""
        lengths = self.lengths[len(self.lengths) - sequences :]
        start = len(self.lengths) - sequences
        return Tokens(self.ids[len(self.ids) - int(lengths.sum()) :], lengths, self.prompt_lengths[start:])

    def fingerprint(self) -> str:
        """A hash of the content."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return digest([self.ids.tolist(), self.lengths.tolist(), self.prompt_lengths.tolist()])

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int] | None = None) -> Tokens:
        """From lists of ids; without `prompt_lengths` all of each is prompt."""
        lengths = [len(sequence) for sequence in sequences]
        return cls(
            torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.long),
            torch.tensor(lengths, dtype=torch.long),
            torch.tensor(list(prompt_lengths or lengths), dtype=torch.long),
        )


@dataclass(frozen=True)
class HiddenCache:
    """Final hidden states of one model on one set of tokens, ragged.

    Attributes:
        tokens: the tokens that were read.
        states: [N, H] after the final norm, the head's input, in the dtype of the forward pass.
        entropy: [N] of the model's own next-token distribution in nats, or None where nobody asked.
    """

    tokens: Tokens
    states: Tensor
    entropy: Tensor | None = None

    def save(self, folder: Path) -> None:
        """Write `cache.safetensors` into a folder."""
        tensors = {
            "states": self.states,
            "ids": self.tokens.ids,
            "lengths": self.tokens.lengths,
        }
        if self.entropy is not None:
            tensors["entropy"] = self.entropy
        # one tensor may be both lengths: safetensors refuses names that share memory
        tensors["prompt_lengths"] = self.tokens.prompt_lengths.clone()
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, folder / "cache.safetensors")

    @classmethod
    def load(cls, folder: Path) -> HiddenCache:
        """Read what `save` wrote."""
        file = folder / "cache.safetensors"
        if not file.exists():
            raise StoreError(f"{folder} holds no captured states")
        found = load_file(file)
        return cls(
            Tokens(found["ids"], found["lengths"], found["prompt_lengths"]), found["states"], found.get("entropy")
        )

    def scored(self) -> tuple[Tensor, Tensor]:
        """([n] indices of the states that scores are about, [n] the tokens that come after them).

        Those that predict a response; where no sequence has one, all that predict a token of the prompt.
        """
        tokens = self.tokens
        last = tokens.lengths.repeat_interleave(tokens.lengths) - 1  # [N]
        first = tokens.prompt_lengths.repeat_interleave(tokens.lengths) - 1  # [N]
        if tokens.prompts_only:
            first = torch.zeros_like(last)
        chosen = ((tokens.positions >= first) & (tokens.positions < last)).nonzero()[:, 0]
        return chosen, tokens.ids[chosen + 1]

    def first(self, sequences: int) -> HiddenCache:
        """The first sequences only."""
        tokens = self.tokens.first(sequences)
        end = len(tokens.ids)
        return HiddenCache(tokens, self.states[:end], None if self.entropy is None else self.entropy[:end])

    def last(self, sequences: int) -> HiddenCache:
        """The last sequences only."""
        tokens = self.tokens.last(sequences)
        start = len(self.states) - len(tokens.ids)
        return HiddenCache(tokens, self.states[start:], None if self.entropy is None else self.entropy[start:])

    def to(self, device: torch.device) -> HiddenCache:
        """States and entropies on a device; tokens stay where they are."""
        entropy = None if self.entropy is None else self.entropy.to(device)
        return HiddenCache(self.tokens, self.states.to(device), entropy)


def check_pair(merged: HiddenCache, target: HiddenCache) -> None:
    """Refuse states that were not captured on the same tokens, or are of another width.

    Raises:
        SurgeryError: with what differs.
    """
    if not torch.equal(merged.tokens.ids, target.tokens.ids) or not torch.equal(
        merged.tokens.lengths, target.tokens.lengths
    ):
        raise SurgeryError("merged and target states were captured on different tokens: capture both on the same ones")
    if merged.states.shape != target.states.shape:
        raise SurgeryError(
            f"merged and target states differ in shape, {list(merged.states.shape)} and {list(target.states.shape)}"
        )
