"""The plugin's own arithmetic, without vLLM; `test_vllm_slow.py` has the rest."""

from __future__ import annotations

import asyncio
import json
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from suture.surgery import MODULES, Surgery, make_surgery
from suture.vllm import model as plugin
from suture.vllm.names import DomainNames, with_domain
from suture.vllm.slots import Slots, index_of

HIDDEN = 8
DOMAINS = ["code", "math"]


class Move(Enum):
    UNIDIRECTIONAL = 1
    SWAP = 2


class Sign(nn.Module):
    """A router that reads the sign of a state's first number: domain 1, domain 0, or none at zero."""

    def forward(self, states: Tensor) -> Tensor:
        first = states[:, 0]  # [n]
        return torch.where(first > 0, 1, torch.where(first < 0, 0, -1))


def params(**extra: Any) -> Any:
    return SimpleNamespace(extra_args=extra or None)


def slots(size: int = 4, default: str | None = None, router: bool = False) -> Slots:
    return Slots(size, DOMAINS, default, router, "cpu")


def random_surgery(name: str, seed: int) -> Surgery:
    generator = torch.Generator().manual_seed(seed)
    module = make_surgery(name, HIDDEN, rank=3, t_max=5).eval().requires_grad_(False)
    for tensor in module.parameters():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    module.strength = 0.5
    return module


def step(found: Slots, counts: list[int], first: list[int], states: Tensor | None = None) -> list[int]:
    """A forward pass: requests read `counts` tokens from position `first` on → domain's index of each token."""
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(start, start + count) for start, count in zip(first, counts, strict=True)])
    states = torch.zeros(sum(counts), HIDDEN) if states is None else states
    return found.of_tokens(states, positions, starts, Sign() if found.router else None).tolist()


def test_a_domain_is_a_known_name_or_an_error_with_the_known_ones() -> None:
    assert [index_of(name, DOMAINS, True) for name in ("code", "math", None, "none", "auto")] == [0, 1, -1, -1, -2]
    with pytest.raises(ValueError, match=r"'cook', unknown in this checkpoint; known: code, math, none"):
        index_of("cook", DOMAINS, False)
    with pytest.raises(ValueError, match="has no router; known: code, math"):
        index_of("auto", DOMAINS, False)
    with pytest.raises(ValueError, match="'cook'"):
        slots(default="cook")


def test_tokens_get_the_domain_of_their_request_while_requests_come_go_and_move() -> None:
    found = slots(default="math")
    ids = [1, 2, 3]
    found.update([], [(0, params(suture_domain="code"), ids, []), (1, params(), ids, [])], [])
    found.update([], [(2, params(suture_domain=None), ids, [])], [])
    assert step(found, [3, 1, 2], [0, 9, 0]) == [0, 0, 0, 1, -1, -1]
    found.update([], [], [(0, 2, Move.SWAP)])
    assert step(found, [1, 1, 1], [0, 0, 0]) == [-1, 1, 0]
    found.update([0], [], [(2, 0, Move.UNIDIRECTIONAL)])
    assert step(found, [1, 2], [0, 0]) == [0, 1, 1]
    found.update([1], [(0, params(suture_domain="math"), ids, [])], [])
    assert step(found, [2], [0]) == [1, 1]
    # a graph's batch is padded: places without tokens, and tokens without a request
    starts = torch.tensor([0, 2, 2, 2], dtype=torch.int32)
    assert found.of_tokens(torch.zeros(4, HIDDEN), torch.zeros(4), starts, None).tolist()[:2] == [1, 1]


