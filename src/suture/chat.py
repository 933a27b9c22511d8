"""A conversation in the terminal with an export: history, slash commands, answers token by token."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from suture.capture import end_tokens
from suture.errors import ModelError, PromptError, SutureError, did_you_mean
from suture.exported import NONE, Opened
from suture.sampling import Settings

COMMANDS = {
    "/domain": "NAME: whose correction acts from now on; also `auto` (the router) and `none` (uncorrected)",
    "/compare": "the last answer (before any: the next one) corrected and uncorrected, side by side",
    "/system": "TEXT: the system message; `none` takes it away",
    "/reset": "forget the conversation",
    "/help": "these lines",
    "/quit": "leave, as Ctrl-D does; Ctrl-C stops an answer",
}


@dataclass
class Turn:
    """A message and its answer."""

    user: str
    answer: str
    domain: str | None
    tokens: int


@dataclass
class Conversation:
    """A model, what was said, and who speaks.

    Args:
        domain: as in `Export`; `system`: the system message, or None.
        say: called with a line about the conversation itself.
    """

    opened: Opened
    domain: str | None
    system: str | None = None
    settings: Settings = field(default_factory=Settings)
    say: Callable[[str], None] = print
    turns: list[Turn] = field(default_factory=list)
    comparing: bool = False

    def __post_init__(self) -> None:
        from transformers import GenerationConfig

        model = self.opened.model
        self.ends = sorted(end_tokens(model))
        self.limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.templated = bool(getattr(self.opened.tokenizer, "chat_template", None))
        model.generation_config = GenerationConfig()  # what a call leaves open comes from there
        if not self.templated:
            self.say("the tokenizer has no chat template: the model goes on from all text so far, line after line")
        if self.domain is None and len(self.opened.export.words) > 1:
            self.say(f"uncorrected; choose with /domain {' | '.join(self.opened.export.words)}")

    @property
    def shown(self) -> str:
        """The domain as users write it."""
        return NONE if self.domain is None else self.domain

    def answer(self, text: str, stream: Callable[[str], None] | None = None) -> Turn:
        """Answer a message and keep both.

        Raises:
            PromptError: for a message that is too long, or that the chat template refuses.
        """
        ids = self._fitting(text)
        turn = self._write(text, ids, self.domain, stream)
        self.turns.append(turn)
        return turn

    def compare(self) -> tuple[Turn, Turn]:
        """The last message answered with a correction and without; the history keeps the answer it has.

        Raises:
            SutureError: before any message, where there is nothing to switch, and where no domain is chosen.
        """
        export = self.opened.export
        if export.fixed:
            raise ModelError(f"a {export.kind} export holds the corrected model only: there is nothing to compare with")
        last = self.turns[-1] if self.turns else None
        if last is None:
            raise PromptError("there is nothing to compare yet")
        domain = last.domain if last.domain is not None else self.domain
        if domain is None:
            raise ModelError(f"choose a domain first: /domain {' | '.join(export.words)}")
        self.turns.pop()
        try:
            ids = self._fitting(last.user)
            pair = [last if each == last.domain else self._write(last.user, ids, each, None) for each in (domain, None)]
        finally:
            self.turns.append(last)
        return pair[0], pair[1]

    def command(self, line: str) -> bool:
        """Carry out a slash command other than `/compare`; False for one that ends the conversation.

        Raises:
            SutureError: for a command or domain that is not known.
        """
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/quit":
            return False
        if name == "/help":
            self.say("\n".join(f"{name:<10}{what}" for name, what in COMMANDS.items()))
        elif name == "/reset":
            self.turns.clear()
            self.say("forgotten")
        elif name == "/domain":
            if rest:
                self.domain = self.opened.export.parse(rest)
            self.say(f"domain: {self.shown}" + ("" if rest else f" (of {', '.join(self.opened.export.words)})"))
        elif name == "/system":
            if rest:
                self.system = None if rest == NONE else rest
            self.say(f"system: {self.system or NONE}")
        else:
            raise SutureError(f"unknown command {name!r}; {did_you_mean(name, COMMANDS)} (a message: start it with //)")
        return True

    def _fitting(self, text: str) -> list[int]:
        """Token ids of the conversation up to an answer; the oldest turns go where the model has no place for them."""
        ids = self._ids(text)
        if self.limit is None:
            return ids
        # half of the places at most are kept free for the answer
        most = self.limit - min(self.settings.max_new_tokens, self.limit // 2)
        dropped = 0
        while len(ids) > most and self.turns:
            self.turns.pop(0)
            dropped += 1
            ids = self._ids(text)
        if dropped:
            self.say(f"the model has {self.limit} positions: forgot the oldest {dropped} of the conversation's turns")
        if len(ids) >= self.limit:
            raise PromptError(f"the message takes {len(ids)} tokens, the model has {self.limit} positions: shorten it")
        return ids

    def _ids(self, text: str) -> list[int]:
        tokenizer = self.opened.tokenizer
        if not self.templated:
            before = [self.system] if self.system else []
            said = [turn.user + turn.answer for turn in self.turns]
            return list(tokenizer("\n".join([*before, *said, text])).input_ids)
        from jinja2 import TemplateError

        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.answer}]
        messages.append({"role": "user", "content": text})
        try:
            whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:  # templates refuse what they do not know, often a system message
            raise PromptError(f"the chat template refuses these messages: {error}") from error
        return list(tokenizer(whole, add_special_tokens=False).input_ids)

    def _write(self, text: str, ids: list[int], domain: str | None, stream: Callable[[str], None] | None) -> Turn:
        """Generate from token ids; Ctrl-C ends the answer where it is."""
        from transformers import GenerationConfig

        if not ids:
            raise PromptError(f"the tokenizer makes no tokens of {text[:60]!r}")
        settings, room = self.settings, self.settings.max_new_tokens
        if self.limit is not None:
            room = min(room, self.limit - len(ids))
        config = GenerationConfig(
            max_new_tokens=room, eos_token_id=self.ends or None, pad_token_id=0, **settings.choice
        )
        prompt = torch.tensor([ids], device=self.opened.model.device)  # [1, T]
        torch.manual_seed(settings.seed)
        with interruptible() as stop, torch.inference_mode():
            out = self.opened.generate(
                prompt,
                domain=domain,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                streamer=_streamer(self.opened.tokenizer, stream) if stream else None,
                stopping_criteria=[stop],
            )
        written = out[0, len(ids) :]
        return Turn(text, self.opened.tokenizer.decode(written, skip_special_tokens=True), domain, len(written))


@contextmanager
def interruptible() -> Iterator[Callable[..., Any]]:
    """Yields a stopping criterion that is met after Ctrl-C; a second Ctrl-C is a KeyboardInterrupt as ever."""
    pressed = threading.Event()

    def press(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pressed.set()

    def stop(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.full((len(ids),), pressed.is_set(), device=ids.device)  # [B]

    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        yield stop
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _streamer(tokenizer: Any, stream: Callable[[str], None]) -> Any:
    from transformers.generation.streamers import BaseStreamer

    class Streamer(BaseStreamer):  # type: ignore[misc]
        """Hands on what each token adds to the text, without waiting for the end of the word."""

        def __init__(self) -> None:
            self.ids: list[int] | None = None
            self.told = 0

        def put(self, value: torch.Tensor) -> None:
            if self.ids is None:  # the prompt comes first
                self.ids = []
                return
            self.ids += value.tolist()
            self.tell(tokenizer.decode(self.ids, skip_special_tokens=True))

        def tell(self, text: str, whole: bool = False) -> None:
            if len(text) > self.told and (whole or not text.endswith("\ufffd")):  # half of a character
                stream(text[self.told :])
                self.told = len(text)

        def end(self) -> None:
            self.tell(tokenizer.decode(self.ids or [], skip_special_tokens=True), whole=True)

    return Streamer()
