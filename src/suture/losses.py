"""Losses between corrected and target states. Each takes flat tokens, so that no padded position is ever computed.

Shapes: corrected and target [N, H]; entropy [N] in nats; heads map [N, H] to [N, V]. Equation numbers are those of
arXiv 2608.28547.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from suture.errors import SurgeryError, did_you_mean

Decode = Callable[[Tensor], Tensor]
ROWS = 256  # states whose logits exist at one time


@dataclass(frozen=True)
class Batch:
    """What a loss may look at, beside the corrected states.

    Attributes:
        target: [N, H] the target's states.
        entropy: [N] the target's, in nats.
        decode, decode_target: heads of the merged model and of the target.
        power, floor: what `ewl1` and `ewl2` make of entropies, as in `entropy_weights`.
    """

    target: Tensor
    entropy: Tensor | None = None
    decode: Decode | None = None
    decode_target: Decode | None = None
    power: float = 1.0
    floor: float = 0.0


Loss = Callable[[Tensor, Batch], Tensor]


def l1(corrected: Tensor, batch: Batch) -> Tensor:
    """Mean over tokens of ||corrected - target||_1 / H (Eq. 5)."""
    return (corrected - batch.target).abs().mean()


def ewl1(corrected: Tensor, batch: Batch) -> Tensor:
    """As l1, each token weighted by its entropy over the minibatch's mean entropy (Eq. 6)."""
    weight = _relative_weights(batch)  # [N]
    if weight is None:
        return l1(corrected, batch)
    return (weight * (corrected - batch.target).abs().mean(-1)).mean()


def l2(corrected: Tensor, batch: Batch) -> Tensor:
    """Mean over tokens of ||corrected - target||_2^2 / H."""
    return ((corrected - batch.target) ** 2).mean()


def ewl2(corrected: Tensor, batch: Batch) -> Tensor:
    """As l2, each token weighted by its entropy over the minibatch's mean entropy."""
    weight = _relative_weights(batch)  # [N]
    if weight is None:
        return l2(corrected, batch)
    return (weight * ((corrected - batch.target) ** 2).mean(-1)).mean()


def entropy_weights(entropy: Tensor, power: float = 1.0, floor: float = 0.0) -> Tensor | None:
    """max(entropy, floor) ^ power of each token, [N] from [N] nats; None where the power is 0 and all count alike.

    With the defaults these are the entropies themselves, untouched.
    """
    if power == 0:
        return None
    if power == 1 and floor == 0:
        return entropy
    # rounding leaves entropies a little below zero, where a fractional power is not a number
    return entropy.clamp_min(floor) ** power


def _relative_weights(batch: Batch) -> Tensor | None:
    """[N] weights of the tokens over their mean, or None where all count alike."""
    assert batch.entropy is not None
    weight = entropy_weights(batch.entropy, batch.power, batch.floor)  # [N]
    return None if weight is None else weight / weight.mean().clamp_min(1e-12)


def kl(corrected: Tensor, batch: Batch) -> Tensor:
    """Mean over tokens of KL(p* || p), p* = softmax(W*_U h*), p = softmax(W_U corrected), on rows both heads have."""
    return _by_chunks(_kl_rows, corrected, batch)


def ce(corrected: Tensor, batch: Batch) -> Tensor:
    """Mean over tokens of -log p at the target's most probable token (hard labels)."""
    return _by_chunks(_ce_rows, corrected, batch)


def _by_chunks(rows: Callable[[Tensor, Tensor, Decode, Decode], Tensor], corrected: Tensor, batch: Batch) -> Tensor:
    """Sum a loss over chunks of tokens; logits are computed again in the backward pass instead of being kept."""
    assert batch.decode is not None
    assert batch.decode_target is not None
    total = corrected.new_zeros(())
    for one, two in zip(torch.split(corrected, ROWS), torch.split(batch.target, ROWS), strict=True):
        total = total + checkpoint(rows, one, two, batch.decode, batch.decode_target, use_reentrant=False)
    return total / len(corrected)


def _kl_rows(corrected: Tensor, target: Tensor, decode: Decode, decode_target: Decode) -> Tensor:
    logits, wanted = shared_rows(decode(corrected), decode_target(target).detach())
    return torch.nn.functional.kl_div(
        torch.log_softmax(logits, -1), torch.log_softmax(wanted, -1), reduction="sum", log_target=True
    )


def _ce_rows(corrected: Tensor, target: Tensor, decode: Decode, decode_target: Decode) -> Tensor:
    logits, wanted = shared_rows(decode(corrected), decode_target(target).detach())
    return torch.nn.functional.cross_entropy(logits, wanted.argmax(-1), reduction="sum")


def shared_rows(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Both [N, V] logits on the token ids that both vocabularies have."""
    size = min(one.shape[-1], two.shape[-1])
    return one[..., :size], two[..., :size]


LOSSES: dict[str, Loss] = {"l1": l1, "ewl1": ewl1, "l2": l2, "ewl2": ewl2, "kl": kl, "ce": ce}
NEED_ENTROPY = frozenset({"ewl1", "ewl2"})
NEED_HEADS = frozenset({"kl", "ce"})


def get_loss(name: str) -> Loss:
    """A loss by its name.

    Raises:
        SurgeryError: for an unknown one, with the nearest.
    """
    if name not in LOSSES:
        raise SurgeryError(f"unknown loss {name!r}; {did_you_mean(name, LOSSES)}")
    return LOSSES[name]
