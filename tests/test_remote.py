"""A remote-code export gives what `attach` gives, however it is loaded and called."""

from __future__ import annotations

import inspect
import json
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils
from test_attach import PROMPTS, padded, strong
from tiny import ARCHITECTURES, tiny_model, tiny_tokenizer
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, pipeline

from suture.attach import CACHES, attach
from suture.errors import SurgeryError
from suture.export.remote import CODE, is_own_code, write_remote
from suture.models import decoder_of, hidden_size
from suture.router import Router
from suture.surgery import MODULES, Surgery, make_surgery

GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
IDS = torch.tensor([PROMPTS[0]])


@pytest.fixture(autouse=True)
def _own_modules(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Code of checkpoints is copied into a folder of the test's."""
    folder = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", folder)
    monkeypatch.syspath_prepend(folder)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]


def two(hidden: int) -> dict[str, Surgery]:
    half = strong(hidden, "cosine", 1)
    half.strength = 0.5
    return {"math": strong(hidden), "code": half}


class Always(Router):
    """A router that asks one number of a state: its first says the domain, or none below zero."""

    def forward(self, states: Tensor) -> Tensor:
        return torch.where(states[:, 0] > 0, (states[:, 1] > 0).long(), -torch.ones(len(states), dtype=torch.long))


def export(folder: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(folder)
    write_remote(folder, two(hidden_size(model)), model, **options)
    return folder


def load(folder: Path, auto: Any = AutoModelForCausalLM, **options: Any) -> Any:
    model, info = auto.from_pretrained(folder, trust_remote_code=True, output_loading_info=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.requires_grad_(False)


def close(one: Tensor, two: Tensor) -> None:
    assert one.shape == two.shape
    assert float((one - two).abs().max() / two.abs().max()) <= 1e-5


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_logits_and_padded_generation_are_those_of_attach(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    plain = model(input_ids=IDS).logits
    found = load(export(tmp_path / architecture, model))
    assert is_own_code(tmp_path / architecture)
    assert found.domains == ["math", "code"]
    assert torch.equal(found(input_ids=IDS).logits, plain)
    ids, mask = padded(PROMPTS, "left")
    attached = attach(model, two(hidden_size(model)), probe=False)
    for domain in ("math", "code"):
        found.set_domain(domain)
        with attached.domain(domain):
            expected = model(input_ids=IDS).logits
            assert (expected - plain).abs().max() > 0.1
            close(found(input_ids=IDS).logits, expected)
            written = model.generate(ids, attention_mask=mask, **GREEDY)
        assert torch.equal(found.generate(ids, attention_mask=mask, **GREEDY), written)


def test_the_decoder_alone_as_an_engine_calls_it(tmp_path: Path) -> None:
    """vLLM: AutoModel without a head, one row of many sequences, positions given, a tuple wanted."""
    for architecture in ("llama", "opt"):
        model = tiny_model(architecture)
        folder = export(tmp_path / architecture, model, default="math")
        decoder = load(folder, AutoModel)
        if architecture == "opt":
            states = decoder(input_ids=IDS).last_hidden_state
            inner = decoder_of(model)[1](input_ids=IDS).last_hidden_state
            close(states, two(32)["math"](inner, torch.arange(9)[None]))
            continue
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
        given = {"position_ids": positions, "use_cache": False, "return_dict": False}
        embedded = model.model.embed_tokens(IDS)
        for inputs in ({"input_ids": IDS}, {"inputs_embeds": embedded}):
            states = decoder(**inputs, **given)[0]
            close(states, two(32)["math"](model.model(**inputs, **given)[0], positions))


def test_saved_again_it_is_the_same(tmp_path: Path) -> None:
    for architecture in ("llama", "mixtral"):
        first = load(export(tmp_path / architecture, tiny_model(architecture), default="code"))
        again = tmp_path / f"{architecture}-again"
        first.save_pretrained(again)
        assert (again / CODE).read_bytes() == (tmp_path / architecture / CODE).read_bytes()
        assert is_own_code(again)
        second = load(again)
        assert second.domains == first.domains
        assert torch.equal(second(input_ids=IDS).logits, first(input_ids=IDS).logits)


def test_each_row_has_its_domain_also_with_beams_and_several_answers(tmp_path: Path) -> None:
    model = load(export(tmp_path / "x", tiny_model()))
    ids, mask = padded(PROMPTS, "left")
    names = ["math", None, "code"]
    inputs = {"attention_mask": mask, **GREEDY}
    alone = [model.generate(ids, domain=name, **inputs)[row] for row, name in enumerate(names)]
    assert torch.equal(model.generate(ids, domain=names, **inputs), torch.stack(alone))
    beams = {**inputs, "num_beams": 3, "num_return_sequences": 2}
    alone = [model.generate(ids, domain=name, **beams)[2 * row : 2 * row + 2] for row, name in enumerate(names)]
    assert torch.equal(model.generate(ids, domain=names, **beams), torch.cat(alone))
    plain = model(input_ids=ids, attention_mask=mask).logits
    model.set_domain(names)
    together = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(together[1], plain[1])
    assert not torch.equal(together[0], plain[0])
    with pytest.raises(ValueError, match="3 domains for a batch of 2 rows"):
        model(input_ids=ids[:2])


def test_the_default_is_in_the_config_and_one_call_can_differ(tmp_path: Path) -> None:
    model = load(export(tmp_path / "x", tiny_model(), default="math"))
    by_default = model.generate(IDS, **GREEDY)
    plain = model.generate(IDS, domain=None, **GREEDY)
    assert not torch.equal(by_default, plain)
    assert torch.equal(model.generate(IDS, **GREEDY), by_default)
    model.set_domain(None)
    assert torch.equal(model.generate(IDS, **GREEDY), plain)
    with pytest.raises(ValueError, match="unknown domain 'maths'; known: math, code"):
        model.set_domain("maths")
    with pytest.raises(ValueError, match="unknown domain 'auto'"):
        model.generate(IDS, domain=["math", "auto"], **GREEDY)
    assert torch.equal(load(tmp_path / "x", suture_domain="code")(IDS).logits, _with(model, "code"))


def _with(model: Any, domain: Any) -> Tensor:
    model.set_domain(domain)
    logits: Tensor = model(input_ids=IDS).logits
    return logits


@pytest.fixture
def routed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int], Any]:
    """A model with a router whose answers differ over PROMPTS, those answers, and its decoder as it is without."""
    stock = tiny_model("qwen3")
    model = load(export(tmp_path / "x", stock, router=Router(32, 2), default="auto"))
    decoder = decoder_of(model)[1]
    decoder.suture.shapes["router"] = Always(32, 2)
    last = torch.stack([stock.model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in PROMPTS])
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0]])  # code, math, none
    turn = torch.linalg.lstsq(last, signs).solution  # [H, 2]

    def choose(self: Any, states: Tensor) -> Tensor:
        found = states @ turn
        return torch.where(found[:, 0] > 0, (found[:, 1] > 0).long(), -torch.ones(len(states), dtype=torch.long))

    monkeypatch.setattr(Always, "forward", choose)
    return model, [1, 0, -1], stock