def test_a_router_is_asked_at_the_prompts_last_token_and_its_answer_holds() -> None:
    found = slots(router=True)
    state = torch.zeros(4, HIDDEN)
    state[:, 0] = torch.tensor([-1.0, -1.0, -1.0, 1.0])
    asked = params(suture_domain="auto")
    found.update([], [(0, params(suture_domain="code"), [1], []), (1, asked, [1] * 5, [])], [])
    assert step(found, [1, 3], [0, 0], state) == [0, -2, -2, -2]  # a chunk of its prompt
    assert step(found, [1, 2], [1, 3], state[[0, 0, 3]]) == [0, 1, 1]
    assert step(found, [1, 1], [2, 5], -state[[0, 3]]) == [0, 1]
    found.update([1, 0], [(0, asked, [1] * 5, [7])], [])  # preempted: it comes back elsewhere, its prompt in a cache
    assert step(found, [1], [5], -state[3:]) == [1]
    found.update([0], [(0, params(suture_domain="auto"), [1, 1], [])], [])
    assert step(found, [2], [0], state[:2] * 0) == [-1, -1]  # the router abstained


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_is_corrected_by_its_own_module(dtype: torch.dtype) -> None:
    modules = {name: random_surgery(name, seed) for seed, name in enumerate(MODULES)}
    settings = [
        {"module": name, "hidden": HIDDEN, "rank": 3, "t_max": 5, "strength": 0.5}
        | {key: getattr(module, key) for key in module.own}
        for name, module in modules.items()
    ]
    found = plugin.Corrections({"domains": list(modules), "modules": settings, "router": False}, HIDDEN)
    found.load_state_dict(
        {
            f"corrections.{place}.{key}": tensor
            for place, module in enumerate(modules.values())
            for key, tensor in module.state_dict().items()
        }
    )
    states = torch.randn(14, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions, index = torch.arange(14) % 7, torch.arange(14) % 7 - 1
    corrected = found(states, positions, index)
    for place, module in enumerate([None, *modules.values()]):
        chosen = index == place - 1
        wanted = states[chosen] if module is None else module(states[chosen], positions[chosen])
        assert torch.allclose(corrected[chosen], wanted, rtol=1e-5 if dtype == torch.float32 else 1e-2)
    assert corrected.dtype == dtype
    assert all(tensor.dtype == torch.float32 for tensor in found.parameters())


class Base(nn.Module):
    """What a model class of vLLM looks like from outside."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None) -> Tensor:
        return self.scale * input_ids[:, None].float().expand(-1, HIDDEN)

    def load_weights(self, weights: Any) -> set[str]:
        found = dict(weights)
        self.scale.copy_(found["scale"])
        return set(found)


class Config(SimpleNamespace):
    """As vLLM's, it can be referred to weakly."""


def test_a_class_of_vllm_is_corrected_behind_its_forward_and_takes_both_kinds_of_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    surgery = random_surgery("darts", 1)
    entry = {"module": "darts", "hidden": HIDDEN, "rank": 3, "t_max": 5, "strength": 0.5}
    suture = {"format": 1, "domains": ["code"], "modules": [entry], "router": False}
    config = Config(model_config=SimpleNamespace(hf_config=SimpleNamespace(suture=suture, hidden_size=HIDDEN)))
    kind = plugin.corrected_class(Base, "SutureBase", __name__)
    with pytest.raises(RuntimeError, match="without logits processors"):
        kind(vllm_config=config)
    found = Slots(4, ["code"], "code", False, "cpu")
    monkeypatch.setitem(plugin._SLOTS, id(config), found)
    model = kind(vllm_config=config)
    tensors = {f"model.suture.corrections.0.{key}": value for key, value in surgery.state_dict().items()}
    loaded = model.load_weights(iter({**tensors, "scale": torch.tensor(2.0)}.items()))
    assert loaded == set(model.state_dict())

    context = ModuleType("vllm.forward_context")
    metadata: dict[str, Any] = {"layer": SimpleNamespace(query_start_loc=torch.tensor([0, 2, 3], dtype=torch.int32))}
    held = SimpleNamespace(attn_metadata=None)
    context.__dict__.update(get_forward_context=lambda: held, is_forward_context_available=lambda: True)
    monkeypatch.setitem(sys.modules, "vllm.forward_context", context)
    ids, positions = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 4])
    raw = 2.0 * ids[:, None].float().expand(-1, HIDDEN)
    found.update([], [(0, params(), [1, 2], []), (1, params(suture_domain=None), [3], [])], [])
    assert torch.equal(model(ids, positions), raw)  # nothing is said of requests: a dry run
    held.attn_metadata = metadata
    assert torch.allclose(model(ids, positions)[:2], surgery(raw[:2], positions[:2]), rtol=1e-5)
    assert torch.equal(model(ids, positions)[2], raw[2])
    held.attn_metadata = {"layer": SimpleNamespace()}
    with pytest.raises(RuntimeError, match="choose another attention backend"):
        model(ids, positions)


def test_a_models_name_says_the_domain_unless_the_request_does() -> None:
    def domain(request: Any) -> Any:
        return (json.loads(with_domain(json.dumps(request).encode())).get("vllm_xargs") or {}).get("suture_domain")

    assert domain({"model": "m:math"}) == "math"
    assert domain({"model": "m:math", "vllm_xargs": {"other": 1}}) == "math"
    assert domain({"model": "m:math", "vllm_xargs": {"suture_domain": "code"}}) == "code"
    assert domain({"model": "m"}) is None
    for body in (b"", b"no json", b"[1]", b'{"model": 3}', b'{"model": "m"}'):
        assert with_domain(body) == body


def test_the_middleware_hands_a_changed_request_on_and_leaves_others_alone() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((dict(scope["headers"]).get(b"content-length"), (await receive())["body"]))

    def ask(body: bytes, method: str = "POST", processors: Any = ("suture.vllm_plugin:Domains_00",)) -> Any:
        halves = [
            {"type": "http.request", "body": body[:9], "more_body": True},
            {"type": "http.request", "body": body[9:]},
        ]

        async def receive() -> Any:
            return halves.pop(0)

        async def send(message: Any) -> None:
            seen.append(message)

        config = SimpleNamespace(model_config=SimpleNamespace(logits_processors=processors))
        server = SimpleNamespace(state=SimpleNamespace(vllm_config=config))
        scope = {
            "type": "http",
            "method": method,
            "headers": [(b"content-length", str(len(body)).encode())],
            "app": server,
        }
        asyncio.run(DomainNames(app)(scope, receive, send))
        return seen.pop()

    length, body = ask(b'{"model": "m:math", "prompt": "x"}')
    assert json.loads(body) == {"model": "m:math", "prompt": "x", "vllm_xargs": {"suture_domain": "math"}}
    assert int(length) == len(body)
    assert ask(b'{"model": "m:math"}', "PUT")[1] == b'{"model":'  # the first half, as it came
    refused = ask(b'{"model": "m:math"}', processors=None)  # another class of vLLM's runs the model
    assert seen.pop()["status"] == 400
    assert b"does not run this model by suture's plugin" in refused["body"]
