"""A corrected model in memory: surgery on the decoder's output, in whatever way the model is called.

The position of a token is counted from its sequence's first real token, before the decoder runs, so that padding on
either side, a cache, beams and slices of the logits all give the same one.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from suture.errors import AttachError, did_you_mean
from suture.models import Head, decoder_of, hidden_size
from suture.surgery import Darts, Surgery

ATTRIBUTE = "_suture"
SEEN = "_suture_seen"
CACHES = ("cache", "past_key_values", "cache_params")


def token_positions(
    columns: int,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    past: int | Tensor,
    device: torch.device,
) -> Tensor:
    """[B or 1, columns] position of each token of this forward pass, from its sequence's first real token.

    Given position ids win (generation passes them); else a 2-D mask is counted; else all rows start after the cache.
    Padding gets some position, which nobody reads.
    """
    if position_ids is not None and position_ids.dim() == 2:
        return position_ids[:, -columns:]
    if attention_mask is not None and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -columns:]
    counted = torch.arange(columns, device=device) + past  # [columns], or [B, columns] where each row has its own past
    return counted if counted.dim() == 2 else counted[None]


class _Forward:
    """A decoder's forward with the active surgery behind it. Copies of the decoder get their class's own back."""

    def __init__(self, decoder: Any, attachment: Attachment) -> None:
        self.attachment = attachment
        self.original: Callable[..., Any] = decoder.forward
        self.names = list(inspect.signature(self.original).parameters)
        functools.update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        surgery = self.attachment.active
        if surgery is None:
            return self.original(*args, **kwargs)
        given = dict(zip(self.names, args, strict=False)) | kwargs
        positions = _positions(given)
        output = self.original(*args, **kwargs)
        _remember(given, output, positions)
        if isinstance(output, tuple):
            return (surgery(output[0], positions.to(output[0].device)), *output[1:])
        states = output.last_hidden_state
        output.last_hidden_state = surgery(states, positions.to(states.device))
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self.attachment.decoder)]
        return types.MethodType(type(twin).forward, twin)


class Attachment:
    """Surgery modules on one model, by domain; at most one domain acts at a time, and none at first."""

    def __init__(self, model: Any, surgeries: Mapping[str, Surgery]) -> None:
        self.model = model
        self.surgeries = dict(surgeries)
        self.active: Surgery | None = None
        self.active_name: str | None = None
        _, self.decoder = decoder_of(model)
        self.before = self.decoder.__dict__.get("forward")  # accelerate puts one there
        self.decoder.forward = self.forward = _Forward(self.decoder, self)
        setattr(self.decoder, ATTRIBUTE, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the model has nothing attached

    @contextmanager
    def domain(self, name: str | None) -> Iterator[Any]:
        """Let one domain's surgery act inside the block (None: the uncorrected model); yields the model.

        Raises:
            AttachError: for an unknown domain, with the nearest known one.
        """
        before = self.active_name
        self.switch(name)
        try:
            yield self.model
        finally:
            self.switch(before)

    def switch(self, name: str | None) -> None:
        """Let one domain's surgery act from now on; None stops all."""
        if name is not None and name not in self.surgeries:
            raise AttachError(f"unknown domain {name!r}; {did_you_mean(name, self.surgeries)}")
        self.active_name = name
        self.active = self.surgeries[name] if name is not None else None

    def detach(self) -> None:
        """Give the model back as it was."""
        if getattr(self.decoder, ATTRIBUTE, None) is not self:
            return
        if self.before is None:
            del self.decoder.forward
        else:
            self.decoder.forward = self.before
        delattr(self.decoder, ATTRIBUTE)


def attach(model: Any, surgeries: Mapping[str, Surgery], *, probe: bool = True) -> Attachment:
    """Put surgery modules on a model: `with attach(model, {...}).domain("math"): model.generate(...)`.

    No weight changes, and no module is added to the model's own. With `probe` (a few short forward passes) left-padded
    cached generation under a test correction is compared with whole sequences without padding or cache.

    Raises:
        AttachError: for a module of another width, a model that has modules attached, or one that fails the probe.
    """
    width = hidden_size(model)
    for name, surgery in surgeries.items():
        if surgery.hidden != width:
            raise AttachError(
                f"the surgery of domain {name!r} is for states of width {surgery.hidden}, the model's have {width}"
            )
    _, decoder = decoder_of(model)
    if getattr(decoder, ATTRIBUTE, None) is not None:
        raise AttachError("this model has surgery attached already: detach it first")
    attachment = Attachment(model, surgeries)
    place = next(model.parameters()).device
    if probe:
        try:
            place = _probe(attachment)
        except BaseException:
            attachment.detach()
            raise
    for surgery in surgeries.values():
        surgery.to(place)
    return attachment


