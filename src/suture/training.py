"""Training of a surgery module: Adam on minibatches of whole prompts, flat over their tokens.

Padding does not exist here, so none is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from suture.errors import SurgeryError
from suture.losses import Batch, Decode, get_loss
from suture.progress import Progress
from suture.states import HiddenCache
from suture.surgery import Surgery
from suture.table import Prior

LOOKS = 20  # at validation prompts, in one training


@dataclass(frozen=True)
class Heads:
    """Heads of the merged model and of the target, for losses that read logits."""

    merged: Decode | None
    target: Decode | None


@dataclass(frozen=True)
class Criterion:
    """A loss by its name, and what it reads beside states."""

    loss: str
    heads: Heads
    entropy_power: float
    entropy_floor: float


class Text:
    """States of both models on one text, ready for a loss.

    Args:
        merged, target: states on the same tokens, on the device to train on.
        criterion: the loss to measure.
    """

    def __init__(self, merged: HiddenCache, target: HiddenCache, criterion: Criterion) -> None:
        self.given, self.wanted = merged.states.float(), target.states.float()  # [N, H] each
        self.positions = merged.tokens.positions.to(self.given.device)  # [N]
        self.entropy = target.entropy  # [N]
        self.lengths: list[int] = merged.tokens.lengths.tolist()
        self.criterion = criterion

    def loss(self, surgery: Surgery, rows: Tensor) -> Tensor:
        """The loss on some of the tokens, by their indices [n]."""
        criterion = self.criterion
        corrected = surgery(self.given[rows], self.positions[rows])  # [n, H]
        batch = Batch(
            self.wanted[rows],
            self.entropy[rows] if self.entropy is not None else None,
            criterion.heads.merged,
            criterion.heads.target,
            criterion.entropy_power,
            criterion.entropy_floor,
        )
        return get_loss(criterion.loss)(corrected, batch)


class EarlyStopping:
    """Keeps the weights with the least loss on a text that is not trained on.

    Args:
        text: the text.
        steps: of the training; the loss is measured before the first, every max(1, steps // 20), and after the last.

    Attributes:
        losses: on all tokens of the text, by step.
        best: the step whose weights are kept, the earliest of equals.
    """

    def __init__(self, text: Text, steps: int) -> None:
        self.text, self.steps = text, steps
        self.losses: dict[int, float] = {}
        self.best = 0
        self.kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def look(self, surgery: Surgery, step: int) -> None:
        """Measure, if it is time to."""
        if step % max(1, self.steps // LOOKS) and step != self.steps:
            return
        everything = torch.arange(len(self.text.given), device=self.text.given.device)  # [N]
        self.losses[step] = float(self.text.loss(surgery, everything))
        if step == 0 or self.losses[step] < self.losses[self.best]:
            self.best = step
            self.kept = {name: tensor.clone() for name, tensor in surgery.state_dict().items()}

    def restore(self, surgery: Surgery) -> None:
        """Give the module its best weights back."""
        surgery.load_state_dict(self.kept)


def train(
    surgery: Surgery,
    text: Text,
    *,
    steps: int,
    lr: float,
    batch: int,
    seed: int,
    prior: Prior | None = None,
    stopping: EarlyStopping | None = None,
    progress: Progress,
    stage: str,
) -> list[float]:
    """Adam with betas (0.9, 0.999) in float32; the loss of each step, without the prior.

    Args:
        surgery: trained in place.
        text: what to train on.
        steps, lr, batch, seed: as in the recipe.
        prior: of the module's position table, added to the loss.
        stopping: measures as training goes on, and has the last word on the weights.

    Raises:
        SurgeryError: for a loss that is no longer finite.
    """
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(surgery.parameters(), lr=lr, betas=(0.9, 0.999))
    spans = torch.split(torch.arange(len(text.given), device=text.given.device), text.lengths)
    queue: list[int] = []
    history: list[Tensor] = []
    if stopping is not None:
        stopping.look(surgery, 0)
    with progress.stage(stage, steps) as advance:
        for step in range(1, steps + 1):
            while len(queue) < batch:
                queue += torch.randperm(len(spans), generator=generator).tolist()
            chosen, queue = queue[:batch], queue[batch:]
            rows = torch.cat([spans[index] for index in chosen])  # [n] tokens of these prompts
            value = text.loss(surgery, rows)
            total = value if prior is None else value + prior(surgery.offsets())
            optimiser.zero_grad(set_to_none=True)
            total.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            if prior is not None:
                prior.settle(surgery.offsets())
            history.append(value.detach())
            if stopping is not None:
                stopping.look(surgery, step)
            advance(1)
    curve = torch.stack(history)
    if not bool(torch.isfinite(curve).all()):
        step = int((~torch.isfinite(curve)).nonzero()[0, 0])
        raise SurgeryError(
            f"training by {text.criterion.loss} diverged at step {step + 1} of {steps}: lower surgery.lr ({lr:g})"
        )
    if stopping is not None:
        stopping.restore(surgery)
    return [float(value) for value in curve]
