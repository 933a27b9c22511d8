"""A linear correction without a constant: it folds into any head, and is a LoRA on it."""

from __future__ import annotations

from suture.surgery.affine import Affine


class Linear(Affine):
    """h - A B h: any rank up to H. 2 r H parameters; squared losses are solved in closed form."""

    offset = False
