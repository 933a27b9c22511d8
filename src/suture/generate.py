"""Text from a corrected model, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from suture import sidecars
from suture.attach import attach
from suture.capture import end_tokens
from suture.errors import PromptError
from suture.inputs import Member
from suture.models import load_tokenizer
from suture.pipeline import Run
from suture.prompts import apply_template, tokenize
from suture.repair.patch import Patch, patched
from suture.routing import Switch, fit, modules
from suture.sampling import Settings
from suture.states import Tokens
from suture.surgery import Surgery, load_surgery

AUTO = "auto"  # in place of a domain: the router chooses


def generate_text(
    job: Run,
    member: Member | None,
    prompt: str,
    label: str | None,
    settings: Settings,
    *,
    raw: bool = False,
    chat: bool = False,
    stream: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Continue one prompt with the merged model, corrected by a domain's module.

    Args:
        member: the domain; None lets the router choose by the prompt, which is then left as it is.
        label: of the surgery; None for the uncorrected model.
        raw: leave the prompt as it is; otherwise the domain's template and chat template are applied.
        chat: without a domain, put the prompt into the merged model's chat template.
        stream: called with pieces of text as they come.

    Returns:
        `text`, and `tokens`, how many were written; without a domain also `routed`, the one that the router chose, or
        None where it abstained.
    """
    from transformers import GenerationConfig, TextStreamer

    tokenizer, tokens = _read(job, member, prompt, raw, chat)
    acting, switch = _correction(job, member, label)
    if job.merge is not None and job.merged_artifact() is None:
        job.progress.note("merging in memory; `suture merge` keeps the merged model, and the next time is quicker")
    model = job.merged_model()
    ids = tokens.ids[None].to(next(model.parameters()).device)  # [1, T]
    # it stops where the domain's target stops, too
    targets = [member] if member is not None else list(job.members.values())
    ends = sorted(end_tokens(model) | set(sidecars.end_tokens([each.checkpoint.base for each in targets])))
    config = GenerationConfig(
        max_new_tokens=settings.max_new_tokens, eos_token_id=ends or None, pad_token_id=0, **settings.choice
    )
    model.generation_config = GenerationConfig()  # what a call leaves open comes from there

    class Streamer(TextStreamer):  # type: ignore[misc]
        """Hands pieces of text on instead of printing them."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            assert stream is not None
            stream(text)

    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    torch.manual_seed(settings.seed)
    with acting(model), torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer)
    written = out[0, ids.shape[1] :]
    answer = {"text": tokenizer.decode(written, skip_special_tokens=True), "tokens": len(written)}
    if switch is not None:
        index = int(switch.choices[0])
        answer["routed"] = list(job.members)[index] if index >= 0 else None
    return answer


def _read(job: Run, member: Member | None, prompt: str, raw: bool, chat: bool) -> tuple[Any, Tokens]:
    """(tokenizer, tokens of the prompt in the form that the domain gives its own, or that the caller asks for)."""
    if member is not None:
        text = prompt if raw else apply_template(member.domain.prompts, prompt)
        tokenizer, chat, system = member.tokenizer, member.domain.chat_template and not raw, member.domain.system
    else:
        built = job.merge.tokenizer if job.merge is not None and job.merge.resized else None
        remote = job.recipe.trust_remote_code
        tokenizer, text, system = built or load_tokenizer(job.donor.base, trust_remote_code=remote), prompt, None
        if chat and not getattr(tokenizer, "chat_template", None):
            raise PromptError("--chat: the merged model's tokenizer has no chat template: write the whole prompt")
    return tokenizer, tokenize(tokenizer, [text], chat_template=chat, system=system, max_length=1 << 20)


def _correction(job: Run, member: Member | None, label: str | None) -> tuple[Callable[[Any], Any], Switch | None]:
    """(what to enter around a model so that it is corrected, the router's switch where there is no domain)."""
    if label is None:
        return nullcontext, None
    surgery = job.surgery(label)
    job.capture(None if member is None or surgery.module == "heal" else [member], keep=True)
    if member is None:
        made = modules(job, surgery)
        job.remove_residuals()
        switch = Switch(fit(job), list(made.values()))
        return partial(_attached, surgery=switch), switch
    artifact = job.calibrate(member, surgery)
    job.remove_residuals()
    if (artifact.path / "surgery.json").exists():
        return partial(_attached, surgery=load_surgery(artifact.path)), None
    return partial(patched, patch=Patch.load(artifact.path)), None


@contextmanager
def _attached(model: Any, surgery: Surgery) -> Iterator[Any]:
    """A model under one surgery, and without it behind the block."""
    attachment = attach(model, {"it": surgery})
    try:
        with attachment.domain("it"):
            yield model
    finally:
        attachment.detach()
