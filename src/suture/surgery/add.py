"""The paper's Add variant (Table 11): position changes which content directions act."""

from __future__ import annotations

from torch import Tensor

from suture.surgery.base import Content, PositionTable, Surgery


class Add(Surgery):
    """h - c(h + e_t). 2 r H + T_max H parameters; e starts at zero."""

    def __init__(self, hidden: int, rank: int = 16, t_max: int = 512) -> None:
        super().__init__(hidden, rank, t_max)
        self.content = Content(hidden, rank)
        self.table = PositionTable(t_max, hidden)

    def correction(self, states: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.content(states + self.table(positions))
        return out
