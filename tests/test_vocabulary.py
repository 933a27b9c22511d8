"""Merges whose parents have tokens of their own, and what stops a text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny import nearby, tiny_model, tiny_tokenizer

from suture.capture import end_tokens
from suture.errors import FamilyError, MergeError, PromptError
from suture.generate import generate_text
from suture.merge import Merge
from suture.models import load_tokenizer
from suture.pipeline import Run
from suture.recipe import parse_recipe
from suture.sampling import Settings
from suture.store import Store

CPU = torch.device("cpu")
WORDS = [f"{a}{b}" for a in "abcdefg" for b in "hijklm"]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a fine-tune `one` with the token <|one|>, and `two` with <|two|>, both at the same new id."""
    folder = tmp_path_factory.mktemp("family")
    base = tiny_model(initializer_range=0.4, vocab_size=99)
    base.config.architectures = ["LlamaForCausalLM"]
    base.generation_config.eos_token_id = 2
    base.generation_config.repetition_penalty = 5.0
    base.save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    for seed, name in enumerate(("one", "two")):
        model = nearby(base, seed, 0.2)
        model.resize_token_embeddings(100, mean_resizing=False)
        tokenizer = tiny_tokenizer(chat=True)
        tokenizer.add_special_tokens({"extra_special_tokens": [f"<|{name}|>"]})
        model.generation_config.eos_token_id = [2, 99]
        model.requires_grad_(False).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "words.txt").write_text("\n".join(WORDS))
    (folder / "one.txt").write_text("\n".join(f"<|one|>{word}" for word in WORDS))
    return folder


def merge_of(*models: str, **more: Any) -> dict[str, Any]:
    parents = [{"model": name, "parameters": {"weight": 0.5}} for name in models]
    return {
        "merge_method": "task_arithmetic" if "base_model" in more else "linear",
        "models": parents,
        "dtype": "float32",
        **more,
    }


def job_of(family: Path, store: Path, **changes: Any) -> Run:
    data = {
        "merge": merge_of("base", "one", tokenizer_source="base"),
        "domains": {"one": {"target": "one", "prompts": "words.txt"}},
        "surgery": {"rank": 4, "T_max": 16, "steps": 5, "samples": 10},
        "heldout": {"samples": 5, "tokens": 8},
        "device": "cpu",
        **changes,
    }
    return Run(parse_recipe(data, family), store=Store(store))


