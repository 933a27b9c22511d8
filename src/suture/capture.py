"""Capture: final hidden states of one frozen model on given tokens, and what a target writes by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from suture.errors import AttachError, ModelError
from suture.models import Head, decoder_of
from suture.progress import SILENT, Progress
from suture.sidecars import listed
from suture.states import HiddenCache, Tokens

BATCH_TOKENS = 2048  # tokens of one forward pass
HEAD_ROWS = 512  # states whose logits exist at one time: 512 x 49,152 x 4 bytes = 100 MB


def batches(lengths: Tensor, batch_tokens: int = BATCH_TOKENS) -> Iterator[list[int]]:
    """Indices of sequences, longest first, in batches of near-equal length: little is padded, nothing mixed."""
    order = torch.argsort(lengths, descending=True, stable=True).tolist()
    while order:
        longest = int(lengths[order[0]])
        fits = max(1, batch_tokens // longest)
        # shorter than nine tenths of the longest would pad too much
        batch = [index for index in order[:fits] if int(lengths[index]) >= 0.9 * longest]
        yield batch
        order = order[len(batch) :]


def pad_right(sequences: Sequence[Tensor]) -> Tensor:
    """[B, T] ids with zeros behind. Under a causal mask no real token sees them, so no mask is needed."""
    return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)


@torch.inference_mode()
def capture(
    model: Any,
    tokens: Tokens,
    *,
    entropy: bool = False,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = SILENT,
    stage: str = "capture",
) -> HiddenCache:
    """Read tokens with a frozen model and keep its final hidden states.

    The decoder alone runs: no logits exist unless `entropy` asks for them, and then in chunks that are thrown away.

    Args:
        model: a causal language model of transformers.
        tokens: what to read; every sequence is read from its first token, without a cache.
        entropy: also H_t = -sum p log p of softmax(W_U h_t), in nats.

    Raises:
        AttachError: for a model whose decoder's output is not what its head reads.
        ModelError: for token ids outside the vocabulary, or states that are not finite.
    """
    path, decoder = decoder_of(model)
    device = next(model.parameters()).device
    check_head(model)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokens.ids) and int(tokens.ids.max()) >= rows:
        raise ModelError(
            f"token id {int(tokens.ids.max())} is not in the model's vocabulary of {rows} rows: the prompts were "
            "tokenised for another model"
        )
    states: list[Tensor] = [torch.empty(0)] * len(tokens)
    sequences = tokens.sequences
    with progress.stage(stage, len(tokens.ids)) as advance:
        for batch in batches(tokens.lengths, batch_tokens):
            ids = pad_right([sequences[index] for index in batch]).to(device)  # [B, T]
            hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, H]
            for row, index in enumerate(batch):
                states[index] = hidden[row, : len(sequences[index])].cpu()
            advance(int(tokens.lengths[batch].sum()))
    joined = torch.cat(states)  # [N, H]
    if not bool(torch.isfinite(joined).all()):
        raise ModelError(f"{type(model).__name__} gives hidden states that are not finite: try another dtype")
    return HiddenCache(tokens, joined, entropies(joined, Head(model, path)) if entropy else None)


@torch.inference_mode()
def entropies(states: Tensor, head: Head) -> Tensor:
    """[N] entropy in nats of softmax(head(states)), [N, H] states, without more than a chunk of logits in memory."""
    found = []
    for rows in torch.split(states, HEAD_ROWS):
        logits = head(rows)  # [n, V]
        # H = logsumexp(z) - sum softmax(z) z
        total = torch.logsumexp(logits, -1, keepdim=True)  # [n, 1]
        weights = (logits - total).exp_()  # [n, V]
        found.append((total[:, 0] - torch.linalg.vecdot(weights, logits)).clamp_min(0).cpu())
    return torch.cat(found) if found else torch.empty(0)


def check_head(model: Any) -> None:
    """Refuse a model in which something happens between the decoder's output and the head.

    Raises:
        AttachError: when logits replayed from the decoder's output differ from the model's own.
    """
    path, decoder = decoder_of(model)
    weight = next(model.parameters())
    ids = torch.arange(1, 5, device=weight.device)[None]  # [1, 4]
    with torch.inference_mode():
        whole = model(input_ids=ids, use_cache=False).logits[0].float()  # [4, V]
        output = decoder(input_ids=ids, use_cache=False)
        if not hasattr(output, "last_hidden_state"):
            raise AttachError(f"{type(decoder).__name__} returns no last_hidden_state")
        replayed = Head(model, path)(output.last_hidden_state[0])
    # two runs of the same kernels: half-precision models may differ by rounding, never by a layer
    scale = float(whole.abs().max()) or 1.0
    allowed = 1e-4 if weight.dtype == torch.float32 else 3e-2
    if whole.shape != replayed.shape or float((whole - replayed).abs().max()) > allowed * scale:
        raise AttachError(
            f"{type(model).__name__}: the decoder's output is not what its head reads, so a correction there "
            "would be wrong"
        )


@torch.inference_mode()
def respond(
    model: Any,
    tokens: Tokens,
    new_tokens: int,
    *,
    batch: int = 32,
    progress: Progress = SILENT,
    stage: str = "respond",
) -> Tokens:
    """Let a target continue its prompts greedily; each response ends with its first end-of-text token, if any.

    Args:
        tokens: prompts.
        new_tokens: how many tokens it may write for each.

    Returns:
        Prompt and response of each sequence, in the given order, `prompt_lengths` saying where responses start.
    """
    from transformers import GenerationConfig

    ends = end_tokens(model)
    settings = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, use_cache=True, eos_token_id=sorted(ends) or None, pad_token_id=0
    )
    # whatever a call leaves open comes from the model's own settings: penalties, suppressed tokens and more
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        written = _continue(model, tokens, settings, ends, batch, progress, stage)
    finally:
        model.generation_config = kept
    full = [row.tolist() + answer for row, answer in zip(tokens.sequences, written, strict=True)]
    return Tokens.of(full, tokens.lengths.tolist())


def _continue(
    model: Any, tokens: Tokens, settings: Any, ends: set[int], batch: int, progress: Progress, stage: str
) -> list[list[int]]:
    """What the model writes for each sequence, in batches padded on the left."""
    device = next(model.parameters()).device
    written: list[list[int]] = [[] for _ in range(len(tokens))]
    sequences = tokens.sequences
    order = torch.argsort(tokens.lengths, descending=True, stable=True).tolist()
    with progress.stage(stage, len(tokens)) as advance:
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            width = max(len(sequences[row]) for row in rows)
            ids = torch.zeros(len(rows), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for line, row in enumerate(rows):
                ids[line, width - len(sequences[row]) :] = sequences[row]
                mask[line, width - len(sequences[row]) :] = 1
            out = model.generate(ids.to(device), attention_mask=mask.to(device), generation_config=settings)[
                :, width:
            ].tolist()
            for row, answer in zip(rows, out, strict=True):
                stop = next((i for i, token in enumerate(answer) if token in ends), len(answer))
                written[row] = answer[: stop + 1]
            advance(len(rows))
    return written


def end_tokens(model: Any) -> set[int]:
    """End-of-text ids of the generation config and the model's config, united."""
    ends: set[int] = set()
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        ends.update(listed(getattr(config, "eos_token_id", None)))
    return ends