def test_a_router_chooses_by_the_last_real_token(routed: tuple[Any, list[int], Any]) -> None:
    model, _, stock = routed
    names = ["code", "math", None]
    for side in ("left", "right"):
        ids, mask = padded(PROMPTS, side)
        model.set_domain("auto")
        found = model(input_ids=ids, attention_mask=mask).logits
        assert torch.equal(found[2], stock(input_ids=ids, attention_mask=mask).logits[2])
        model.set_domain(names)
        assert torch.equal(found, model(input_ids=ids, attention_mask=mask).logits)
    model.set_domain(["auto", None, "math"])
    mixed = model(input_ids=ids, attention_mask=mask).logits
    model.set_domain(["code", None, "math"])
    assert torch.equal(mixed, model(input_ids=ids, attention_mask=mask).logits)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False},
        {"cache_implementation": "static", "disable_compile": True},
        {"num_beams": 2, "num_return_sequences": 2},
    ],
    ids=lambda options: next(iter(options), "greedy"),
)
def test_what_a_router_chose_holds_for_the_call(routed: tuple[Any, list[int], Any], options: dict[str, Any]) -> None:
    model = routed[0]
    for side in ("left", "right"):
        ids, mask = padded(PROMPTS, side)
        inputs = {"attention_mask": mask, **GREEDY, **options}
        for rows in ([0, 1, 2], [2, 1, 0]):  # a static cache is kept from call to call
            given = {**inputs, "attention_mask": mask[rows]}
            expected = model.generate(ids[rows], domain=[["code", "math", None][row] for row in rows], **given)
            assert torch.equal(model.generate(ids[rows], **given), expected)


