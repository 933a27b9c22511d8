"""The demo on real models, from the command line. `make test-slow` puts the base model where suture finds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow
RECIPE = Path(__file__).parent.parent / "examples" / "smollm2" / "recipe.yaml"
# the suite gives each test a home of its own; the base model lies in the user's
HOME = os.environ.get("SUTURE_HOME") or str(Path.home() / ".cache" / "suture")


def suture(*arguments: str, store: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SUTURE_HOME": HOME, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "suture.cli", *arguments, "--store", str(store)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """(folder, the `--json` document) of the demo, from an empty store."""
    place = tmp_path_factory.mktemp("demo")
    done = suture("run", str(RECIPE), "--out", str(place / "run"), "--json", store=place / "store")
    assert done.returncode == 0, done.stderr
    return place, json.loads(done.stdout)


def test_demo_scores_are_honest_and_whole(demo: tuple[Path, dict[str, Any]]) -> None:
    place, document = demo
    rows = json.loads((place / "run" / "scores.json").read_text())
    assert rows == document["scores"]
    value = {(r["domain"], r["model"], r["metric"]): r for r in rows if r["split"] == "heldout"}
    for domain in ("code", "math", "instruct"):
        assert value[domain, "target", "kl"]["value"] == 0
        assert value[domain, "target", "agreement"]["value"] == 1
        merged = value[domain, "merged", "kl"]
        # the design study of this family measured 0.051, 0.056 and 0.036 on the data sets' reference answers
        assert 0.02 < merged["value"] < 0.12
        assert merged["n_tokens"] > 500
        for surgery in ("standard-l1", "darts"):
            assert value[domain, surgery, "kl"]["value"] < merged["value"]
            assert value[domain, surgery, "rho_l1"]["value"] > 0.03
    assert document["peak_bytes"] < 4 * 2**30


def test_repair_inside_the_layers_closes_most_of_the_gap(demo: tuple[Path, dict[str, Any]]) -> None:
    """The published module closes a tenth to a fifth of it, and a LoRA extracted without data less than `deep`."""
    kl = {
        (row["domain"], row["model"]): row["value"]
        for row in demo[1]["scores"]
        if (row["metric"], row["split"]) == ("kl", "heldout")
    }
    for domain in ("code", "math", "instruct"):
        closed = {
            model: 1 - kl[domain, model] / kl[domain, "merged"]
            for model in ("darts", "auto", "affine", "svd", "deep", "heal")
        }
        assert closed["deep"] >= 0.92
        assert closed["heal"] >= 0.9
        assert closed["deep"] > closed["svd"]
        assert closed["auto"] >= 1.5 * closed["darts"]
        assert min(closed.values()) >= 0
    guard = {row["model"]: row["value"] for row in demo[1]["scores"] if row["domain"] == "guard"}
    assert guard["heal"] <= 1.01 * guard["merged"]
    assert not list((demo[0] / "store" / "residuals").glob("[0-9a-f]*"))


def test_the_healed_checkpoint_is_what_was_scored(demo: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, document = demo
    done = suture("heal", str(RECIPE), "--out", str(place / "healed"), "--json", store=place / "store")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verified"][0]["logits"] < 1e-5
    assert found["verified"][0]["greedy"] == "96/96"
    rows = {(row["domain"], row["model"], row["metric"], row["split"]): row["value"] for row in document["scores"]}
    for row in found["scores"]:
        if row["split"] == "heldout":
            expected = rows[row["domain"], row["model"], row["metric"], row["split"]]
            assert row["value"] == pytest.approx(expected, abs=1e-9)
    model = AutoModelForCausalLM.from_pretrained(place / "healed")
    tokenizer = AutoTokenizer.from_pretrained(place / "healed")
    prompt = tokenizer("Question: A box holds 6 eggs. How many eggs are in 4 boxes?\nAnswer:", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=24, do_sample=False)[0])
    assert "24" in text


def test_a_deep_adapter_is_loaded_by_peft(demo: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import PeftModel

    from suture.capture import capture
    from suture.pipeline import Run, read_recipe
    from suture.repair.patch import Patch, patched
    from suture.store import Store

    monkeypatch.setenv("SUTURE_HOME", HOME)
    place, _ = demo
    job = Run(read_recipe(place / "run"), store=Store(place / "store"))
    model = job.merged_model()
    tokens = job.tokens(job.members["code"], "heldout").first(2)
    folder = place / "run" / "surgery" / "code" / "deep"
    with patched(model, Patch.load(folder)):
        expected = capture(model, tokens).states
    adapted = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    torch.testing.assert_close(capture(adapted, tokens).states, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("kind", "label"), [("hf", "auto"), ("adapter", "deep"), ("plain", "affine")])
def test_exports_do_what_was_scored_and_talk(demo: tuple[Path, dict[str, Any]], kind: str, label: str) -> None:
    """Each in a process of its own; then a conversation from the command line."""
    place, _ = demo
    out = place / kind
    more = ["--domain", "math"] if kind == "plain" else []
    run = ("export", str(place / "run"), "--to", kind, "--surgery", label, "--out", str(out), "--json", *more)
    done = suture(*run, store=place / "store")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (checked,) = found["verified"]
    assert checked["logits"] <= 1e-5
    right, count = map(int, checked["greedy"].split("/"))
    assert right == count >= 32
    name = "linear" if label == "affine" else label  # a head without bias holds no constant
    closed = {row["model"]: row["value"] for row in found["scores"] if (row["domain"], row["metric"]) == ("math", "kl")}
    assert closed[name] < closed["merged"]
    if kind == "hf":
        router = json.loads((out / "suture.json").read_text())["router"]
        assert router["accuracy"] >= 0.95
        assert router["outside_abstained"] >= 0.9
    environment = {**os.environ, "SUTURE_HOME": HOME, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "suture.cli", "chat", str(out), "--domain", "math", "--max-new-tokens", "24"]
    question = "A box holds 6 eggs. How many eggs are in 4 boxes?\n"
    talked = subprocess.run(command, env=environment, input=question, capture_output=True, text=True)
    assert talked.returncode == 0, talked.stderr
    assert "eggs" in talked.stdout  # what it says of them is the model's affair


def test_second_run_reuses_everything_and_says_the_same(demo: tuple[Path, dict[str, Any]]) -> None:
    place, document = demo
    done = suture("run", str(RECIPE), "--out", str(place / "again"), "--json", store=place / "store")
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert again["scores"] == document["scores"]
    assert "heal" in again["reused"]
    assert again["peak_bytes"] < 2 * 2**30  # no language model was loaded


def test_generate_streams_on_real_models(demo: tuple[Path, dict[str, Any]]) -> None:
    place, _ = demo
    question = "Tom has 3 boxes of 12 pencils. He gives away 6 pencils. How many pencils are left?"
    arguments = ["generate", str(place / "run"), "--domain", "math", "--prompt", question, "--max-new-tokens", "24"]
    streamed = suture(*arguments, "--quiet", store=place / "store")
    document = suture(*arguments, "--json", store=place / "store")
    assert streamed.returncode == document.returncode == 0, streamed.stderr
    text = json.loads(document.stdout)["text"]
    assert streamed.stdout == text + "\n"
    assert any(letter.isdigit() for letter in text)


def test_left_padded_batches_of_the_real_merged_model_answer_as_single_prompts(
    demo: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from suture.attach import attach
    from suture.pipeline import Run, read_recipe
    from suture.store import Store
    from suture.surgery import load_surgery

    monkeypatch.setenv("SUTURE_HOME", HOME)
    place, _ = demo
    job = Run(read_recipe(place / "run"), store=Store(place / "store"))
    model, member = job.merged_model(), job.members["math"]
    surgery = load_surgery(place / "run" / "surgery" / "math" / "darts")
    sequences = sorted(member.prompts.sequences, key=len)
    prompts = [sequences[0], sequences[-1], sequences[len(sequences) // 2]]
    width = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in prompts])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (width - len(row), 0)) for row in prompts])
    settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    with attach(model, {"math": surgery}).domain("math"):
        together = model.generate(ids, attention_mask=mask, **settings)[:, width:]
        for row, prompt in zip(together, prompts, strict=True):
            alone = model.generate(
                prompt[None], attention_mask=torch.ones(1, len(prompt), dtype=torch.long), **settings
            )
            written = alone[0, len(prompt) :].tolist()
            assert row.tolist()[: len(written)] == written
