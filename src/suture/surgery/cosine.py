"""Content, and an offset by position made of a few cosines: smooth, and at hand for positions that no text reached."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from suture.surgery.base import Content, Surgery


class Cosine(Surgery):
    """h - c(h) - sum_k cos(pi k u_t) w_k, with u_t = log(1 + t) / log T_max up to 1. 2 r H + waves H parameters.

    Args:
        hidden, rank: as in `Surgery`.
        t_max: the offset is the same at T_max - 1 and at all later positions.
        waves: cosines, k = 0 ... waves - 1; their weights start at zero.
    """

    own = ("waves",)
    extrapolates = True

    def __init__(self, hidden: int, rank: int = 16, t_max: int = 512, waves: int = 8) -> None:
        super().__init__(hidden, rank, t_max)
        self.waves = waves
        self.content = Content(hidden, rank)
        self.weights = nn.Parameter(torch.zeros(waves, hidden))

    def features(self, positions: Tensor) -> Tensor:
        """cos(pi k u_t), [..., waves] at positions [...], each between -1 and 1.

        In log t, because states change most at the first positions: each half wave of the last cosine spans the same
        ratio of positions, not the same number. Every cosine has slope 0 where u reaches 1, so that stopping u there
        joins a constant without a step or a kink, and nothing that was fitted to short texts grows on long ones.
        Polynomials would grow, and plain waves of t go on oscillating where no token holds them.
        """
        phase = positions.clamp_min(0).float().log1p() / math.log(max(self.t_max, 2))  # [...]
        orders = torch.arange(self.waves, device=positions.device)  # [waves]
        return torch.cos(math.pi * phase.clamp_max(1).unsqueeze(-1) * orders)

    def correction(self, states: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.content(states) + self.features(positions) @ self.weights
        return out
