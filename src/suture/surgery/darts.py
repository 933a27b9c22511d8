"""DARTS (arXiv 2608.28547): content and a free offset for each position."""

from __future__ import annotations

from torch import Tensor

from suture.surgery.base import Content, PositionTable, Surgery


class Darts(Surgery):
    """h - c(h) - b_t (Eq. 4). 2 r H + T_max H parameters; the table starts at zero."""

    offset_table = True

    def __init__(self, hidden: int, rank: int = 16, t_max: int = 512) -> None:
        super().__init__(hidden, rank, t_max)
        self.content = Content(hidden, rank)
        self.table = PositionTable(t_max, hidden)

    def correction(self, states: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.content(states) + self.table(positions)
        return out

    def offsets(self) -> Tensor:
        return self.table.rows