def test_a_loop_by_hand_keeps_what_was_chosen(routed: tuple[Any, list[int], Any]) -> None:
    model = routed[0]
    ids, mask = padded(PROMPTS, "left")
    name = next(name for name in CACHES if name in inspect.signature(model.forward).parameters)

    def steps() -> list[Tensor]:
        out = model(input_ids=ids, attention_mask=mask, use_cache=True)
        more = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
        nexts = torch.tensor([[7], [8], [9]])
        return [out.logits, model(nexts, attention_mask=more, **{name: out[name]}).logits]

    model.set_domain("auto")
    found = steps()
    model.set_domain(["code", "math", None])
    for one, other in zip(found, steps(), strict=True):
        assert torch.equal(one, other)


def test_a_router_needs_rows_that_are_sequences(routed: tuple[Any, list[int], Any]) -> None:
    model = routed[0]
    model.config._attn_implementation_internal = "vllm"
    with pytest.raises(ValueError, match="packs many into one: name a domain"):
        model(input_ids=IDS)


def test_draft_tokens_do_not_choose(routed: tuple[Any, list[int], Any]) -> None:
    model, chosen, _ = routed
    prompt = torch.tensor([PROMPTS[0] + PROMPTS[0][:3] + PROMPTS[0]])
    assert chosen[0] == 1
    plain = model.generate(prompt, domain="auto", **GREEDY)
    assert torch.equal(model.generate(prompt, domain="auto", prompt_lookup_num_tokens=4, **GREEDY), plain)


def test_compiled_without_graph_breaks(tmp_path: Path) -> None:
    model = load(export(tmp_path / "x", tiny_model(), default="math"))
    expected = model(input_ids=IDS, use_cache=False).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about the compiler
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        close(compiled(input_ids=IDS, use_cache=False).logits, expected)


def test_half_precision_is_corrected_in_float32(tmp_path: Path) -> None:
    stock = tiny_model().to(torch.bfloat16)
    folder = export(tmp_path / "x", stock, default="math")
    for model in (load(folder), load(folder, dtype=torch.float32).to(torch.bfloat16)):
        assert model.dtype == torch.bfloat16
        assert {each.dtype for each in model.model.suture.parameters()} == {torch.float32}
        model.set_domain(None)
        h = model.model(IDS).last_hidden_state
        model.set_domain("math")
        expected = stock.lm_head(two(32)["math"](h.float(), torch.arange(9)[None]).to(torch.bfloat16))
        assert torch.equal(model(input_ids=IDS).logits, expected)
        assert model.generate(IDS, **GREEDY).shape == (1, 14)


def test_weights_that_engines_make_half_still_correct(tmp_path: Path) -> None:
    """vLLM gives every parameter the model's dtype."""
    for kind in sorted(MODULES):
        model = tiny_model().to(torch.bfloat16)
        model.save_pretrained(tmp_path / kind)
        write_remote(tmp_path / kind, {"a": strong(32, kind)}, model, default="a")
        found = load(tmp_path / kind)
        for module in found.model.suture.modules():
            for name, tensor in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(tensor.to(torch.bfloat16), requires_grad=False))
        found.set_domain(None)
        h = found.model(input_ids=IDS).last_hidden_state
        rounded = strong(32, kind).to(torch.bfloat16).float()
        found.set_domain("a")
        assert torch.equal(found.model(input_ids=IDS).last_hidden_state, rounded(h, torch.arange(9)[None]))


def test_nothing_is_added_for_quantizers_to_replace(tmp_path: Path) -> None:
    suture = load(export(tmp_path / "x", tiny_model())).model.suture
    assert not any(isinstance(module, nn.Linear) for module in suture.modules())


