"""Representation surgery as first published (Yang et al., 2024): content only."""

from __future__ import annotations

from torch import Tensor

from suture.surgery.base import Content, Surgery


class Standard(Surgery):
    """h - c(h) (Eq. 3): the same correction at every position. 2 r H parameters."""

    def __init__(self, hidden: int, rank: int = 16, t_max: int = 512) -> None:
        super().__init__(hidden, rank, t_max)
        self.content = Content(hidden, rank)

    def correction(self, states: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.content(states)
        return out
