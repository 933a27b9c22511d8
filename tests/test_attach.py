"""A corrected model gives the same logits however it is called, on every architecture."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, VOCABULARY, tiny_model
from torch import Tensor, nn

from suture.attach import attach, detach, token_positions
from suture.errors import AttachError
from suture.models import decoder_of, hidden_size
from suture.surgery import MODULES, Surgery, make_surgery

T_MAX = 12  # shorter than the sequences below: positions past the table are part of every test
PROMPTS = [list(range(10, 19)), [40], list(range(60, 66))]  # a one-token prompt must not look like a decoding step
ALL = sorted(ARCHITECTURES)


def strong(hidden: int, name: str = "darts", seed: int = 0) -> Surgery:
    """A module that moves states by as much as they are large."""
    generator = torch.Generator().manual_seed(seed)
    module = make_surgery(name, hidden, rank=4, t_max=T_MAX)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return module.eval().requires_grad_(False)


def reference(model: Any, surgery: Surgery, ids: list[int]) -> Tensor:
    """[T, V] corrected logits of one sequence: no padding, no cache, the paper's equations written out.

    The head is the model's own: its decoder is made to answer with the corrected states.
    """
    _, decoder = decoder_of(model)
    output = decoder(input_ids=torch.tensor([ids]), use_cache=False)
    h = output.last_hidden_state[0]  # [T, H]
    down, up = surgery.content.down.weight, surgery.content.up.weight
    rows = surgery.table.rows
    fixed = []
    for t, state in enumerate(h):
        correction = up @ torch.relu(down @ state)
        if t < T_MAX:
            correction = correction + rows[t]
        fixed.append(state - correction)
    output.last_hidden_state = torch.stack(fixed)[None]
    kept = decoder.forward
    decoder.forward = lambda *args, **kwargs: output
    try:
        logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        decoder.forward = kept
        if kept.__func__ is type(decoder).forward:  # leave nothing behind on the instance
            del decoder.forward
    return logits


def padded(prompts: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, place] = torch.tensor(prompt)
        mask[row, place] = 1
    return ids, mask


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ALL)
def test_every_way_of_calling(architecture: str) -> None:
    model = tiny_model(architecture)
    surgery = strong(hidden_size(model))
    expected = [reference(model, surgery, prompt) for prompt in PROMPTS]
    plain = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0]
    assert (plain - expected[0]).abs().max() > 0.1  # the correction is not a trifle
    attached = attach(model, {"math": surgery})
    with attached.domain("math"):
        for prompt, logits in zip(PROMPTS, expected, strict=True):
            close(model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0], logits)
        for side in ("left", "right"):
            ids, mask = padded(PROMPTS, side)
            inputs = {"input_ids": ids, "attention_mask": mask}
            if side == "left" and "position_ids" in inspect.signature(model.forward).parameters:
                # what `generate` passes: a model with learned positions would otherwise count the padding
                inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
            found = model(**inputs).logits
            for row, logits in enumerate(expected):
                close(found[row][mask[row].bool()][-1], logits[-1])
        kept = model(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False, logits_to_keep=1).logits[0]
        close(kept, expected[0][-1:])
        chosen = torch.tensor([2, 5])
        close(
            model(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False, logits_to_keep=chosen).logits[0],
            expected[0][chosen],
        )
    close(model(input_ids=torch.tensor([PROMPTS[0]])).logits[0], plain)


@pytest.mark.parametrize("architecture", ALL)
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_with_padding_and_cache(architecture: str, cache: str | None) -> None:
    model = tiny_model(architecture)
    surgery = strong(hidden_size(model))
    ids, mask = padded(PROMPTS, "left")
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if cache:
        settings |= {"cache_implementation": cache, "disable_compile": True}
    with attach(model, {"math": surgery}).domain("math"):
        out = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **settings)
    detach(model)
    for row, prompt in enumerate(PROMPTS):
        whole = prompt + out.sequences[row, ids.shape[1] :].tolist()
        logits = reference(model, surgery, whole)
        for step in range(6):
            close(out.logits[step][row], logits[len(prompt) + step - 1])


@pytest.mark.parametrize("name", sorted(set(MODULES)))
def test_every_module_attaches(name: str) -> None:
    model = tiny_model()
    surgery = strong(32, name)
    h = decoder_of(model)[1](input_ids=torch.tensor([PROMPTS[0]])).last_hidden_state
    expected = model.lm_head(surgery(h, torch.arange(len(PROMPTS[0]))[None]))
    with attach(model, {"a": surgery}).domain("a"):
        close(model(input_ids=torch.tensor([PROMPTS[0]])).logits, expected)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_beams_are_scored_by_corrected_logits(architecture: str) -> None:
    model = tiny_model(architecture)
    surgery = strong(hidden_size(model))
    with attach(model, {"a": surgery}).domain("a"):
        out = model.generate(
            torch.tensor([PROMPTS[0]]),
            num_beams=3,
            max_new_tokens=4,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            length_penalty=0.0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    detach(model)
    whole = out.sequences[0].tolist()
    log_p = torch.log_softmax(reference(model, surgery, whole), -1)
    start = len(PROMPTS[0])
    total = sum(log_p[t - 1, whole[t]] for t in range(start, len(whole)))
    close(out.sequences_scores[0], total)


def test_generation_equals_unpadded_generation() -> None:
    model = tiny_model("qwen3")
    ids, mask = padded(PROMPTS, "left")
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with attach(model, {"a": strong(32)}).domain("a"):
        together = model.generate(ids, attention_mask=mask, **settings)[:, ids.shape[1] :]
        alone = [
            model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.long), **settings)[
                0, len(p) :
            ]
            for p in PROMPTS
        ]
    assert together.tolist() == [row.tolist() for row in alone]


def test_compiled_without_graph_breaks() -> None:
    model = tiny_model()
    surgery = strong(32)
    expected = reference(model, surgery, PROMPTS[0])
    with attach(model, {"a": surgery}).domain("a"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about the compiler
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        found = compiled(input_ids=torch.tensor([PROMPTS[0]]), use_cache=False).logits[0]
    close(found, expected)


def test_domains_switch_nest_and_end() -> None:
    model = tiny_model()
    ids = torch.tensor([PROMPTS[0]])
    one, two = strong(32, seed=1), strong(32, seed=2)
    plain = model(input_ids=ids).logits
    expected = {name: reference(model, module, PROMPTS[0])[None] for name, module in (("one", one), ("two", two))}
    attached = attach(model, {"one": one, "two": two})
    close(model(input_ids=ids).logits, plain)
    with attached.domain("one"):
        close(model(input_ids=ids).logits, expected["one"])
        with attached.domain("two"):
            close(model(input_ids=ids).logits, expected["two"])
        with attached.domain(None):
            close(model(input_ids=ids).logits, plain)
        close(model(input_ids=ids).logits, expected["one"])
    with pytest.raises(RuntimeError, match="inside"), attached.domain("one"):
        raise RuntimeError("inside")
    close(model(input_ids=ids).logits, plain)


def test_nothing_is_left_on_the_model() -> None:
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attach(model, {"a": strong(32)})
    assert list(model.state_dict()) == list(before)
    detach(model)
    assert "forward" not in decoder_of(model)[1].__dict__
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    with pytest.raises(AttachError, match="no surgery"):
        detach(model)
    attach(model, {"a": strong(32)})  # and again


def test_half_precision_is_corrected_in_float32() -> None:
    model = tiny_model().to(torch.bfloat16)
    surgery = strong(32)
    h = decoder_of(model)[1](input_ids=torch.tensor([PROMPTS[0]])).last_hidden_state
    expected = model.lm_head(surgery(h.float(), torch.arange(9)[None]).to(torch.bfloat16))
    with attach(model, {"a": surgery}).domain("a"):
        found = model(input_ids=torch.tensor([PROMPTS[0]])).logits
    assert found.dtype == torch.bfloat16
    close(found.float(), expected.float())


def test_refusals() -> None:
    model = tiny_model()
    with pytest.raises(AttachError, match="'code' is for states of width 16, the model's have 32"):
        attach(model, {"code": strong(16)})
    attached = attach(model, {"math": strong(32)})
    with pytest.raises(AttachError, match="did you mean 'math'"), attached.domain("maths"):
        pass
    with pytest.raises(AttachError, match="detach it first"):
        attach(model, {"math": strong(32)})


def test_probe_refuses_a_decoder_that_forgets_its_cache() -> None:
    """A model whose cached states differ from uncached ones cannot be corrected exactly, and is left as it was."""
    model = tiny_model()
    layer = decoder_of(model)[1].layers[0]
    kept = layer.forward

    def forgetful(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        shift = 0.5 if hidden.shape[1] == 1 else 0.0
        return kept(hidden + shift, *args, **kwargs)

    layer.forward = forgetful
    with pytest.raises(AttachError, match="cannot be corrected exactly"):
        attach(model, {"a": strong(32)})
    assert "forward" not in decoder_of(model)[1].__dict__


def test_a_model_without_decoder_is_refused() -> None:
    class Odd(nn.Module):
        pass

    with pytest.raises(AttachError, match="no decoder"):
        decoder_of(Odd())


def test_positions_order_of_sources() -> None:
    given = torch.tensor([[3, 4]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    device = torch.device("cpu")
    assert token_positions(2, given, mask, 7, device).tolist() == [[3, 4]]
    assert token_positions(5, None, mask, 0, device).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert token_positions(1, None, mask, 4, device).tolist() == [[2], [4]]
    assert token_positions(2, None, None, 7, device).tolist() == [[7, 8]]


def test_a_copy_of_a_corrected_model_is_a_plain_model_of_its_own() -> None:
    model = tiny_model()
    ids = torch.tensor([[VOCABULARY - 1, 3]])
    plain = model(input_ids=ids).logits
    with attach(model, {"a": strong(32)}).domain("a"):
        twin = copy.deepcopy(model)
        assert torch.equal(twin(input_ids=ids).logits, plain)
        twin.model.embed_tokens.weight.zero_()
        assert not torch.allclose(twin(input_ids=ids).logits, plain)
        assert not torch.allclose(model(input_ids=ids).logits, plain)
        attach(twin, {"a": strong(32)})


def test_a_model_under_accelerates_hooks_is_corrected_and_given_back() -> None:
    """device_map across devices puts forwards on instances; they stay, before and after."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = tiny_model()
    surgery = strong(32)
    expected = reference(model, surgery, PROMPTS[0])
    for module in (model, model.model, model.lm_head):
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    hooked = model.model.forward
    with attach(model, {"a": surgery}).domain("a"):
        close(model(input_ids=torch.tensor([PROMPTS[0]])).logits[0], expected)
    detach(model)
    assert model.model.forward is hooked