def test_weights_may_lie_on_a_disk(tmp_path: Path) -> None:
    folder = export(tmp_path / "x", tiny_model(), default="math")
    expected = load(folder)(input_ids=IDS).logits
    places = dict.fromkeys(("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    far = {**places, "model.suture": "disk"}
    model = load(folder, device_map=far, offload_folder=str(tmp_path / "far"))
    assert {each.device.type for each in model.model.suture.parameters()} == {"meta"}
    assert torch.equal(model(input_ids=IDS).logits, expected)


def test_stored_in_half_where_that_loses_nothing(tmp_path: Path) -> None:
    from suture.export.shards import read_tensor

    model = tiny_model()
    model.save_pretrained(tmp_path)
    rounded = strong(32).to(torch.bfloat16).float()
    write_remote(tmp_path, {"a": rounded, "b": strong(32, seed=3)}, model)
    name = "content.up.weight"
    one, other = (read_tensor(tmp_path, f"model.suture.corrections.{index}.{name}") for index in (0, 1))
    assert one is not None
    assert other is not None
    assert (one.dtype, other.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(one.float(), rounded.state_dict()[name])


def test_a_pipeline_takes_a_domain(tmp_path: Path) -> None:
    folder = export(tmp_path / "x", tiny_model())
    tiny_tokenizer().save_pretrained(folder)
    writer = pipeline("text-generation", model=str(folder), trust_remote_code=True, device="cpu")
    texts = [
        writer("ab cd", domain=domain, max_new_tokens=8, do_sample=False)[0]["generated_text"]
        for domain in (None, "math")
    ]
    ids = writer.tokenizer("ab cd", return_tensors="pt").input_ids
    expected = writer.model.generate(ids, domain="math", max_new_tokens=8, do_sample=False)[0]
    assert texts[0] != texts[1]
    assert texts[1] == writer.tokenizer.decode(expected, skip_special_tokens=True)


def test_threads_wait_for_each_other(tmp_path: Path) -> None:
    model = load(export(tmp_path / "x", tiny_model()))
    names = ["math", "code", None] * 2
    expected = [model.generate(IDS, domain=name, **GREEDY) for name in names]
    found: dict[int, Tensor] = {}

    def work(place: int) -> None:
        found[place] = model.generate(IDS, domain=names[place], **GREEDY)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[place], tokens) for place, tokens in enumerate(expected))


def test_changed_code_is_not_ours(tmp_path: Path) -> None:
    folder = export(tmp_path / "x", tiny_model())
    assert is_own_code(folder)
    code, config = (folder / CODE).read_text(), json.loads((folder / "config.json").read_text())
    (folder / CODE).write_text(code + "\n")
    assert not is_own_code(folder)
    (folder / CODE).write_text(code)
    (folder / "more.py").write_text("")
    assert not is_own_code(folder)
    (folder / "more.py").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["else--tok.Tok", None]}}))
    assert not is_own_code(folder)
    (folder / "tokenizer_config.json").unlink()
    assert is_own_code(folder)
    config["auto_map"]["AutoModel"] = f"elsewhere--{config['auto_map']['AutoModel']}"
    (folder / "config.json").write_text(json.dumps(config))
    assert not is_own_code(folder)
    config = json.loads((folder / "config.json").read_text())
    config["suture"]["classes"]["causal"] = "X\nimport os\n"
    (folder / "config.json").write_text(json.dumps(config))
    assert not is_own_code(folder)
    assert not is_own_code(tmp_path)


def test_refusals_come_before_anything_is_written(tmp_path: Path) -> None:
    class Own(transformers.LlamaForCausalLM):  # type: ignore[misc]
        pass

    model = tiny_model()
    model.save_pretrained(tmp_path)
    before = sorted(file.name for file in tmp_path.iterdir())
    with pytest.raises(SurgeryError, match="Own is not a class of transformers"):
        write_remote(tmp_path, two(32), Own(model.config))
    with pytest.raises(SurgeryError, match="no decoder that can be found"):
        write_remote(tmp_path, two(32), nn.Linear(2, 2))
    with pytest.raises(SurgeryError, match="'a' is for states of width 16, not 32"):
        write_remote(tmp_path, {"a": make_surgery("darts", 16)}, model)
    with pytest.raises(SurgeryError, match="default domain 'auto' is unknown; known: math, code"):
        write_remote(tmp_path, two(32), model, default="auto")
    with pytest.raises(SurgeryError, match="cannot be called 'auto'"):
        write_remote(tmp_path, {"auto": strong(32)}, model)
    assert sorted(file.name for file in tmp_path.iterdir()) == before
