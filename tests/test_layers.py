"""Layers called one by one are the model, and what is seen between them is what hooks on the model see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny import ARCHITECTURES, SHARED, tiny_model
from torch import Tensor, nn

from suture.capture import capture
from suture.errors import AttachError
from suture.layers import Batch, Layers, blocks_of
from suture.states import Tokens
from suture.wiring import is_linear, shape_of

ALL = sorted(ARCHITECTURES)
SEQUENCES = [[5, 9, 30], [7], list(range(10, 35)), list(range(40, 61)), [3, 4, 5, 6], list(range(60, 83))]
TOKENS = Tokens.of(SEQUENCES)
LLAMA = ["self_attn.o_proj", "mlp.down_proj"]
# architecture → linears of a layer that write to the residual stream: none where what a linear gives is normalised
WRITERS = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma2": [],
    "gemma3": [],
    "gpt2": ["attn.c_proj", "mlp.c_proj"],
    "neox": ["attention.dense", "mlp.dense_4h_to_h"],
    "phi3": LLAMA,
    "olmo2": [],
    "mixtral": ["self_attn.o_proj"],
    "falcon": ["self_attention.dense", "mlp.dense_4h_to_h"],
    "mamba": ["mixer.out_proj"],
    "bloom": ["self_attention.dense", "mlp.dense_4h_to_h"],
    "opt": ["self_attn.out_proj", "fc2"],
}
QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
GATED = ["mlp.gate_proj", "mlp.up_proj"]
SPLIT = [[QKV], [GATED], []]
NORMED = [[QKV, ["self_attn.o_proj"], GATED, ["mlp.down_proj"]]]
# architecture → the other linears before each writer and behind the last, those that read one tensor together
READERS: dict[str, list[list[list[str]]]] = {
    "llama": SPLIT,
    "mistral": SPLIT,
    "qwen2": SPLIT,
    "qwen3": SPLIT,
    "gemma2": NORMED,
    "gemma3": NORMED,
    "gpt2": [[["attn.c_attn"]], [["mlp.c_fc"]], []],
    "neox": [[["attention.query_key_value"]], [["mlp.dense_h_to_4h"]], []],
    "phi3": [[["self_attn.qkv_proj"]], [["mlp.gate_up_proj"]], []],
    "olmo2": NORMED,
    "mixtral": [[QKV], []],
    "falcon": [[["self_attention.query_key_value"]], [["mlp.dense_h_to_4h"]], []],
    # the weight of dt_proj is read, the module is not called
    "mamba": [[["mixer.in_proj"], ["mixer.x_proj"]], []],
    "bloom": [[["self_attention.query_key_value"]], [["mlp.dense_h_to_4h"]], []],
    "opt": [[QKV], [["fc1"]], []],
}
OPEN = {"gemma2", "gemma3", "olmo2", "mixtral"}
# architecture → what reads the residual stream between the two writers; None where both read the layer's input
BETWEEN: dict[str, str | None] = {
    "gpt2": "ln_2",
    "opt": "final_layer_norm",
    "neox": None,
    "falcon": None,
    "mamba": None,
}


def granite(**settings: Any) -> Any:
    """A model that multiplies what it adds to the residual stream."""
    config = transformers.GraniteConfig(**{**SHARED, "residual_multiplier": 0.22, **settings})
    config.architectures = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.eval().requires_grad_(False)


def through(layers: Layers, batches: list[Batch]) -> None:
    for index in range(len(layers)):
        for batch in batches:
            batch.states = layers.call(index, batch)


def seen_by_hooks(model: Any, architecture: str, tokens: Tokens = TOKENS) -> list[tuple[list[Tensor], list[Tensor]]]:
    """A layer: what enters each writer and the residual behind each, [N, ...], each sequence read alone and whole."""
    _, blocks = blocks_of(model)
    inputs: dict[tuple[int, int], list[Tensor]] = {}
    residuals: dict[tuple[int, int], list[Tensor]] = {}
    hooks = []

    def flat(states: Tensor) -> Tensor:
        return states.reshape(-1, states.shape[-1]).clone()

    for index, block in enumerate(blocks):
        names = WRITERS[architecture]
        between = BETWEEN.get(architecture, "post_attention_layernorm")
        entered: list[Tensor] = []

        def keep_input(_: Any, given: Any, key: tuple[int, int]) -> None:
            inputs.setdefault(key, []).append(flat(given[0]))

        def keep_sum(_: Any, __: Any, out: Tensor, key: tuple[int, int], start: list[Tensor] = entered) -> None:
            residuals.setdefault(key, []).append(start[-1] + flat(out))

        def keep_read(_: Any, given: Any, key: tuple[int, int]) -> None:
            residuals.setdefault(key, []).append(flat(given[0]))

        def keep_out(_: Any, __: Any, out: Any, key: tuple[int, int]) -> None:
            residuals.setdefault(key, []).append(flat(out[0] if isinstance(out, tuple) else out))

        def keep_start(_: Any, args: Any, kwargs: Any, start: list[Tensor] = entered) -> None:
            start.append(flat(args[0] if args else kwargs["hidden_states"]))

        def at(hook: Any, *key: int) -> Any:
            return lambda *given: hook(*given, key=key)

        hooks.append(block.register_forward_pre_hook(keep_start, with_kwargs=True))
        for place, name in enumerate(names):
            linear = block.get_submodule(name)
            hooks.append(linear.register_forward_pre_hook(at(keep_input, index, place)))
            last = place == len(names) - 1 and architecture not in OPEN
            if last:
                hooks.append(block.register_forward_hook(at(keep_out, index, place)))
            elif between is None:
                hooks.append(linear.register_forward_hook(at(keep_sum, index, place)))
            else:
                hooks.append(block.get_submodule(between).register_forward_pre_hook(at(keep_read, index, place)))
    for ids in tokens.sequences:
        model(input_ids=ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    places = range(len(WRITERS[architecture]))
    return [
        (
            [torch.cat(inputs[index, place]) for place in places],
            [torch.cat(residuals[index, place]) for place in places],
        )
        for index in range(len(blocks))
    ]


def untouched(model: Any) -> bool:
    """Whether no module has a forward of its own, or a hook."""
    return not any(
        "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )


@pytest.mark.parametrize("architecture", ALL)
def test_layers_called_one_by_one_give_the_models_states(architecture: str) -> None:
    model = tiny_model(architecture)
    plain = model(input_ids=torch.tensor([SEQUENCES[2]]), use_cache=False).logits
    layers = Layers(model)
    for batch_tokens in (2048, 48):
        batches = layers.begin(TOKENS, batch_tokens)
        assert sorted(torch.cat([batch.rows for batch in batches]).tolist()) == list(range(len(TOKENS.ids)))
        through(layers, batches)
        expected = capture(model, TOKENS, batch_tokens=batch_tokens).states
        assert torch.equal(layers.finish(batches, len(TOKENS.ids)), expected)
    assert untouched(model)
    assert torch.equal(model(input_ids=torch.tensor([SEQUENCES[2]]), use_cache=False).logits, plain)


@pytest.mark.parametrize("architecture", ALL)
def test_writers_of_each_architecture(architecture: str) -> None:
    model = tiny_model(architecture)
    layers = Layers(model)
    path, blocks = blocks_of(model)
    assert len(layers) == len(blocks) == 2
    for index, writers in enumerate(layers.writers):
        assert [writer.name for writer in writers] == [f"{path}.{index}.{name}" for name in WRITERS[architecture]]
        for writer in writers:
            assert model.get_submodule(writer.name) is writer.linear
            assert writer.scale == 1
            assert shape_of(writer.linear)[1] == 32
    assert layers.closed == [architecture not in OPEN] * 2


@pytest.mark.parametrize("architecture", ALL)
def test_readers_and_what_enters_them(architecture: str) -> None:
    model = tiny_model(architecture)
    layers = Layers(model)
    entered: dict[str, list[Tensor]] = {}
    hooks = []
    for index, segments in enumerate(layers.readers):
        start = f"{layers.path}.{index}."
        found = [[[path.removeprefix(start) for path, _ in group] for group in segment] for segment in segments]
        assert found == READERS[architecture]
        for path, module in [pair for segment in segments for group in segment for pair in group]:
            assert model.get_submodule(path) is module

            def keep(_: Any, given: Any, path: str = path) -> None:
                entered.setdefault(path, []).append(given[0].reshape(-1, given[0].shape[-1]))

            hooks.append(module.register_forward_pre_hook(keep))
    for ids in TOKENS.sequences:
        model(input_ids=ids[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    batches = layers.begin(TOKENS, 48)
    for index, segments in enumerate(layers.readers):
        for path, module in [pair for segment in segments for group in segment for pair in group]:
            for batch in batches:
                expected = torch.cat(entered[path])[batch.rows]
                torch.testing.assert_close(layers.entering(index, batch, module), expected, atol=1e-4, rtol=1e-4)
        for batch in batches:
            batch.states = layers.call(index, batch)
    assert untouched(model)


def test_linears_in_the_order_they_are_called() -> None:
    layers = Layers(tiny_model())
    names = [*QKV, "self_attn.o_proj", *GATED, "mlp.down_proj"]
    expected = [f"model.layers.{index}.{name}" for index in range(2) for name in names]
    assert list(layers.linears()) == expected
    some = [name for name in expected if name.endswith(("k_proj", "down_proj"))]
    assert list(layers.linears(["down_proj", "k_proj"])) == some
    assert not layers.linears(["proj"])


def test_shapes_are_in_and_out() -> None:
    for architecture, shapes in {"llama": [(32, 32), (48, 32)], "gpt2": [(32, 32), (128, 32)]}.items():
        writers = Layers(tiny_model(architecture)).writers[0]
        assert [shape_of(writer.linear) for writer in writers] == shapes


@pytest.mark.parametrize("architecture", [name for name in ALL if WRITERS[name]])
@pytest.mark.parametrize("whole", [False, True])
def test_tapped_is_what_hooks_see(architecture: str, whole: bool) -> None:
    model = tiny_model(architecture)
    expected = seen_by_hooks(model, architecture)
    layers = Layers(model)
    batches = layers.begin(TOKENS, 48)
    for index, writers in enumerate(layers.writers):
        inputs, residuals = expected[index]
        for batch in batches:
            for place in range(len(writers)):
                asked = writers[: place + 1]
                seen = layers.tap(index, batch, asked, whole=whole)
                assert (seen.out is not None) == whole
                entered = batch.flat(seen.inputs[-1].reshape(*batch.real.shape, -1))
                torch.testing.assert_close(entered, inputs[place][batch.rows], atol=1e-4, rtol=1e-4)
                found = seen.residual(batch, asked)
                torch.testing.assert_close(found, residuals[place][batch.rows], atol=1e-4, rtol=1e-4)
        for batch in batches:
            batch.states = layers.call(index, batch)
    assert untouched(model)


def test_tap_stops_behind_the_last_writer_asked_for() -> None:
    model = tiny_model()
    layers = Layers(model)
    (batch,) = layers.begin(Tokens.of([[1, 2, 3]]))
    calls: list[int] = []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    layers.tap(0, batch, layers.writers[0][:1], whole=False)
    assert not calls
    layers.tap(0, batch, layers.writers[0][:1], whole=True)
    assert calls
    hook.remove()


def test_a_scaled_residual_stream() -> None:
    """Granite: x + 0.22 f(x)."""
    model = granite()
    layers = Layers(model)
    assert [writer.scale for writers in layers.writers for writer in writers] == [0.22] * 4
    assert layers.closed == [True, True]
    batches = layers.begin(TOKENS)
    expected = seen_by_hooks(model, "llama")
    for index, writers in enumerate(layers.writers):
        for batch in batches:
            seen = layers.tap(index, batch, writers, whole=True)
            for place in (0, 1):
                found = seen.residual(batch, writers[: place + 1])
                torch.testing.assert_close(found, expected[index][1][place][batch.rows], atol=1e-4, rtol=1e-4)
            assert seen.out is not None
            batch.states = seen.out


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "neox", "mixtral", "gemma2", "gemma3", "olmo2"])
def test_half_precision_finds_the_same_writers(architecture: str) -> None:
    """A token with an activation of a thousand, as an attention sink has, hides nothing either."""
    model = tiny_model(architecture)
    model.get_input_embeddings().weight[1, 3] = 1000.0
    layers = Layers(model.to(torch.bfloat16))
    for index, writers in enumerate(layers.writers):
        assert [writer.name for writer in writers] == [
            f"{layers.path}.{index}.{name}" for name in WRITERS[architecture]
        ]
        assert all(writer.scale == 1 for writer in writers)


class Routed(nn.Module):
    """Two experts, each a linear of its own that sees every second token."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, states: Tensor) -> Tensor:
        flat = states.reshape(-1, 32)
        out = torch.zeros_like(flat)
        for place, expert in enumerate(self.experts):
            out[place::2] = expert(flat[place::2])
        return out.reshape(states.shape)


