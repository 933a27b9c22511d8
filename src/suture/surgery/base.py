"""What every surgery module is: a correction subtracted from final hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Surgery(nn.Module):
    """h - strength x correction(h, positions); a new module corrects nothing.

    Args:
        hidden: H, width of the states.
        rank: r, width of the content bottleneck.
        t_max: rows of a position table, where the module has one.
    """

    solved_by: frozenset[str] = frozenset()  # losses that calibration minimises in closed form
    own: tuple[str, ...] = ()  # settings that only this module has: arguments and attributes of these names
    offset_table = False  # whether it has a table whose rows are subtracted as they are: `offsets`
    extrapolates = False  # whether the term by position goes on past T_max

    def __init__(self, hidden: int, rank: int = 16, t_max: int = 512) -> None:
        super().__init__()
        self.hidden, self.rank, self.t_max = hidden, rank, t_max
        self.strength = 1.0  # chosen on held-back prompts; 0 leaves every state as it is

    def correction(self, states: Tensor, positions: Tensor) -> Tensor:
        """What to subtract, [..., H], at states [..., H] and positions [...] (from each sequence's first token)."""
        raise NotImplementedError

    def forward(self, states: Tensor, positions: Tensor) -> Tensor:
        """Corrected states, [..., H], in the dtype they came in; the correction itself is computed in float32."""
        correction = self.correction(states.float(), positions)
        # at full strength nothing is multiplied: the bits are those of the module alone
        return (states.float() - (correction if self.strength == 1 else self.strength * correction)).to(states.dtype)

    def offsets(self) -> Tensor:
        """What is subtracted at each position whatever the state, [T_max, H]; with `offset_table` alone."""
        raise NotImplementedError

    def parameter_count(self) -> int:
        """Numbers that the module adds to a model."""
        return sum(parameter.numel() for parameter in self.parameters())


class Content(nn.Module):
    """c(h) = W_up ReLU(W_down h) (Eq. 3). W_up starts at zero, W_down as nn.Linear does."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden, rank, bias=False)  # [r, H]
        self.up = nn.Linear(rank, hidden, bias=False)  # [H, r]
        nn.init.zeros_(self.up.weight)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.up(torch.relu(self.down(states)))  # [..., H]
        return out


class PositionTable(nn.Module):
    """A row for each position below T_max, and zero from there on."""

    def __init__(self, t_max: int, hidden: int, spread: float = 0.0) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(t_max, hidden) * spread if spread else torch.zeros(t_max, hidden))

    def forward(self, positions: Tensor) -> Tensor:
        """[...] positions → [..., H]."""
        size = len(self.rows)
        inside = (positions >= 0) & (positions < size)
        # embedding, unlike indexing, adds gradients up in a fixed order
        found = nn.functional.embedding(positions.clamp(0, size - 1), self.rows)
        return found * inside.unsqueeze(-1)
