"""Models that do not belong together are told apart before any work, every difference at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import tensors

from suture.checkpoint import parse_reference, resolve
from suture.errors import FamilyError, ModelError
from suture.family import check_family, check_readers, vocabulary

TOKENS = {"<s>": 0, "a": 1, "b": 2, "c": 3}


def compare(*folders: Path | str, **settings: Any) -> list[str]:
    names = ("base", "math", "code")
    found = [resolve(parse_reference(str(folder))) for folder in folders]
    return check_family(dict(zip(names, found, strict=False)), **settings)


def told(*folders: Path | str, **settings: Any) -> list[str]:
    with pytest.raises(FamilyError) as error:
        compare(*folders, **settings)
    first, *lines = str(error.value).split("\n  ")
    assert first == "these models do not belong together:"
    return lines


def test_one_family(checkpoint):
    assert compare(checkpoint("base"), checkpoint("math"), checkpoint("code", shards=2)) == []
    assert check_family({}) == []


# Config fields


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("hidden_size", 8, "config field hidden_size: 4 in base, 8 in math"),
        ("num_attention_heads", 4, "config field num_attention_heads: 2 in base, 4 in math"),
        ("model_type", "mistral", "config field model_type: llama in base, mistral in math"),
        ("tie_word_embeddings", True, "config field tie_word_embeddings: False in base, True in math"),
    ],
)
def test_a_field_that_differs_is_named(checkpoint, field, value, shown):
    assert told(checkpoint("base"), checkpoint("math", **{field: value})) == [shown]


def test_rope_theta(checkpoint):
    (line,) = told(checkpoint("base"), checkpoint("math", rope_theta=1_000_000.0))
    assert line.startswith("config field rope_parameters: ")
    assert "'rope_theta': 10000.0" in line.split(" in base, ")[0]
    assert "'rope_theta': 1000000.0" in line.split(" in base, ")[1]


def test_both_spellings_of_rope_are_the_same(checkpoint):
    four = checkpoint("four", rope_theta=500000.0, rope_scaling=None)
    five = checkpoint("five", rope_theta=None, rope_parameters={"rope_theta": 500000, "rope_type": "default"})
    other = checkpoint("other", rope_theta=None, rope_parameters={"rope_theta": 10000, "rope_type": "default"})
    assert compare(four, five) == []
    assert len(told(four, other)) == 1
    assert len(told(five, other)) == 1


def test_both_spellings_of_rope_scaling_are_the_same(checkpoint):
    four = checkpoint("four", rope_scaling={"type": "linear", "factor": 2.0})
    newer = checkpoint("newer", rope_scaling={"rope_type": "linear", "factor": 2.0})
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    five = checkpoint("five", rope_theta=None, rope_parameters=scaled)
    assert compare(four, newer, five) == []
    for name, other in (("four more", {"type": "linear", "factor": 4.0}), ("plain", None)):
        (line,) = told(four, checkpoint(name, rope_scaling=other))
        assert line.startswith("config field rope_parameters: ")


def test_transformers_itself_writes_configs_that_agree(checkpoint, tmp_path):
    import transformers

    config = json.loads((checkpoint("four") / "config.json").read_text())
    five = checkpoint("five")
    transformers.LlamaConfig(**config).save_pretrained(five)
    assert "rope_parameters" in json.loads((five / "config.json").read_text())
    assert compare(tmp_path / "four", five) == []


def test_rope_without_theta(checkpoint):
    # the architecture's default holds: the same in both
    plain, again = checkpoint("plain", rope_theta=None), checkpoint("again", rope_theta=None)
    scaled = checkpoint("scaled", rope_theta=None, rope_scaling={"type": "linear", "factor": 2.0})
    assert compare(plain, again) == []
    assert compare(plain, checkpoint("written")) == []
    (line,) = told(plain, scaled)
    assert "'factor': 2.0" in line


def test_rope_of_each_kind_of_layer(checkpoint):
    def layers(theta: float) -> dict[str, Any]:
        return {
            "full_attention": {"rope_theta": theta, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        }

    one, two, other = (
        checkpoint(name, rope_theta=None, rope_parameters=layers(theta))
        for name, theta in (("one", 1e6), ("two", 1e6), ("other", 2e6))
    )
    assert compare(one, two) == []
    (line,) = told(one, other)
    assert "config field rope_parameters" in line
    assert "2000000.0" in line


def test_a_multimodal_config_keeps_its_text_model_a_level_deeper(checkpoint):
    def nested(name: str, theta: float) -> Path:
        inner = {"model_type": "gemma3_text", "rope_theta": theta, "vocab_size": 7}
        return checkpoint(name, model_type="gemma3", rope_theta=None, vocab_size=None, text_config=inner)

    assert compare(nested("one", 1e4), nested("two", 1e4)) == []
    (line,) = told(nested("three", 1e4), nested("four", 1e6))
    assert "rope_parameters" in line


def test_a_field_that_only_one_config_writes_is_a_default(checkpoint):
    assert compare(checkpoint("base"), checkpoint("math", head_dim=2, sliding_window=None)) == []


def test_positions_that_differ_are_a_note(checkpoint):
    notes = compare(checkpoint("base"), checkpoint("math", max_position_embeddings=64))
    assert notes == ["max_position_embeddings: 32 in base, 64 in math"]


# Tensors


def test_a_shape_that_differs(checkpoint):
    weights = tensors()
    weights["model.layers.1.self_attn.q_proj.weight"] = torch.ones(2, 4)
    assert told(checkpoint("base"), checkpoint("math", weights)) == [
        "1 tensors differ in shape between base and math: model.layers.1.self_attn.q_proj.weight [4, 4] and [2, 4]"
    ]


def test_all_tensors_are_listed_at_once(checkpoint):
    weights = tensors()
    del weights["model.norm.weight"], weights["model.layers.0.self_attn.q_proj.weight"]
    weights |= {"extra.one": torch.ones(1), "extra.two": torch.ones(1)}
    weights["model.layers.1.self_attn.q_proj.weight"] = torch.ones(4, 2)
    assert told(checkpoint("base"), checkpoint("math", weights), checkpoint("code", rope_theta=5.0)) == [
        "math lacks 2 tensors of base: model.layers.0.self_attn.q_proj.weight, model.norm.weight",
        "math has 2 tensors that base lacks: extra.one, extra.two",
        "1 tensors differ in shape between base and math: model.layers.1.self_attn.q_proj.weight [4, 4] and [4, 2]",
        "config field rope_parameters: {'rope_theta': 10000.0, 'rope_type': 'default'} in base, "
        "{'rope_theta': 5.0, 'rope_type': 'default'} in code",
    ]


def test_long_lists_are_counted(checkpoint):
    (line,) = told(checkpoint("base", tensors(layers=12)), checkpoint("math"))
    assert line.startswith("math lacks 10 tensors of base: ")
    assert line.endswith(" and 2 more")
    assert line.count("q_proj") == 8


def test_a_tied_head_may_be_stored_or_not(checkpoint):
    weights = {key: value for key, value in tensors().items() if key != "lm_head.weight"}
    stored = checkpoint("stored", tie_word_embeddings=True)
    left_out = checkpoint("left out", weights, tie_word_embeddings=True)
    assert compare(stored, left_out) == []
    assert compare(left_out, stored) == []


def test_an_untied_head_must_be_there(checkpoint):
    weights = {key: value for key, value in tensors().items() if key != "lm_head.weight"}
    whole, headless = checkpoint("whole"), checkpoint("headless", weights)
    assert told(whole, headless) == ["math lacks 1 tensors of base: lm_head.weight"]
    assert told(headless, whole) == ["math has 1 tensors that base lacks: lm_head.weight"]


# Vocabularies


def test_rows_that_differ(checkpoint):
    base, math = checkpoint("base"), checkpoint("math", tensors(rows=9), vocab_size=9)
    lines = told(base, math)
    assert lines[0].startswith("math and base differ in vocabulary rows: set `tokenizer_source: base` or `union`")
    assert lines[1] == (
        "2 tensors differ in shape between base and math: "
        "lm_head.weight [7, 4] and [9, 4], model.embed_tokens.weight [7, 4] and [9, 4]"
    )
    assert compare(base, math, rows_may_differ=True) == []


def test_rows_may_differ_but_other_shapes_may_not(checkpoint):
    weights = tensors(rows=9)
    weights["model.norm.weight"] = torch.ones(3)
    lines = told(checkpoint("base"), checkpoint("math", weights, vocab_size=9), rows_may_differ=True)
    assert lines == ["1 tensors differ in shape between base and math: model.norm.weight [4] and [3]"]


def test_padded_rows_that_the_config_does_not_count_are_shapes(checkpoint):
    lines = told(checkpoint("base"), checkpoint("math", tensors(rows=8)), rows_may_differ=True)
    assert lines[0].startswith("2 tensors differ in shape between base and math: lm_head.weight [7, 4] and [8, 4]")


def test_tokens_that_moved_are_named(checkpoint):
    moved = {"<s>": 0, "a": 2, "b": 1, "c": 3}
    base, math = checkpoint("base", tokens=TOKENS), checkpoint("math", tokens=moved)
    said = "2 tokens have other ids in math than in base: 'a' is 1 and 2, 'b' is 2 and 1; "
    (line,) = told(base, math)
    assert line.startswith(said)
    (note,) = compare(base, math, rows_may_differ=True)  # a merge that builds its own tokenizer can deal with that
    assert note.startswith(said)


def test_a_target_is_held_to_width_and_tokens_only(checkpoint):
    """A merged model may have other layers than its target; it must read the same text in states of one width."""
    merged = resolve(parse_reference(str(checkpoint("merged", tokens=TOKENS, num_hidden_layers=3))))
    math = resolve(parse_reference(str(checkpoint("math", tokens=TOKENS))))
    assert check_readers(merged, None, {"math": math}) == [
        "config field num_hidden_layers: 3 in the merged model, 2 in the target of math"
    ]
    with pytest.raises(FamilyError, match="'b' is 3 and 2"):
        check_readers(merged, {"a": 1, "b": 3}, {"math": math})
    narrow = resolve(parse_reference(str(checkpoint("narrow", hidden_size=8))))
    with pytest.raises(FamilyError, match="hidden_size: 4 in the merged model, 8 in the target of code"):
        check_readers(merged, None, {"code": narrow})


def test_an_added_token_is_only_a_note(checkpoint):
    base = checkpoint("base", tokens=TOKENS)
    math = checkpoint("math", tokens=TOKENS)
    loaded = json.loads((math / "tokenizer.json").read_text())
    loaded["added_tokens"] = [{"id": 4, "content": "<pad>", "special": True}, {"id": 0, "content": "<s>"}]
    (math / "tokenizer.json").write_text(json.dumps(loaded))
    assert compare(base, math) == ["1 tokens of math are unknown to base and left out of comparisons: '<pad>'"]
    assert compare(math, base) == ["1 tokens of base are unknown to math and left out of comparisons: '<pad>'"]


def test_a_model_without_a_tokenizer_file_is_not_compared(checkpoint):
    assert compare(checkpoint("base", tokens=TOKENS), checkpoint("math")) == []


def test_vocabularies_are_those_of_the_tokenizers_library(checkpoint):
    from tokenizers import Tokenizer, models

    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0))
    bpe = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    for name, tokenizer in (("unigram", unigram), ("bpe", bpe)):
        tokenizer.add_special_tokens(["<pad>"])
        folder = checkpoint(name)
        tokenizer.save(str(folder / "tokenizer.json"))
        assert vocabulary(resolve(parse_reference(str(folder)))) == tokenizer.get_vocab(with_added_tokens=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
        ("{}", "is not a tokenizer that can be read"),
        ('{"model": {"vocab": {"a": "b"}}}', "is not a tokenizer that can be read"),
        ('{"model": {"vocab": [3]}}', "is not a tokenizer that can be read"),
    ],
)
def test_a_tokenizer_file_that_cannot_be_read(checkpoint, content, message):
    base, math = checkpoint("base", tokens=TOKENS), checkpoint("math")
    (math / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=f"math/tokenizer.json {message}"):
        compare(base, math)


# Adapters


def test_adapters_on_one_base(checkpoint, adapter):
    base = checkpoint("base", tokens=TOKENS)
    math, code = adapter("math", str(base)), adapter("code", str(base), layers=(0, 1), r=2)
    assert compare(base, math, code) == []


def test_an_adapter_of_another_width(checkpoint, adapter):
    base = checkpoint("base")
    lines = [
        "adapter math: base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight [2, 5] does not fit "
        "model.layers.0.self_attn.q_proj.weight [4, 4]",
        "adapter math: base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight [6, 2] does not fit "
        "model.layers.0.self_attn.q_proj.weight [4, 4]",
    ]
    lora = adapter("math", str(base), shape=(6, 5))
    assert told(base, lora) == lines
    assert told(lora, base) == [line.replace("math", "base") for line in lines]


def test_an_adapter_knows_rows_from_columns(checkpoint, adapter):
    weights = tensors()
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.ones(6, 4)
    base = checkpoint("base", weights)
    assert compare(base, adapter("fits", str(base), shape=(6, 4))) == []
    assert len(told(base, adapter("turned", str(base), shape=(4, 6)))) == 2
    # Conv1D keeps weights the other way round
    assert compare(base, adapter("conv", str(base), shape=(4, 6), fan_in_fan_out=True)) == []


def test_an_adapter_of_a_deeper_model(checkpoint, adapter):
    base = checkpoint("base")
    assert told(base, adapter("math", str(base), layers=(0, 1, 2, 3))) == [
        "adapter math: its base lacks 2 modules that it changes: "
        "model.layers.2.self_attn.q_proj, model.layers.3.self_attn.q_proj"
    ]


def test_an_adapter_on_embeddings_as_peft_saves_it(tmp_path):
    import transformers
    from peft import LoraConfig, get_peft_model

    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    settings = LoraConfig(r=2, target_modules=["embed_tokens", "q_proj", "down_proj"])
    get_peft_model(model, settings).save_pretrained(str(tmp_path / "lora"), save_embedding_layers=False)
    assert compare(tmp_path / "base", f"{tmp_path}/base+{tmp_path}/lora") == []


def test_an_adapters_own_tokenizer_is_compared(checkpoint, adapter):
    base = checkpoint("base", tokens=TOKENS)
    lora = adapter("lora", str(base))
    (lora / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {**TOKENS, "a": 3, "c": 1}}}))
    (line,) = told(base, lora)
    assert line.startswith("2 tokens have other ids in math than in base: 'a' is 1 and 3, 'c' is 3 and 1")