def routed(seed: int = 0) -> Any:
    """A llama with experts in place of its MLPs."""
    model = tiny_model()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for block in model.model.layers:
            block.mlp = Routed().requires_grad_(False)
    return model


def test_linears_that_see_some_tokens_only_are_left_out() -> None:
    model = routed()
    layers = Layers(model)
    assert [[writer.name for writer in writers] for writers in layers.writers] == [
        ["model.layers.0.self_attn.o_proj"],
        ["model.layers.1.self_attn.o_proj"],
    ]
    assert layers.closed == [False, False]
    assert [[len(group) for group in segment] for segment in layers.readers[0]] == [[3], []]


def test_forwards_of_instances_are_given_back() -> None:
    """accelerate puts forwards on instances; they are there afterwards as before."""
    model = tiny_model()
    own = model.model.layers[0].forward
    model.model.layers[0].forward = own
    layers = Layers(model)
    batches = layers.begin(TOKENS)
    through(layers, batches)
    layers.finish(batches, len(TOKENS.ids))
    assert vars(model.model.layers[0])["forward"] is own
    assert "forward" not in vars(model.model.layers[1])


def test_an_error_midway_leaves_nothing_behind() -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    model = tiny_model()
    layers = Layers(model)
    batches = layers.begin(TOKENS)
    for module, act in (
        (model.model.norm, lambda: layers.begin(TOKENS)),
        (model.model.norm, lambda: layers.finish(batches, len(TOKENS.ids))),
        (model.model.layers[1].mlp.down_proj, lambda: layers.tap(1, batches[0], layers.writers[1], whole=True)),
        (model.model.layers[1].mlp.down_proj, lambda: layers.call(1, batches[0])),
        (model.model.layers[1].mlp, lambda: layers.entering(1, batches[0], model.model.layers[1].mlp.down_proj)),
        (model.model.norm, lambda: Layers(model)),
        (model.model.layers[1].mlp, lambda: Layers(model)),
    ):
        hook = module.register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="broken"):
            act()
        hook.remove()
        assert untouched(model)


class Skipping(nn.ModuleList):
    def __getitem__(self, index: Any) -> Any:
        return list(super().__getitem__(index))[:-1] if isinstance(index, slice) else super().__getitem__(index)


def test_models_whose_layers_cannot_be_called_are_refused() -> None:
    model = tiny_model()
    model.model.layers = Skipping(model.model.layers)
    with pytest.raises(AttachError, match="does not call each of its layers once"):
        Layers(model)
    model = tiny_model()
    model.config.num_hidden_layers = 3
    with pytest.raises(AttachError, match="keeps its 3 layers in a way"):
        blocks_of(model)


def test_what_is_a_linear() -> None:
    assert is_linear(nn.Linear(2, 3))
    assert is_linear(tiny_model("gpt2").transformer.h[0].attn.c_proj)
    assert not is_linear(nn.Embedding(2, 3))


def test_what_is_no_linear_of_every_token_is_named() -> None:
    assert Layers(tiny_model("llama")).left_alone() == []
    assert Layers(tiny_model("gpt2")).left_alone() == []
    experts = Layers(tiny_model("mixtral")).left_alone()
    assert experts == ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