def test_a_union_has_the_same_ids_in_every_process(family: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, yaml
        from pathlib import Path
        from suture.merge import Merge
        merge = Merge(yaml.safe_load(sys.argv[1]), Path(sys.argv[2]))
        vocabulary = merge.tokenizer.get_vocab()
        print(vocabulary["<|one|>"], vocabulary["<|two|>"], merge.config_out().vocab_size)
        """
    )
    config = yaml.safe_dump(merge_of("one", "two", base_model="base", tokenizer_source="union"))
    said = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, config, str(family)],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        said.add(done.stdout)
    assert said == {"99 100 101\n"}


def test_a_union_is_compared_with_each_target(family: Path, tmp_path: Path) -> None:
    """In the union <|two|> has another id than in `two`: its prompts would be read as other text."""
    merge = merge_of("one", "two", base_model="base", tokenizer_source="union")
    domains = {name: {"target": name, "prompts": "words.txt"} for name in ("one", "two")}
    with pytest.raises(
        FamilyError, match=r"other ids in the target of two than in the merged model: '<\|two\|>' is 100 and 99"
    ):
        job_of(family, tmp_path / "store", merge=merge, domains=domains)
    scores = (
        job_of(family, tmp_path / "store", merge=merge, domains={"one": domains["one"]}).run(tmp_path / "run").scores
    )
    assert {score.model for score in scores} == {"target", "merged", "darts"}


def test_written_unions_load_with_their_tokenizer(family: Path, tmp_path: Path) -> None:
    merge = Merge(merge_of("one", "two", base_model="base", tokenizer_source="union", chat_template="chatml"), family)
    merge.write(tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.convert_tokens_to_ids(["<|one|>", "<|two|>"]) == [99, 100]
    assert "<|im_start|>" in tokenizer.chat_template
    assert merge.model(torch.float32, CPU).get_input_embeddings().weight.shape == (101, 32)
    with pytest.raises(MergeError, match=r"merge\.chat_template: Invalid"):
        Merge(merge_of("base", chat_template="nonsense"), family).write(tmp_path / "bad")


def test_a_tokenizer_from_a_folder_beside_the_recipe(family: Path) -> None:
    merge = Merge(merge_of("one", "base", tokenizer={"source": "one"}), family)
    assert merge.tokenizer.convert_tokens_to_ids("<|one|>") == 99


def test_a_token_that_only_the_target_has_ends_its_text(family: Path, tmp_path: Path) -> None:
    job = job_of(family, tmp_path / "store")
    member = job.members["one"]
    assert job.rows == 99
    with job.store.create("responses", job.response_inputs(member)) as folder:
        ids = [
            [*row.tolist(), 7, 8, *([99] if index % 2 else [9])] for index, row in enumerate(member.prompts.sequences)
        ]
        rows = {"ids": ids, "prompt_lengths": member.prompts.lengths.tolist()}
        (folder / "responses.json").write_text(json.dumps(rows))
    found = job.tokens(member, "heldout")
    assert (found.lengths - found.prompt_lengths).tolist() == [3, 2, 3, 2, 3]
    assert all(score.n_tokens == 13 for score in job.run(tmp_path / "run").scores if score.split == "heldout")


def test_prompts_with_a_token_that_the_merged_model_lacks_are_told(family: Path, tmp_path: Path) -> None:
    with pytest.raises(
        PromptError, match=r"domains\.one: the prompts hold the token '<\|one\|>' \(99\), which the merged model"
    ):
        job_of(family, tmp_path / "store", domains={"one": {"target": "one", "prompts": "one.txt"}})


def test_texts_longer_than_a_model_reads_are_told(family: Path, tmp_path: Path) -> None:
    with pytest.raises(
        PromptError, match=r"texts of up to 202 tokens, but .*base reads 128 at most: lower max_length or heldout"
    ):
        job_of(family, tmp_path / "store", heldout={"samples": 5, "tokens": 200})


def test_prompts_that_are_the_same_once_cut_are_told(family: Path, tmp_path: Path) -> None:
    (family / "long.txt").write_text("\n".join("x" * 30 + word for word in WORDS))
    with pytest.raises(
        PromptError,
        match="5 held-out prompts are calibration prompts token for token once they are cut to max_length 20",
    ):
        job_of(family, tmp_path / "store", domains={"one": {"target": "one", "prompts": "long.txt"}}, max_length=20)


def test_more_calibration_prompts_leave_the_held_out_ones(family: Path, tmp_path: Path) -> None:
    few, many = (
        job_of(family, tmp_path / "store", surgery={"rank": 4, "samples": samples}).members["one"].split
        for samples in (10, 20)
    )
    assert few.heldout_rows == many.heldout_rows
    assert many.calibration_rows[:10] == few.calibration_rows


def test_a_merged_model_stops_where_its_parents_stop(family: Path, tmp_path: Path) -> None:
    merge = Merge(merge_of("base", "one", tokenizer_source="base"), family)
    assert end_tokens(merge.model(torch.float32, CPU)) == {2, 99}
    merge.write(tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [2, 99]
    assert settings["repetition_penalty"] == 5.0  # the donor's other settings are carried over


def test_generation_stops_where_the_target_stops_and_is_greedy(family: Path, tmp_path: Path) -> None:
    """A ready-made merged model whose own settings know nothing of the target's end token, and punish repetition."""
    job = job_of(family, tmp_path / "store", merge=None, merged="base", surgery={"rank": 4, "steps": 5, "samples": 10})
    member, model = job.members["one"], job.merged_model()
    naive = member.tokenizer("ah").input_ids
    start = len(naive)
    while len(naive) < start + 12:
        naive.append(int(model(input_ids=torch.tensor([naive])).logits[0, -1].argmax()))
    end = naive[start + 4]
    stop = naive.index(end, start) + 1
    path = family / "one" / "generation_config.json"
    kept = path.read_text()
    path.write_text(json.dumps({**json.loads(kept), "eos_token_id": [end]}))
    try:
        found = generate_text(job, member, "ah", None, Settings(max_new_tokens=12))
    finally:
        path.write_text(kept)
    assert found["tokens"] == stop - start
    assert found["text"] == member.tokenizer.decode(naive[start:stop], skip_special_tokens=True)
