"""Text from a corrected model, token by token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from suture import sidecars
from suture.attach import attach
from suture.capture import end_tokens
from suture.inputs import Member
from suture.pipeline import Run
from suture.prompts import apply_template, tokenize
from suture.repair.patch import Patch, patched
from suture.surgery import load_surgery


@dataclass(frozen=True)
class Settings:
    """How to choose tokens."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def generate_text(
    job: Run,
    member: Member,
    prompt: str,
    label: str | None,
    settings: Settings,
    *,
    raw: bool = False,
    stream: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Continue one prompt with the merged model, corrected by a domain's module.

    Args:
        label: of the surgery; None for the uncorrected model.
        raw: leave the prompt as it is; otherwise the domain's template and chat template are applied.
        stream: called with pieces of text as they come.

    Returns:
        `text`, and `tokens`, how many were written.
    """
    from transformers import GenerationConfig, TextStreamer

    text = prompt if raw else apply_template(member.domain.prompts, prompt)
    chat = member.domain.chat_template and not raw
    tokens = tokenize(member.tokenizer, [text], chat_template=chat, system=member.domain.system, max_length=1 << 20)
    artifact = None
    if label is not None:
        surgery = job.surgery(label)
        job.capture(None if surgery.module == "heal" else [member], keep=True)
        artifact = job.calibrate(member, surgery)
        job.remove_residuals()
    if job.merge is not None and job.merged_artifact() is None:
        job.progress.note("merging in memory; `suture merge` keeps the merged model, and the next time is quicker")
    model = job.merged_model()
    ids = tokens.ids[None].to(next(model.parameters()).device)  # [1, T]
    choice: dict[str, Any] = {"do_sample": False}
    if settings.temperature > 0:
        choice = {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}
    # it stops where the domain's target stops, too
    ends = sorted(end_tokens(model) | set(sidecars.end_tokens([member.checkpoint.base])))
    config = GenerationConfig(
        max_new_tokens=settings.max_new_tokens, eos_token_id=ends or None, pad_token_id=0, **choice
    )
    model.generation_config = GenerationConfig()  # what a call leaves open comes from there

    class Streamer(TextStreamer):  # type: ignore[misc]
        """Hands pieces of text on instead of printing them."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            assert stream is not None
            stream(text)

    streamer = Streamer(member.tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    torch.manual_seed(settings.seed)
    acting: Any = nullcontext()
    if artifact is not None and (artifact.path / "surgery.json").exists():
        acting = attach(model, {member.name: load_surgery(artifact.path)}).domain(member.name)
    elif artifact is not None:
        acting = patched(model, Patch.load(artifact.path))
    with acting, torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer)
    written = out[0, ids.shape[1] :]
    return {"text": member.tokenizer.decode(written, skip_special_tokens=True), "tokens": len(written)}
