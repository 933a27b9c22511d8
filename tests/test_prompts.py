"""Prompts are what the file says, never shared between calibration and evaluation, and tokenised one way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from suture.errors import PromptError
from suture.prompts import Split, apply_template, read_prompts, split_prompts, tokenize
from suture.recipe import Domain, Prompts

ROWS = [{"prompt": "one", "question": "1+1?", "hint": "two"}, {"prompt": "zwei ü", "question": "2*2?", "hint": 4}]


def write(folder: Path, name: str, rows: list[Any]) -> str:
    file = folder / name
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    elif file.suffix == ".txt":
        file.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return name


def read(folder: Path, name: str, **fields: Any) -> list[str]:
    return read_prompts(Prompts(path=name, **fields), folder, "domains.math.prompts")


def refused(folder: Path, name: str, **fields: Any) -> str:
    with pytest.raises(PromptError) as told:
        read(folder, name, **fields)
    assert str(told.value).startswith("domains.math.prompts: ")
    return str(told.value).removeprefix("domains.math.prompts: ")


# Sources


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.parquet"])
def test_fields_and_templates(tmp_path, name):
    rows = [{**row, "hint": str(row["hint"])} for row in ROWS]
    write(tmp_path, name, rows)
    assert read(tmp_path, name) == ["one", "zwei ü"]
    assert read(tmp_path, name, field="question") == ["1+1?", "2*2?"]
    template = "Q: {question}\n({hint}, {{really}})\nA:"
    assert read(tmp_path, name, template=template) == ["Q: 1+1?\n(two, {really})\nA:", "Q: 2*2?\n(4, {really})\nA:"]


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    (tmp_path / "p.txt").write_bytes("first line\r\n\n  \nzweite: ü {x}\n".encode())
    assert read(tmp_path, "p.txt") == ["first line", "zweite: ü {x}"]
    assert read(tmp_path, "p.txt", template="Say: {prompt}") == ["Say: first line", "Say: zweite: ü {x}"]


def test_a_list_of_texts_is_enough(tmp_path):
    assert read(tmp_path, write(tmp_path, "p.json", ["a", "b"])) == ["a", "b"]
    assert read(tmp_path, write(tmp_path, "p.jsonl", ["a", "b"]), template="<{prompt}>") == ["<a>", "<b>"]


def test_paths_may_be_absolute(tmp_path):
    write(tmp_path, "p.txt", ["a"])
    assert read(Path("/"), str(tmp_path / "p.txt")) == ["a"]


def test_numbers_are_texts(tmp_path):
    write(tmp_path, "p.jsonl", [{"n": 3}, {"n": 0.5}])
    assert read(tmp_path, "p.jsonl", field="n") == ["3", "0.5"]
    assert read(tmp_path, "p.jsonl", template="{n:.2f}") == ["3.00", "0.50"]


def test_other_separators_of_unicode_do_not_end_a_row(tmp_path):
    texts = ["a\u2028b", "c\x85d", "e\x0cf"]
    assert read(tmp_path, write(tmp_path, "p.jsonl", [{"prompt": text} for text in texts])) == texts
    assert read(tmp_path, write(tmp_path, "p.txt", texts)) == texts


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.txt"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, name):
    write(tmp_path, name, ["a", "b"] if name != "p.jsonl" else [{"prompt": "a"}, {"prompt": "b"}])
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    assert read(tmp_path, name) == ["a", "b"]


def test_a_field_may_have_any_name(tmp_path):
    write(tmp_path, "p.jsonl", [{"user.text": "a", "x:y": "b", "the {prompt}": "c"}])
    for field, text in (("user.text", "a"), ("x:y", "b"), ("the {prompt}", "c")):
        assert read(tmp_path, "p.jsonl", field=field) == [text]


def test_a_data_set_of_the_datasets_library(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "train.jsonl", ROWS[:1])
    source = Prompts(dataset=str(tmp_path / "data"), template="{question}!")
    assert read_prompts(source, Path("/"), "here") == ["1+1?!"]
    gone = Prompts(dataset=str(tmp_path / "gone"))
    with pytest.raises(PromptError, match=r"here: cannot load the data set .*gone: "):
        read_prompts(gone, Path("/"), "here")


# Faults


def test_an_unknown_field_is_told_with_the_nearest(tmp_path):
    write(tmp_path, "p.jsonl", [*ROWS, {"promt": "x", "question": "y"}])
    told = refused(tmp_path, "p.jsonl")
    assert told == "row 2 has no field 'prompt'; did you mean 'promt'? (set `field` or `template` to choose)"
    assert refused(tmp_path, "p.jsonl", field="qestion") == "row 0 has no field 'qestion'; did you mean 'question'?"
    told = refused(tmp_path, "p.jsonl", template="{question} {zzz}")
    assert told == "row 0 has no field 'zzz'; known: hint, prompt, question"


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.txt"])
def test_an_empty_file(tmp_path, name):
    write(tmp_path, name, [])
    assert refused(tmp_path, name) == f"{name} holds no prompts"


def test_empty_prompts_are_told_by_row(tmp_path):
    write(tmp_path, "p.jsonl", [{"prompt": text} for text in ("a", "", "b", " \n\t")])
    assert refused(tmp_path, "p.jsonl") == "empty prompts in rows [1, 3] of p.jsonl"


@pytest.mark.parametrize(
    ("value", "what"), [(None, "empty"), ([{"role": "user"}], "a list"), ({"text": "x"}, "a dict")]
)
def test_a_field_that_is_no_text(tmp_path, value, what):
    write(tmp_path, "p.jsonl", [{"prompt": "a"}, {"prompt": value}])
    expected = f"field 'prompt' of row 1 is {what}, not a text"
    assert refused(tmp_path, "p.jsonl") == expected
    assert refused(tmp_path, "p.jsonl", template="Q: {prompt}") == expected


def test_a_row_that_is_no_object(tmp_path):
    assert refused(tmp_path, write(tmp_path, "p.json", ["a", 3])) == "row 1 is a int, not a text or an object"


def test_a_missing_file(tmp_path):
    assert refused(tmp_path, "gone.jsonl") == f"no such file: {tmp_path}/gone.jsonl"
    assert refused(tmp_path, ".") == f"no such file: {tmp_path}"


def test_a_line_that_is_not_json_is_counted_as_editors_do(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"\n')
    assert refused(tmp_path, "p.jsonl").startswith(f"line 3 of {tmp_path}/p.jsonl is not JSON: ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.json", b'{"data": []}', "{} should hold a list"),
        ("p.json", b"[", "cannot read {}: "),
        ("p.txt", b"caf\xe9\n", "{} is not UTF-8 text: save it as UTF-8"),
        ("p.parquet", b"not parquet", "cannot read {}: "),
        ("p.csv", b"prompt\na\n", "{} should end in .jsonl, .json, .parquet or .txt"),
        ("p.jsonl.gz", b"\x1f\x8b", "{} should end in .jsonl, .json, .parquet or .txt"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert refused(tmp_path, name).startswith(message.format(tmp_path / name))


@pytest.mark.parametrize("template", ["{question:d}", "{question!x}"])
def test_a_template_that_cannot_be_filled(tmp_path, template):
    write(tmp_path, "p.jsonl", ROWS)
    assert refused(tmp_path, "p.jsonl", template=template).startswith(f"the template {template!r} cannot be filled: ")


def test_a_new_prompt_in_a_sources_form():
    assert apply_template(Prompts(path="p"), "2*3? {x}") == "2*3? {x}"
    assert apply_template(Prompts(path="p", field="question"), "2*3?") == "2*3?"
    assert (
        apply_template(Prompts(path="p", template="Q: {q} {{}} again {q}\nA:"), "2*3?") == "Q: 2*3? {} again 2*3?\nA:"
    )
    for template in ("{q} {hint}", "nothing"):
        with pytest.raises(PromptError, match="write the whole prompt and use --raw"):
            apply_template(Prompts(path="p", template=template), "2*3?")


# Splits


def split(folder: Path, texts: list[str], others: list[str] | None = None, **asked: int) -> Split:
    write(folder, "p.jsonl", [{"prompt": text} for text in texts])
    fields: dict[str, Any] = {"target": "t", "prompts": "p.jsonl"}
    if others is not None:
        fields["heldout"] = write(folder, "h.txt", others)
    return split_prompts(Domain(**fields), "math", folder, **{"calibration": 3, "heldout": 2, "seed": 0, **asked})


LETTERS = [f"prompt {letter}" for letter in "abcdefgh"]


def test_splits_are_disjoint_and_say_their_rows(tmp_path):
    found = split(tmp_path, LETTERS, calibration=5, heldout=3)
    assert sorted(found.calibration + found.heldout) == LETTERS
    assert [LETTERS[row] for row in found.calibration_rows] == found.calibration
    assert [LETTERS[row] for row in found.heldout_rows] == found.heldout
    assert (len(found.calibration), len(found.heldout), found.dropped) == (5, 3, 0)


def test_the_same_seed_splits_the_same(tmp_path):
    first = split(tmp_path, LETTERS, seed=3)
    assert split(tmp_path, LETTERS, seed=3) == first
    assert len({tuple(split(tmp_path, LETTERS, seed=seed).calibration) for seed in range(5)}) > 1


def test_what_occurs_twice_counts_once(tmp_path):
    found = split(tmp_path, ["a", "b", " a", "c", "b\n", "d", "e"])
    assert found.dropped == 2
    assert sorted(found.calibration_rows + found.heldout_rows) == [0, 1, 3, 5, 6]
    with pytest.raises(
        PromptError, match=r"domains\.math\.prompts: 4 different prompts, but 3 to calibrate and 2 held"
    ):
        split(tmp_path, ["a", "b", " a", "c", "b\n", "d"])


def test_held_out_prompts_from_elsewhere(tmp_path):
    others = ["x", "y", "x", "z"]
    found = split(tmp_path, LETTERS[:3], others, calibration=3, heldout=3)
    assert sorted(found.calibration) == LETTERS[:3]
    assert sorted(found.heldout) == ["x", "y", "z"]
    assert [others[row] for row in found.heldout_rows] == found.heldout


def test_too_few_of_either(tmp_path):
    with pytest.raises(PromptError, match=r"domains\.math\.prompts: 2 different prompts, but 3 to calibrate are asked"):
        split(tmp_path, ["a", "b"], ["x", "y"])
    with pytest.raises(PromptError, match=r"domains\.math\.heldout: 1 different prompts, but 2 are asked for"):
        split(tmp_path, ["a", "b", "c"], ["x", "x"])


def test_prompts_shared_by_both_sources_are_told_by_row(tmp_path):
    with pytest.raises(PromptError) as told:
        split(tmp_path, ["a", "b", "c"], ["x", "  c "])
    assert str(told.value) == (
        "domains.math: 1 prompts would both calibrate and evaluate: row 2 = held-out row 1; remove them from one"
    )


def test_faults_name_the_source(tmp_path):
    with pytest.raises(PromptError, match=r"^domains\.math\.heldout: h\.txt holds no prompts"):
        split(tmp_path, ["a", "b", "c"], [])


# Tokens

WORDS = ["<unk>", "<s>", "</s>", "user", "system", ":", "one", "two", "three", "reply"]
CHAT = (
    "<s>{% for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}reply :{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Whole words; like Llama's it puts <s> before every text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture
def chatty(tokenizer, monkeypatch) -> Any:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    return tokenizer


def test_plain_prompts_get_the_tokens_that_a_tokenizer_always_adds(tokenizer):
    found = tokenize(tokenizer, ["one two", "three"])
    assert found.ids.tolist() == [1, 6, 7, 1, 8]
    assert found.lengths.tolist() == [3, 2]
    assert found.prompt_lengths.tolist() == [3, 2]


def test_a_chat_template_writes_all_special_tokens_itself(chatty):
    found = tokenize(chatty, ["one", "two three"], chat_template=True)
    assert [[WORDS[index] for index in row] for row in found.sequences] == [
        ["<s>", "user", ":", "one", "reply", ":"],
        ["<s>", "user", ":", "two", "three", "reply", ":"],
    ]
    # as transformers does it in one step
    messages = [{"role": "user", "content": "two three"}]
    whole = chatty.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)
    assert found.sequences[1].tolist() == whole["input_ids"]


def test_a_system_message_comes_first(chatty):
    (found,) = tokenize(chatty, ["one"], chat_template=True, system="three").sequences
    assert [WORDS[index] for index in found] == ["<s>", "system", ":", "three", "user", ":", "one", "reply", ":"]


def test_long_prompts_are_cut_at_their_end(chatty):
    found = tokenize(chatty, ["one two three", "one"], max_length=3)
    assert [row.tolist() for row in found.sequences] == [[1, 6, 7], [1, 6]]
    assert tokenize(chatty, ["one two"], chat_template=True, max_length=4).ids.tolist() == [1, 3, 5, 6]


def test_a_missing_template(tokenizer):
    with pytest.raises(PromptError, match="chat_template is on, but the target's tokenizer has none: turn it off"):
        tokenize(tokenizer, ["one"], chat_template=True)


def test_a_template_that_refuses_a_system_message(tokenizer, monkeypatch):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}one"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert tokenize(tokenizer, ["two"], chat_template=True).ids.tolist() == [6]
    with pytest.raises(
        PromptError, match="the target's chat template refuses these messages: System role not supported"
    ):
        tokenize(tokenizer, ["two"], chat_template=True, system="three")


def test_a_prompt_without_tokens():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"one": 0}, unk_token="one"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bare = PreTrainedTokenizerFast(tokenizer_object=inner)
    with pytest.raises(PromptError, match="the tokenizer makes no tokens of '  '"):
        tokenize(bare, ["one", "  "])


def test_a_data_set_beside_the_recipe(tmp_path, monkeypatch):
    """The `datasets` library reads it; a name that is no folder would be looked up on the hub."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "test.jsonl").write_text('{"question": "one"}\n{"question": "two"}\n')
    source = Prompts(dataset="words", split="test", template="Q: {question}")
    assert read_prompts(source, tmp_path, "here") == ["Q: one", "Q: two"]
    with pytest.raises(PromptError, match="here: cannot load the data set words"):
        read_prompts(Prompts(dataset="words", split="train", field="question"), tmp_path, "here")
