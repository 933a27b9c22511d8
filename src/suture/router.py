"""Which domain a prompt is of, by the merged model's final hidden state at its last token; or none. Tensors only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from suture.errors import SurgeryError

LEAST = 3  # prompts a domain: one is left out, and two are needed for a spread
FOLDS = 10
SHRINKAGES = (0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
DEVIATIONS = 2.5  # standard deviations from what is usual
HARM = 2.0  # what a wrong correction costs, where a right one gains 1
LEAST_DISTANCE = 1e-3  # prompts that all end alike have none between them: what rounding may add
LEAST_SPREAD = 1e-6  # of a coordinate, as a share of the mean square of all


class Router(nn.Module):
    """states → domain: the nearest centre in scaled coordinates, or -1 where none is near; a new one always gives -1.

    The distance of a state to a centre is the mean square of (state - centre) * scale. A router abstains where it is
    above the domain's limit, and where the next domain is nearly as near. Everything is computed in float32.

    Args:
        hidden: H, width of the states.
        count: K, how many domains.
    """

    def __init__(self, hidden: int, count: int) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(count, hidden), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(hidden), requires_grad=False)  # 1 / spread within domains
        self.limits = nn.Parameter(torch.zeros(count), requires_grad=False)
        self.margin = nn.Parameter(torch.zeros(1), requires_grad=False)

    def distances(self, states: Tensor) -> Tensor:
        """[n, K] distance of each of [n, H] states to each domain's centre; about 1 for states of the domain."""
        moved = (states.float()[:, None] - self.centres.float()) * self.scale.float()  # [n, K, H]
        return moved.pow(2).mean(-1)

    def margins(self, states: Tensor) -> Tensor:
        """[n] log of the second nearest domain's distance over the nearest's; infinite where there is one domain."""
        found = self.distances(states)
        if found.shape[1] == 1:
            return torch.full_like(found[:, 0], float("inf"))
        near = found.topk(2, dim=-1, largest=False).values  # [n, 2]
        return near[:, 1].log() - near[:, 0].log()

    def forward(self, states: Tensor) -> Tensor:
        """[n] index of the domain of each of [n, H] states; -1 abstains."""
        nearest, index = self.distances(states).min(-1)  # [n]
        sure = (nearest < self.limits.float()[index]) & (self.margins(states) > self.margin.float())
        return torch.where(sure, index, -1)


def fit_router(states: Sequence[Tensor]) -> Router:
    """A router between K domains, from [n_k, H] states at the ends of each one's calibration prompts.

    How much the spread of single coordinates is shrunk to their mean, and beyond which distance and below which margin
    it abstains, is chosen on prompts that are left out in turn. Its numbers survive storage in bfloat16 unchanged.

    Raises:
        SurgeryError: for no domains, a domain of fewer than 3 prompts, or states of different width.
    """
    if not states or min(len(each) for each in states) < LEAST:
        raise SurgeryError(f"a router needs {LEAST} or more calibration prompts of each domain: raise surgery.samples")
    if len({each.shape[1] for each in states}) > 1:
        raise SurgeryError("the states of the domains differ in width: they are of different models")
    kept = [each.detach().float().cpu() for each in states]
    shrinkage = min(SHRINKAGES, key=lambda each: _left_out(kept, each, _surprise).mean())
    router = _fit(kept, shrinkage)
    distances = _left_out(kept, shrinkage, Router.distances)  # [N, K]
    owner = torch.repeat_interleave(torch.arange(len(kept)), torch.tensor([len(each) for each in kept]))  # [N]
    logs = distances.clamp_min(LEAST_DISTANCE).log()
    own = logs.gather(1, owner[:, None])[:, 0]  # [N]
    means = torch.stack([own[owner == index].mean() for index in range(len(kept))])  # [K]
    # one spread for all: few prompts a domain say little about their own
    spread = ((own - means[owner]).pow(2).sum() / max(len(own) - len(kept), 1)).sqrt()
    router.limits.copy_(_round((means + DEVIATIONS * spread).exp()))
    if len(kept) > 1:
        router.margin.copy_(_round(_margin(logs, owner)))
    return router


def _fit(states: Sequence[Tensor], shrinkage: float) -> Router:
    """Centres and scale."""
    router = Router(states[0].shape[1], len(states))
    router.centres.copy_(_round(torch.stack([each.mean(0) for each in states])))
    inside = torch.cat([each - each.mean(0) for each in states])  # [N, H]
    spread = inside.pow(2).sum(0) / (len(inside) - len(states))  # [H]
    spread = (1 - shrinkage) * spread + shrinkage * spread.mean()
    least = LEAST_SPREAD * torch.cat(list(states)).pow(2).mean()
    router.scale.copy_(_round(spread.clamp_min(least.clamp_min(LEAST_SPREAD)).rsqrt()))
    return router


def _round(values: Tensor) -> Tensor:
    """To what bfloat16 can hold: limits are measured with the numbers that are stored."""
    return values.bfloat16().float()


def _left_out(states: Sequence[Tensor], shrinkage: float, what: Callable[[Router, Tensor], Tensor]) -> Tensor:
    """[N, K] of `what` at every state, under a router that is fitted without the state's fold."""
    folds = [torch.arange(len(each)) % min(FOLDS, len(each)) for each in states]
    found = [torch.empty(len(each), len(states)) for each in states]
    for fold in range(max(int(each.max()) for each in folds) + 1):
        router = _fit([each[of != fold] for each, of in zip(states, folds, strict=True)], shrinkage)
        for index, (each, of) in enumerate(zip(states, folds, strict=True)):
            if bool((of == fold).any()):
                found[index][of == fold] = what(router, each[of == fold])
    return torch.cat(found)


def _surprise(router: Router, states: Tensor) -> Tensor:
    """[n, K] twice the negative log-density of a normal distribution around each centre, a coordinate's mean."""
    return router.distances(states) - 2 * router.scale.log().mean()


def _margin(logs: Tensor, owner: Tensor) -> Tensor:
    """What `margins` must exceed, from [N, K] log distances of left-out states and [N] their domains.

    The usual margin less DEVIATIONS standard deviations; or more, where that gives the most prompts that are routed
    right, less HARM times those that are routed wrong.
    """
    near = logs.topk(2, dim=-1, largest=False)  # [N, 2]
    margins, right = near.values[:, 1] - near.values[:, 0], near.indices[:, 0] == owner
    signed = torch.where(right, margins, -margins)
    usual = (signed.mean() - DEVIATIONS * signed.std()).clamp_min(0)
    worth = torch.where(right, 1.0, -HARM)
    tried = torch.cat([torch.zeros(1), margins[~right].sort().values])
    gains = torch.stack([worth[margins > each].sum() for each in tried])
    return torch.maximum(usual, tried[gains.argmax()])
