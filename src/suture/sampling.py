"""How tokens are chosen when text is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """At most so many tokens; a temperature of 0 is greedy."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    @property
    def choice(self) -> dict[str, Any]:
        """As transformers' `GenerationConfig` takes it."""
        if self.temperature > 0:
            return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return {"do_sample": False}
