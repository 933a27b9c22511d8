"""An affine correction: linear in the state, so that it can be solved for and folded into a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from suture.surgery.base import Surgery


class Affine(Surgery):
    """h - (A B h + b): any rank up to H. 2 r H + H parameters; squared losses are solved in closed form."""

    solved_by = frozenset({"l2", "ewl2"})
    offset = True  # whether a constant is subtracted too

    def __init__(self, hidden: int, rank: int = 16, t_max: int = 512) -> None:
        super().__init__(hidden, rank, t_max)
        self.down = nn.Linear(hidden, rank, bias=False)  # B [r, H]
        self.up = nn.Linear(rank, hidden, bias=self.offset)  # A [H, r], b [H]
        nn.init.zeros_(self.up.weight)
        if self.offset:
            nn.init.zeros_(self.up.bias)

    def correction(self, states: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.up(self.down(states))
        return out

    @classmethod
    def of(cls, down: Tensor, up: Tensor, offset: Tensor) -> Affine:
        """From B [r, H], A [H, r] and b [H], of which a module without a constant has none."""
        rank, hidden = down.shape
        module = cls(hidden, rank)
        with torch.no_grad():
            module.down.weight.copy_(down)
            module.up.weight.copy_(up)
            if module.offset:
                module.up.bias.copy_(offset)
        return module