def detach(model: Any) -> None:
    """Take all surgery off a model.

    Raises:
        AttachError: when there is none.
    """
    found = getattr(decoder_of(model)[1], ATTRIBUTE, None)
    if found is None:
        raise AttachError("this model has no surgery attached")
    found.detach()


def _positions(given: dict[str, Any]) -> Tensor:
    """Positions from the decoder's own arguments."""
    tokens = given.get("input_ids")
    tokens = tokens if tokens is not None else given["inputs_embeds"]
    cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
    past = _seen(cache) if cache is not None else 0
    return token_positions(tokens.shape[1], given.get("position_ids"), given.get("attention_mask"), past, tokens.device)


def _seen(cache: Any) -> int | Tensor:
    """Tokens that a cache holds, by its own count or by that of `_remember`."""
    noted: int | Tensor | None = getattr(cache, SEEN, None)
    return noted if noted is not None else _length(cache) or 0


def _length(cache: Any) -> int | None:
    """A cache's own count; None for those of state-space models, which keep no tokens and cannot say."""
    try:
        return cache.get_seq_length()  # type: ignore[no-any-return]
    except (AttributeError, ValueError):
        return None


def _remember(given: dict[str, Any], output: Any, positions: Tensor) -> None:
    """Note the position after the last one on a cache that cannot count, [B or 1, 1]."""
    for holder in (given, output):
        for name in CACHES:
            cache = holder.get(name) if isinstance(holder, dict) else None
            if cache is not None and _length(cache) is None:
                setattr(cache, SEEN, positions[:, -1:] + 1)


def _test_surgery(hidden: int, scale: float) -> Surgery:
    """A correction as large as the states, different at each position, so that a wrong one shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):  # a new module draws its start: the caller's generator is left alone
        torch.manual_seed(0)
        test = Darts(hidden, rank=2, t_max=64)
    with torch.no_grad():
        test.content.up.weight.copy_(torch.randn(hidden, 2, generator=generator) * 0.1)
        test.table.rows.copy_(torch.randn(64, hidden, generator=generator) * scale)
    return test


@torch.inference_mode()
def _probe(attachment: Attachment) -> torch.device:
    """Compare padded, cached, corrected generation with a reference that has no padding and no cache.

    Returns:
        The device of the decoder's output.

    Raises:
        AttachError: where the two differ by more than rounding.
    """
    from transformers import GenerationConfig

    model, decoder = attachment.model, attachment.decoder
    device = next(model.parameters()).device
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    long = torch.randint(vocabulary // 8, vocabulary, (7,), generator=generator).tolist()
    short = long[3:5]
    ids = torch.tensor([long, [0] * 5 + short], device=device)  # [2, 7]
    mask = torch.tensor([[1] * 7, [0] * 5 + [1] * 2], device=device)
    states = attachment.forward.original(input_ids=ids[:1], use_cache=False).last_hidden_state
    test = _test_surgery(hidden_size(model), float(states.float().std())).to(states.device)
    settings = GenerationConfig(
        max_new_tokens=3,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    attachment.active = test
    try:
        out = model.generate(ids, attention_mask=mask, generation_config=settings)
    finally:
        attachment.active = None
    head = Head(model)
    worst = effect = 0.0
    for row, prompt in enumerate((long, short)):
        whole = torch.tensor([prompt + out.sequences[row, ids.shape[1] :].tolist()], device=device)  # [1, T]
        plain = decoder(input_ids=whole, use_cache=False).last_hidden_state[0]  # [T, H]
        fixed = test(plain, torch.arange(len(plain), device=plain.device))
        for step, logits in enumerate(out.logits):
            place = len(prompt) + step - 1
            reference = head(fixed[place : place + 1])[0]
            uncorrected = head(plain[place : place + 1])[0]
            worst = max(worst, float((logits[row].float() - reference).abs().max()))
            effect = max(effect, float((uncorrected - reference).abs().max()))
    allowed = 1e-3 if states.dtype == torch.float32 else 6e-2
    if not worst <= allowed * effect:
        raise AttachError(
            f"{type(model).__name__} cannot be corrected exactly: a padded, cached run differs from an unpadded one by "
            f"{worst / effect if effect else float('nan'):.2g} of the correction's effect"
        )
    found: torch.device = states.device
    return found
