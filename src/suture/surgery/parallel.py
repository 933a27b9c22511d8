"""The paper's Parallel variant (Table 11): one bottleneck for content, another for position."""

from __future__ import annotations

from torch import Tensor

from suture.surgery.base import Content, PositionTable, Surgery

SPREAD = 0.02  # of the embedding's start: at zero the second bottleneck would never get a gradient


class Parallel(Surgery):
    """h - c(h) - c'(e_t). 4 r H + T_max H parameters."""

    def __init__(self, hidden: int, rank: int = 16, t_max: int = 512) -> None:
        super().__init__(hidden, rank, t_max)
        self.content = Content(hidden, rank)
        self.position = Content(hidden, rank)
        self.table = PositionTable(t_max, hidden, SPREAD)

    def correction(self, states: Tensor, positions: Tensor) -> Tensor:
        # a zero row from the table past T_max gives a zero correction: the bottleneck has no bias terms
        out: Tensor = self.content(states) + self.position(self.table(positions))
        return out
