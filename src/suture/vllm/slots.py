"""Which domain each request of vLLM's batch asked for, and from that which domain corrects each token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

KEY = "suture_domain"  # in SamplingParams.extra_args, in a server's vllm_xargs, and the default in config.json
ROUTED = "suture_routed"
DOMAINS = "Domains_"  # start of the name of the class that follows vLLM's batch; the rest says the domains
UNCORRECTED, UNROUTED = -1, -2


def index_of(value: Any, domains: Sequence[str], router: bool) -> int:
    """A domain's index; UNCORRECTED for None or "none" (a server takes no null in `vllm_xargs`), UNROUTED for "auto".

    Raises:
        ValueError: for a name that the checkpoint does not have, with those it has.
    """
    if value in domains:
        return list(domains).index(value)
    if value is None or value == "none":
        return UNCORRECTED
    if value == "auto":
        if not router:
            raise ValueError(f"{KEY} is 'auto', but this checkpoint has no router; known: {', '.join(domains)}")
        return UNROUTED
    known = [*domains, *(["auto"] if router else []), "none"]
    raise ValueError(f"{KEY} is {value!r}, unknown in this checkpoint; known: {', '.join(known)}")


class Slots:
    """A row for each place in vLLM's batch. The tensors are written in place: a captured graph may hold them.

    Args:
        size: places in the batch.
        default: of a request that names no domain.
        router: whether "auto" can be asked for.
    """

    def __init__(
        self, size: int, domains: Sequence[str], default: str | None, router: bool, device: torch.device | str
    ) -> None:
        self.domains, self.default, self.router = list(domains), default, router
        index_of(default, self.domains, router)  # a wrong default shows at the start
        self.wanted = torch.full((size,), UNCORRECTED, dtype=torch.long, device=device)  # [size] domain's index
        self.ends = torch.zeros(size, dtype=torch.long, device=device)  # [size] position of the prompt's last token
        self.routing: dict[int, Any] = {}  # place → sampling parameters of a request that asked for "auto"

    def update(
        self,
        removed: Iterable[int],
        added: Iterable[tuple[int, Any, Sequence[int] | None, Any]],
        moved: Iterable[tuple[int, int, Any]],
    ) -> None:
        """Follow a change of the batch, in the order that vLLM prescribes: requests that left, came, changed places."""
        for place in removed:
            self._leave(place)
        for place, params, prompt, _ in added:
            self._leave(place)
            given = params.extra_args or {}
            index = index_of(given.get(KEY, self.default), self.domains, self.router)
            if index == UNROUTED:
                self.routing[place] = params
                self.ends[place] = len(prompt or ()) - 1
                index = given.get(ROUTED, UNROUTED)
            self.wanted[place] = index
        for one, two, direction in moved:
            if direction.name == "SWAP":
                self._swap(one, two)
            else:
                self._leave(two)
                self._swap(one, two)
                self._leave(one)

    def _leave(self, place: int) -> None:
        params = self.routing.pop(place, None)
        index = int(self.wanted[place]) if params is not None else UNROUTED
        if params is not None and index != UNROUTED:
            # a preempted request comes back with the same parameters, its prompt's states perhaps in the prefix cache
            params.extra_args = {**(params.extra_args or {}), ROUTED: index}
        self.wanted[place] = UNCORRECTED

    def _swap(self, one: int, two: int) -> None:
        for tensor in (self.wanted, self.ends):
            tensor[[one, two]] = tensor[[two, one]]
        held = {two: self.routing.pop(one, None), one: self.routing.pop(two, None)}
        self.routing |= {place: params for place, params in held.items() if params is not None}

    def of_tokens(self, states: Tensor, positions: Tensor, starts: Tensor, router: nn.Module | None) -> Tensor:
        """[T] domain's index of each token, negative where nothing is to be corrected.

        "auto" is settled in the step that reads the prompt's last token, and holds from that step on.

        Args:
            states: [T, H] raw.
            positions: [T] from each request's first token.
            starts: [n + 1] where each request's tokens start among the T, and where the last's end.
        """
        starts = starts[: len(self.wanted) + 1]
        count, total = len(starts) - 1, len(states)
        places = torch.arange(total, device=states.device, dtype=starts.dtype)
        request = torch.bucketize(places, starts[1:].contiguous(), right=True).clamp_max(count - 1)  # [T]
        if router is not None:
            last = (starts[1:].long() - 1).clamp(0, total - 1)  # [n]
            found = router(states[last].float())  # [n]
            due = (self.wanted[:count] == UNROUTED) & (positions[last] >= self.ends[:count])
            self.wanted[:count] = torch.where(due, found, self.wanted[:count])
        return self.wanted[request]
