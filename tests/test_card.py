"""The model card: what the hub reads, scores and licences in words, snippets that run, nothing of this machine."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from cards import BASE, LICENCES, manifest, scores, write_export
from huggingface_hub import ModelCard
from tiny import tiny_model, tiny_tokenizer

from suture.evaluate.heldout import GUARD, Score
from suture.export.card import write_card
from suture.export.public import licences_of, public_recipe, public_reference
from suture.push import local_paths
from suture.report.tables import HEADER, markdown_table, score_rows

KINDS = ("hf", "vllm", "plain", "adapter", "gguf")
APACHE = (Path(__file__).parents[1] / "LICENSE").read_text()


def card_of(folder: Path, document: dict, licences: dict = LICENCES) -> str:
    folder.mkdir(exist_ok=True)
    for domain in document["domains"]:
        adapter = folder / "adapters" / domain
        adapter.mkdir(parents=True, exist_ok=True)
        (adapter / "adapter_config.json").write_text(json.dumps({"r": 4, "rank_pattern": {"q_proj": 20}}))
    (folder / "model.gguf").write_bytes(b"GGUF")
    write_card(folder, document, licences=licences)
    return (folder / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


# What the hub reads


@pytest.mark.parametrize("to", KINDS)
def test_the_hubs_client_reads_the_front_matter(tmp_path, to):
    card_of(tmp_path / "x", manifest(to))
    data = ModelCard.load(tmp_path / "x" / "README.md").data.to_dict()
    assert data["base_model"] == [BASE]  # and no local adapters
    assert data["base_model_relation"] == "merge"
    assert data["pipeline_tag"] == "text-generation"
    assert data["license"] == "apache-2.0"
    assert {"merge", "mergekit", "suture"} <= set(data["tags"])
    assert data.get("library_name") == (None if to == "gguf" else "transformers")


def test_parents_that_are_on_the_hub_are_all_named(tmp_path):
    models = [{"model": "org/a@v1"}, {"model": "org/base+org/lora"}, {"model": "here"}]
    recipe = {"merge": {"merge_method": "ties", "models": models, "base_model": "org/base"}}
    card_of(tmp_path / "x", manifest(recipe=recipe))
    data = ModelCard.load(tmp_path / "x" / "README.md").data.to_dict()
    assert data["base_model"] == ["org/base", "org/a", "org/lora"]


def test_a_checkpoint_that_was_merged_elsewhere(tmp_path):
    text = card_of(tmp_path / "x", manifest(recipe={"merged": "org/merged"}), {"org/merged": "mit"})
    data = ModelCard(text).data.to_dict()
    assert (data["base_model"], data["license"]) == (["org/merged"], "mit")
    assert "base_model_relation" not in data
    assert "mergekit" not in data["tags"]
    assert "`org/merged`" in text


@pytest.mark.parametrize(
    ("licences", "expected"),
    [
        ({BASE: "mit", "code": "mit", "math": "mit"}, "mit"),
        ({BASE: "mit", "code": "mit", "math": "apache-2.0"}, "other"),
        ({BASE: "other (gemma-like)", "code": "other (gemma-like)", "math": "other (gemma-like)"}, "other"),
        ({BASE: "mit", "code": "mit", "math": None}, None),
        ({}, None),
    ],
)
def test_the_licence_is_that_of_all_parents_or_is_not_stated(tmp_path, licences, expected):
    text = card_of(tmp_path / "x", manifest(), licences)
    data = ModelCard(text).data.to_dict()
    assert data.get("license") == expected
    assert not {"license_name", "license_link"} & set(data)
    for name in (BASE, "code", "math"):
        assert f"- `{name}`: {licences.get(name) or 'unknown'}" in text
    assert ("therefore not known" in text) is (expected is None)


# What is said


def test_the_merge_recipe_is_there_to_be_copied(tmp_path):
    (block,) = blocks(card_of(tmp_path / "x", manifest()), "yaml")
    assert yaml.safe_load(block) == manifest()["recipe"]["merge"]


def test_scores_are_those_of_what_was_exported_and_worse_is_said_in_words(tmp_path):
    text = card_of(tmp_path / "x", manifest(scores=scores("standard-l1")))
    assert markdown_table(HEADER, score_rows([Score(**row) for row in scores()])) in text
    assert "standard-l1" not in text
    assert "math: darts makes the merged model worse (held-out KL gap 50.0% wider)" in text
    assert "code: darts closes 50.0%" in text
    assert "30 prompts a domain, 64 tokens each" in text


def test_other_scores_that_got_worse_are_said_too(tmp_path):
    changed = {"agreement": 0.85, "perplexity": 1.6, "rho_l1": -0.1}
    rows = scores()
    for row in rows:
        if (row["domain"], row["model"], row["split"]) == ("code", "darts", "heldout"):
            row["value"] = changed.get(row["metric"], row["value"])
    text = card_of(tmp_path / "x", manifest(scores=rows))
    assert "- code: agreement is worse than the merged model's (85.00% with darts, 90.00% merged)" in text
    assert "- code: perplexity is further from the target's (1.600 with darts, 1.500 merged, 1.500 target)" in text
    assert "- code: the final hidden states are further from the target's" in text
    assert "- math: agreement" not in text
    assert "- math: perplexity" not in text


def test_a_domain_that_stays_uncorrected_is_said(tmp_path):
    document = manifest()
    document["corrections"]["math"]["strength"] = 0
    text = card_of(tmp_path / "x", document)
    assert "- math: no gain on held-back prompts" in text
    assert "- code: no gain" not in text


def test_one_correction_for_all_domains_with_text_of_none(tmp_path):
    heal = {"surgery": "heal", "module": "heal", "rank": None, "strength": 1.0, "parameters": 10}
    guard = [Score(GUARD, model, "perplexity", "heldout", value, 99) for model, value in (("merged", 10), ("heal", 11))]
    rows = [*scores("heal"), *(score.row() for score in guard)]
    text = card_of(tmp_path / "x", manifest("plain", corrections={"*": heal}, scores=rows))
    assert "| all | heal | heal |" in text
    assert "| code | heal |" in text
    assert "| code | darts |" not in text
    assert "text of no domain: perplexity 11.00 with heal, 10.00 merged (+10.00%)" in text
    assert "weights inside its layers" in text
    assert "One domain at a time" not in text


def test_limits_that_come_from_the_checkpoint_and_the_router(tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    modules = [{"module": "darts", "t_max": size} for size in (512, 384)]
    (folder / "config.json").write_text(json.dumps({"suture": {"modules": modules}}))
    router = {"accuracy": 0.97, "abstained": 0.04, "outside_abstained": 0.8}
    text = card_of(folder, manifest(router=router, default="auto"))
    assert "Positions from 384 on get no position term" in text
    assert all(share in text for share in ("97.0%", "4.0%", "80.0%"))
    assert "unless you choose, the router chooses" in text
    assert 'set_domain("auto")' in text


def test_an_export_without_scores_says_so(tmp_path):
    text = card_of(tmp_path / "x", manifest(scores=[]))
    assert "None were measured." in text


def test_the_figure_is_copied_and_shown(tmp_path):
    folder = write_export(tmp_path / "x")
    assert (folder / "figures" / "scores.png").read_bytes().startswith(b"\x89PNG")
    assert "](figures/scores.png)" in (folder / "README.md").read_text()
    assert "](figures/scores.png)" not in card_of(tmp_path / "y", manifest())


# Snippets


@pytest.mark.parametrize("to", KINDS)
def test_snippets_are_well_formed(tmp_path, to):
    text = card_of(tmp_path / "x", manifest(to))
    for block in blocks(text, "python"):
        ast.parse(block)
    for block in blocks(text, "bash"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    engines = {
        "hf": ("### transformers", "### vLLM", "suture chat", "suture serve", "lm_eval"),
        "vllm": ("### transformers", "vllm_xargs", "suture chat", "suture serve", "lm_eval"),
        "plain": ("AutoModelForCausalLM", "vllm serve", "suture chat", "suture serve", "lm_eval"),
        "adapter": ("PeftModel", "--max-lora-rank 32", "--max-loras 3", "suture chat", "peft=DIR"),
        "gguf": ("llama-server -m DIR/model.gguf",),
    }
    assert all(each in text for each in engines[to])


def test_the_snippet_of_a_plain_export_runs(tmp_path):
    model = tmp_path / "model"
    tiny_model().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    (block,) = blocks(card_of(tmp_path / "x", manifest("plain")), "python")
    found: dict = {}
    exec(block.replace("THIS_MODEL", str(model)).replace('"..."', '"ash bay"'), found)
    assert found["inputs"]["input_ids"].shape[1] > 1


def test_the_snippet_of_an_adapter_export_switches_domains(tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model

    model = tmp_path / "model"
    tiny_model().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    for seed, domain in enumerate(("code", "math")):
        torch.manual_seed(seed)
        settings = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        get_peft_model(tiny_model(), settings).save_pretrained(model / "adapters" / domain)
    (block,) = blocks(card_of(tmp_path / "x", manifest("adapter")), "python")
    found: dict = {}
    exec(block.replace("THIS_MODEL", str(model)).replace('"..."', '"ash bay"'), found)
    peft, inputs = found["model"], found["inputs"]
    with torch.no_grad():
        code = peft(**inputs).logits
        peft.set_adapter("math")
        math = peft(**inputs).logits
        with peft.disable_adapter():
            merged = peft(**inputs).logits
    assert torch.equal(merged, tiny_model()(**inputs).logits)
    assert not torch.allclose(code, math)
    assert not torch.allclose(code, merged)


# Names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", "org/name"),
        ("org/name@main", "org/name@main"),
        ("org/name+org/lora@v2", "org/name+org/lora@v2"),
        ("{here}/models/full", "full"),
        ("models/full", "full"),  # there, seen from the recipe's folder
        ("org/name+models/full", "org/name+full"),
        ("/nowhere/to/be/found", "found"),
        ("~/models/mine", "mine"),
        ("../elsewhere/mine", "mine"),
        ("C:\\models\\mine", "mine"),
        ("{here}/hub/models--org--name/snapshots/0a1b", "org/name"),
    ],
)
def test_references_without_folders(tmp_path, text, expected):
    (tmp_path / "models" / "full").mkdir(parents=True)
    assert public_reference(text.format(here=tmp_path), tmp_path) == expected


def test_copies_of_hub_models_have_their_name_back(tmp_path, monkeypatch):
    monkeypatch.setenv("SUTURE_HOME", str(tmp_path))
    kept = tmp_path / "models" / "org" / "name"
    kept.mkdir(parents=True)
    assert public_reference(f"{kept}+{kept}") == "org/name+org/name"


def test_a_recipe_without_folders_leaves_none_in_the_card(tmp_path):
    for name in ("full", "adapters/code"):
        (tmp_path / name).mkdir(parents=True)
    recipe = {
        "merge": {
            "merge_method": "ties",
            "base_model": str(tmp_path / "full"),
            "models": [
                {"model": f"org/base+{tmp_path}/adapters/code", "parameters": {"weight": 0.5}},
                {"model": "full"},
            ],
        },
        "domains": {
            "code": {"target": "adapters/code", "prompts": {"path": f"{tmp_path}/p.jsonl", "template": "/a {q}"}}
        },
        "guard": str(tmp_path / "guard.txt"),
    }
    told = public_recipe(recipe, tmp_path)
    assert told["merge"]["base_model"] == "full"
    assert told["merge"]["models"][0] == {"model": "org/base+code", "parameters": {"weight": 0.5}}
    assert told["domains"]["code"] == {"target": "code", "prompts": {"path": "p.jsonl", "template": "/a {q}"}}
    assert told["guard"] == "guard.txt"
    text = card_of(tmp_path / "x", manifest(recipe=told))
    assert str(tmp_path) not in text
    assert [path for line in text.splitlines() for path in local_paths(line)] == []


# Licences


def test_licences_of_base_and_adapter(tmp_path, adapter, checkpoint):
    base = checkpoint("base")
    (base / "LICENSE").write_text(APACHE)
    lora = adapter("lora", str(base))
    (lora / "README.md").write_text("---\nlicense: mit\ntags: [x]\n---\n# Mine\n")
    assert licences_of(["base+lora"], tmp_path) == {"base": "apache-2.0", "lora": "mit"}
    assert licences_of(["lora"], tmp_path) == {"base": "apache-2.0", "lora": "mit"}  # its config names the base


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("README.md", "---\r\nlicense: other\r\nlicense_name: my-own\r\n---\r\n", "other (my-own)"),
        ("README.md", "---\nlicense: [mit, apache-2.0]\n---\n", "mit, apache-2.0"),
        ("README.md", "---\nbroken: [\n---\n", None),
        ("README.md", "# MIT, says its author\n", None),
        ("LICENSE.txt", "MIT License\n\nPermission is hereby granted, free\nof charge, to any person", "mit"),
        ("LICENSE", "LLAMA 3.1 COMMUNITY LICENSE AGREEMENT", "llama3.1"),
        ("LICENCE", "You may look at it.", "other"),
        ("config.json", '{"license": "gemma"}', "gemma"),
        ("config.json", "{", None),
    ],
)
def test_where_a_licence_is_found(tmp_path, file, text, expected):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / file).write_text(text)
    assert licences_of([str(tmp_path / "m")]) == {"m": expected}


def test_a_licence_of_a_copy_of_the_hub_and_none_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("SUTURE_HOME", str(tmp_path))
    (tmp_path / "models" / "org" / "kept").mkdir(parents=True)
    (tmp_path / "models" / "org" / "kept" / "README.md").write_text("---\nlicense: mit\n---\n")
    assert licences_of(["org/kept", "org/unheard-of@main"]) == {"org/kept": "mit", "org/unheard-of": None}
