"""Corrections that a recipe asks for: a module, what it is fitted on, and how. Plain settings; nothing is computed."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LAYERED = {
    "deep": "low-rank changes of the linears that write to the residual stream, one domain, in closed form",
    "heal": "changes of the same linears for all domains at once, folded into one plain checkpoint",
    "svd": "baseline: target - merged at low rank, without data",
    "asvd": "baseline: the same, nearest in what the linears do on the calibration text",
    "distil": "baseline: a LoRA trained by gradients to the target's distributions",
}
AUTO = "auto"
OWN_LOSS = {"standard": "l1", "affine": "l2", "linear": "l2"}  # the others' is ewl1
GATED = "responses"  # the text that a gate looks at, whatever a correction was fitted on
BUDGET = 0.001  # of the model's parameters, the paper's
DISTIL_STEPS = 50


class Strict(BaseModel):
    """A part of the recipe; keys that it does not know are errors."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Surgery(Strict):
    """One correction to fit: a module, and how. The numbers that the paper has are the defaults."""

    name: str | None = Field(
        None,
        description="How tables and `--surgery` call it; by default the module, with `-<loss>` where that is not the "
        "module's own or the module is `standard`, and `-prompts` where it is calibrated on those.",
    )
    module: str = Field("darts", description="`suture list modules` names them.")
    loss: str | None = Field(
        None,
        description="`suture list losses` names them; by default the module's own: `l1` for `standard`, `l2` for "
        "`affine` and `linear`, `ewl1` for the others. What acts inside the layers has none to choose.",
    )
    rank: int | None = Field(
        None,
        ge=1,
        description="Width r of the content bottleneck, 16 by default. Inside the layers the mean rank of the changes; "
        "there `budget` is the default, and full rank for `heal`.",
    )
    budget: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Inside the layers, instead of `rank`: parameters of the changes over those of the model, 0.001 by "
        "default. For `auto` the most that a choice may have, without limit by default.",
    )
    linears: list[str] | None = Field(
        None,
        min_length=1,
        description="For `deep` and `heal`: last names of the linears to change, for example `[o_proj, down_proj]`; "
        "all by default.",
    )
    engine: Literal["anything", "adapter", "plain"] = Field(
        "anything",
        description="For `auto`: what the choice must fit. `adapter` is a LoRA, `plain` a checkpoint that needs no "
        "code of its own.",
    )
    among: list[str] | None = Field(
        None,
        min_length=1,
        description="For `auto`: modules to choose from; by default `standard`, `darts`, `affine`, `cosine` and `deep` "
        "where anything can run, `linear` and `deep` for the other engines.",
    )
    gate: bool = Field(
        True,
        description="Hold a fifth of the calibration prompts back, and choose a strength between 0 and 1 there by KL: "
        "where nothing helps, the domain stays uncorrected. `--no-gate` turns it off everywhere, except for `auto`, "
        "which chooses on those prompts.",
    )
    t_max: int = Field(
        512,
        alias="T_max",
        ge=1,
        description="Rows of the position table; later positions get no position term. For `cosine` the position from "
        "which its term is constant.",
    )
    waves: int = Field(8, ge=1, description="Cosines of position, for `cosine`.")
    steps: int | None = Field(
        None, ge=1, description="Optimiser steps (Adam, betas 0.9 and 0.999); 500 by default, 50 for `distil`."
    )
    lr: float = Field(1e-3, gt=0, allow_inf_nan=False, description="Learning rate.")
    batch: int = Field(8, ge=1, description="Prompts a step.")
    seed: int = Field(0, ge=0, description="Order of the calibration prompts and start of the weights.")
    samples: int = Field(50, ge=1, description="Calibration prompts.")
    calibrate_on: Literal["prompts", "responses"] = Field(
        "responses",
        description="With `responses` the target first continues its prompts, and all of that text counts; `prompts` "
        "is the paper's protocol.",
    )
    smooth: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of squared jumps between neighbouring rows of the position table of `darts`; 0 is off.",
    )
    shrink: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the squares of the position table of `darts`; 0 is off.",
    )
    start: Literal["zero", "median"] = Field(
        "zero",
        description="Where the position table of `darts` starts; `median` is its closed form for L1 without content.",
    )
    entropy_power: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="Exponent of the entropies that weight tokens in `ewl1` and `ewl2`; 0 weights all alike.",
    )
    entropy_floor: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="Entropies below it count as this much there, in nats."
    )
    early_stopping: bool = Field(
        False, description="Keep the weights of the step with the least loss on prompts that are held back for that."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="How the module is stored; it trains in float32."
    )

    @model_validator(mode="after")
    def _resolved(self) -> Surgery:
        if self.inside or self.module == AUTO:
            if self.loss is not None:
                raise ValueError(f"loss: {self.module} has none to choose: leave it out")
            if self.early_stopping or self.smooth or self.shrink or self.start != "zero":
                raise ValueError(f"early_stopping, smooth, shrink and start are not for {self.module}: leave them out")
        elif self.budget is not None:
            raise ValueError(f"budget: the size of {self.module} follows from its rank: leave budget out")
        if self.linears is not None and self.module not in ("deep", "heal"):
            raise ValueError("linears are for deep and heal")
        if self.rank is not None and self.budget is not None:
            raise ValueError("give either rank or budget")
        if self.module != AUTO and (self.engine != "anything" or self.among is not None):
            raise ValueError("engine and among are for module: auto")
        if self.module == AUTO:
            if self.rank is not None:
                raise ValueError("rank: auto chooses it; give a budget")
            if self.samples < 2:
                raise ValueError("samples: auto chooses on prompts that are held back: give 2 or more")
            if AUTO in (self.among or []) or "heal" in (self.among or []):
                raise ValueError("among: auto and heal are no choices for one domain")
            return self
        if not self.inside:
            self.loss = self.loss or OWN_LOSS.get(self.module, "ewl1")
            self.rank = self.rank or 16
        elif self.module != "heal" and self.rank is None:
            self.budget = self.budget or BUDGET
        if self.steps is None:
            self.steps = DISTIL_STEPS if self.module == "distil" else 500
        return self

    @property
    def inside(self) -> bool:
        """Whether it acts inside the layers; else on the final hidden states."""
        return self.module in LAYERED

    @property
    def label(self) -> str:
        """The name in tables: `darts`, `standard-l1`, `deep`, …"""
        if self.name:
            return self.name
        short = self.loss is None or (self.loss == OWN_LOSS.get(self.module, "ewl1") and self.module != "standard")
        base = self.module if short else f"{self.module}-{self.loss}"
        return base if self.calibrate_on == "responses" else f"{base}-prompts"

    @property
    def split(self) -> str:
        """Which captured text it is fitted on: `calibration` (the prompts alone) or `responses`."""
        return "calibration" if self.calibrate_on == "prompts" else "responses"

    @property
    def splits(self) -> set[str]:
        """Which captured text it needs: what it is fitted on, and what its gate looks at."""
        return {self.split, GATED} if self.gate or self.module == AUTO else {self.split}
