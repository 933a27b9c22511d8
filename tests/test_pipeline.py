"""The whole way on a tiny family: files in, a run's folder out; nothing made twice; nothing half-made kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from relatives import WORDS, open_run, recipe, write
from tiny import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

from suture.attach import attach
from suture.bias import bias, reduction
from suture.cli import app
from suture.errors import FamilyError, ModelError, PromptError, RecipeError, ResourceError, StoreError, SutureError
from suture.models import load
from suture.pipeline import Run, read_recipe
from suture.recipe import load_recipe
from suture.store import Store
from suture.surgery import load_surgery


@pytest.fixture(scope="module")
def finished(family: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(store, folder) of one finished run."""
    place = tmp_path_factory.mktemp("finished")
    open_run(family / "recipe.yaml", place).run(place / "run")
    return place, place / "run"


def test_a_run_leaves_scores_figures_and_modules(finished: tuple[Path, Path]) -> None:
    _, folder = finished
    rows = json.loads((folder / "scores.json").read_text())
    assert {tuple(row) for row in rows} == {("domain", "model", "metric", "split", "value", "n_tokens")}
    held = {(r["domain"], r["model"], r["metric"]) for r in rows if r["split"] == "heldout"}
    models, metrics = ("target", "merged", "standard-l1", "darts"), ("kl", "agreement", "perplexity", "rho_l1")
    assert held == {(d, m, x) for d in ("math", "chat") for m in models for x in metrics}
    assert {r["metric"] for r in rows if r["split"] == "calibration"} == {"rho_l1"}
    for name in ("scores", "bias", "entropy", "losses"):
        assert (folder / "figures" / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    history = json.loads((folder / "surgery" / "math" / "darts" / "history.json").read_text())
    assert len(history["losses"]) == 30
    assert not set(history["calibration_rows"]) & set(history["heldout_rows"])
    import pyarrow.parquet as parquet

    table = parquet.read_table(folder / "bias" / "chat" / "bias.parquet")
    assert table.column_names == ["sample", "position", "delta", "entropy"]
    provenance = json.loads((folder / "run.json").read_text())
    assert [weight["effective"] for weight in provenance["weights"]] == [0.5, 0.5]
    text = (folder / "report.md").read_text()
    assert "Merged by `task_arithmetic`" in text
    assert "- weight 0.5: full" in text
    assert "too few to rank corrections" in text
    assert "| math | darts |" in text


def test_scores_hold_on_models_loaded_by_hand(family: Path, finished: tuple[Path, Path]) -> None:
    """ρ_L1 of the report against states that hooks on transformers' models give for the kept responses."""
    place, folder = finished
    job = open_run(family / "recipe.yaml", place)
    rows = json.loads((folder / "scores.json").read_text())
    merged, target = job.merged_model(), load(f"{family}/base+{family}/lora", device="cpu")[0]
    member = job.members["chat"]
    tokens = job.tokens(member, "heldout")
    surgery = load_surgery(folder / "surgery" / "chat" / "darts")
    attached = attach(merged, {"chat": surgery})
    before, after = [], []
    for row, start in zip(tokens.sequences, tokens.prompt_lengths.tolist(), strict=True):
        ids = row[None]
        wanted = target.model(input_ids=ids).last_hidden_state[0, start - 1 : -1]
        before.append(bias(merged.model(input_ids=ids).last_hidden_state[0, start - 1 : -1], wanted))
        with attached.domain("chat"):
            after.append(bias(merged.model(input_ids=ids).last_hidden_state[0, start - 1 : -1], wanted))
    (found,) = [
        r["value"]
        for r in rows
        if (r["domain"], r["model"], r["metric"], r["split"]) == ("chat", "darts", "rho_l1", "heldout")
    ]
    assert found == pytest.approx(reduction(torch.cat(before), torch.cat(after)), abs=1e-4)


def test_a_second_run_loads_no_model(
    family: Path, finished: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, folder = finished

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("suture.reading.load_model", refuse)
    monkeypatch.setattr("suture.merge.Merge.model", refuse)
    result = open_run(family / "recipe.yaml", place).run(tmp_path / "again")
    assert (tmp_path / "again" / "scores.json").read_bytes() == (folder / "scores.json").read_bytes()
    assert len(result.reused) == 11
    # another recipe with the same targets and merge, and other settings of training, reads no text again either
    paper = {"calibrate_on": "prompts", "gate": False, "samples": 12}
    changed = write(family, "steps", surgery={"module": "darts", "loss": "l1", "rank": 2, "steps": 5, **paper})
    assert {score.model for score in open_run(changed, place).run(tmp_path / "other").scores} == {
        "target",
        "merged",
        "darts-l1-prompts",
    }


def test_a_recipe_that_shares_targets_reuses_their_states(
    family: Path, finished: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, _ = finished
    merge = recipe()["merge"]
    merge["models"][0]["parameters"]["weight"] = 0.8
    path = write(family, "heavier", merge=merge)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a target was loaded")

    monkeypatch.setattr("suture.reading.load_model", refuse)
    scores = open_run(path, place).run(tmp_path / "run").scores
    assert len(scores) == 40


def test_surgery_on_responses_and_in_closed_form(family: Path, finished: tuple[Path, Path], tmp_path: Path) -> None:
    """Targets continue their calibration prompts; a module may be trained on that, another on prompts alone."""
    place, folder = finished
    small = {"rank": 4, "steps": 5, "samples": 12}
    surgery = [
        recipe()["surgery"][1],
        {"module": "affine", "loss": "l2", "gate": False, **small},
        {"module": "standard", "loss": "l1", "gate": False, "name": "std", **small},
    ]
    path = write(family, "responses", surgery=surgery, response_tokens=6)
    job = open_run(path, place)
    scores = job.run(tmp_path / "run").scores
    models = [score.model for score in scores if (score.domain, score.metric, score.split) == ("math", "kl", "heldout")]
    assert models == ["target", "merged", "darts", "affine", "std"]
    member = job.members["math"]
    text, prompts = job.tokens(member, "responses"), member.calibration
    assert text.prompt_lengths.tolist() == prompts.lengths.tolist()
    assert int((text.lengths - text.prompt_lengths).max()) == 6
    assert text.prompts() == prompts.prompts()
    count = {score.model: score.n_tokens for score in scores if (score.domain, score.split) == ("math", "calibration")}
    assert count["darts"] == len(prompts.ids)
    assert count["std"] == count["affine"] == int((text.lengths - text.prompt_lengths).sum())
    # the paper's protocol is not touched by what stands beside it
    kept = {
        r["metric"]: r["value"]
        for r in json.loads((folder / "scores.json").read_text())
        if r["model"] == "darts" and r["domain"] == "math" and r["split"] == "heldout"
    }
    assert {s.metric: s.value for s in scores if (s.model, s.domain, s.split) == ("darts", "math", "heldout")} == kept
    history = json.loads((tmp_path / "run" / "surgery" / "math" / "affine" / "history.json").read_text())
    assert history["losses"] == []
    assert history["ridge"] in {float(ridge) for ridge in history["ridge_errors"]}


def test_stages_are_the_same_artifacts(family: Path, finished: tuple[Path, Path], tmp_path: Path) -> None:
    """Commands one by one, from nothing, end in what `run` ends in."""
    runner = CliRunner()
    store = ["--store", str(tmp_path / "store"), "--json", "--quiet"]
    path = str(family / "recipe.yaml")
    documents = {}
    for command in (["merge"], ["capture"], ["bias"], ["calibrate", "--domain", "math"], ["calibrate"]):
        found = runner.invoke(app, [command[0], path, *command[1:], *store])
        assert found.exit_code == 0, found.output
        documents[" ".join(command[:1] if len(command) == 1 else command)] = json.loads(found.stdout)
    assert Path(documents["merge"]["merged"], "model.safetensors.index.json").exists() or list(
        Path(documents["merge"]["merged"]).glob("*.safetensors")
    )
    assert len(documents["capture"]["states"]) == 8
    assert [row["domain"] for row in documents["bias"]["bias"]] == ["math", "chat"]
    assert {row["domain"] for row in documents["calibrate --domain math"]["surgery"]} == {"math"}
    whole = finished[1] / "surgery"
    for row in documents["calibrate"]["surgery"]:
        mine = Path(row["path"], "surgery.safetensors").read_bytes()
        assert mine == (whole / row["domain"] / row["surgery"] / "surgery.safetensors").read_bytes()


def test_generate_streams_the_corrected_models_text(family: Path, finished: tuple[Path, Path]) -> None:
    place, folder = finished
    runner = CliRunner()
    arguments = [
        "--domain",
        "math",
        "--prompt",
        "oak pea oak",
        "--max-new-tokens",
        "12",
        "--store",
        str(place / "store"),
        "-q",
    ]
    texts = {}
    for name, source, more in (
        ("recipe", family / "recipe.yaml", []),
        ("folder", folder, []),
        ("standard", folder, ["--surgery", "standard-l1"]),
        ("plain", folder, ["--uncorrected"]),
    ):
        streamed = runner.invoke(app, ["generate", str(source), *arguments, *more])
        document = runner.invoke(app, ["generate", str(source), *arguments, *more, "--json"])
        assert streamed.exit_code == document.exit_code == 0, streamed.output
        texts[name] = json.loads(document.stdout)["text"]
        assert streamed.stdout == texts[name] + "\n"
    job = open_run(family / "recipe.yaml", place)
    model, member = job.merged_model(), job.members["math"]
    ids = torch.tensor([member.tokenizer("Q oak pea oak A").input_ids])
    expected = {}
    attached = attach(model, {"math": load_surgery(folder / "surgery" / "math" / "darts")})
    for name, domain in (("plain", None), ("recipe", "math")):
        with attached.domain(domain):
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
            )
        expected[name] = member.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert texts["recipe"] == texts["folder"] == expected["recipe"]
    assert texts["plain"] == expected["plain"]
    found = runner.invoke(
        app, ["generate", str(folder), "-d", "maths", "-p", "x", "--store", str(place / "store"), "-q"]
    )
    assert found.exit_code == 1
    assert "did you mean 'math'" in found.stderr


def test_a_killed_run_keeps_what_it_finished_and_goes_on(family: Path, tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        import suture.pipeline as pipeline
        from suture.recipe import load_recipe
        from suture.store import Store
        kept = pipeline.Run._keep_states
        def slowly(self, model, fingerprint, member, split, stage):
            kept(self, model, fingerprint, member, split, stage)
            if member.name == "chat":
                with self.store.create("states", {"half": "made"}) as folder:
                    (folder / "cache.safetensors").write_text("half")
                    print("ready", flush=True)
                    import time; time.sleep(60)
        pipeline.Run._keep_states = slowly
        pipeline.Run(load_recipe(sys.argv[1]), store=Store(Path(sys.argv[2]))).run(Path(sys.argv[3]))
        """
    )
    store = tmp_path / "store"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(family / "recipe.yaml"), str(store), str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert all((path / "spec.json").exists() for path in store.glob("states/[0-9a-f]*"))
    assert list(store.glob("states/.*"))  # what was half made, under no real name
    finished = {path: path.stat().st_mtime_ns for path in store.glob("*/[0-9a-f]*/spec.json")}
    time.sleep(0.01)
    job = Run(load_recipe(family / "recipe.yaml"), store=Store(store))
    job.run(tmp_path / "run")
    assert "states of the target of math" in job.reused
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert not list(store.glob("states/.*"))


def test_a_merged_checkpoint_instead_of_a_merge(family: Path, finished: tuple[Path, Path], tmp_path: Path) -> None:
    place, folder = finished
    job = open_run(family / "recipe.yaml", place)
    job.write_merged(tmp_path / "merged")
    with pytest.raises(RecipeError, match="exists: choose another folder, or --force"):
        job.write_merged(tmp_path / "merged")
    job.write_merged(tmp_path / "merged", force=True)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years")
    with pytest.raises(RecipeError, match="is no checkpoint, so it is not replaced"):
        job.write_merged(tmp_path / "precious", force=True)
    assert (tmp_path / "precious" / "thesis.txt").exists()
    path = write(family, "ready", merge=None, merged=str(tmp_path / "merged"))
    scores = open_run(path, place).run(tmp_path / "run").scores
    expected = {
        (r["domain"], r["model"], r["metric"], r["split"]): r["value"]
        for r in json.loads((folder / "scores.json").read_text())
    }
    for score in scores:
        assert score.value == pytest.approx(expected[score.domain, score.model, score.metric, score.split], abs=1e-6)
    with pytest.raises(RecipeError, match="nothing to merge"):
        open_run(path, place).write_merged(tmp_path / "new")


@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties", "dare_linear"])
def test_the_papers_merge_methods_run(family: Path, finished: tuple[Path, Path], tmp_path: Path, method: str) -> None:
    merge = {**recipe()["merge"], "merge_method": method}
    if method == "linear":
        del merge["base_model"]
    for model in merge["models"]:
        model["parameters"]["density"] = 0.6
    path = write(family, method, merge=merge)
    scores = open_run(path, finished[0]).run(tmp_path / "run").scores
    assert all(score.value >= 0 for score in scores if score.metric == "kl")


def bad(family: Path, store: Path, error: type[SutureError], match: str, **changes: Any) -> None:
    path = write(family, "bad", **changes)
    with pytest.raises(error, match=match):
        Run(load_recipe(path), store=Store(store))
    assert not list(store.glob("*/*"))


def test_bad_input_is_told_before_any_work(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    domain = recipe()["domains"]["math"]
    bad(
        family,
        store,
        SutureError,
        r"surgery\.0: unknown surgery module 'drats'; did you mean 'darts'",
        surgery={"module": "drats", "samples": 3},
    )
    bad(family, store, SutureError, "unknown loss 'mse'", surgery={"loss": "mse", "samples": 3})
    bad(family, store, SutureError, "rank is 33, above the width of the states, 32", surgery={"rank": 33, "samples": 3})
    bad(family, store, PromptError, r"domains\.math\.prompts: 32 different prompts, but 50 to calibrate", surgery={})
    bad(
        family,
        store,
        ModelError,
        r"domains\.math\.target: no such folder",
        domains={"math": {**domain, "target": "./nowhere"}},
    )
    bad(family, store, ModelError, "device: cuda was asked for", device="cuda")
    other = tiny_model(hidden_size=16, head_dim=4)
    other.save_pretrained(family / "narrow")
    tiny_tokenizer().save_pretrained(family / "narrow")
    bad(
        family,
        store,
        FamilyError,
        "hidden_size: 32 in the merged model, 16 in the target of math",
        domains={"math": {**domain, "target": "narrow"}},
    )
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 10_000_000})())
    bad(family, store, ResourceError, r"needs about 0\.50 GB of memory on cpu, 0\.01 GB are free")


def test_a_removed_artifact_is_told(family: Path, finished: tuple[Path, Path], tmp_path: Path) -> None:
    job = Run(load_recipe(family / "recipe.yaml"), store=Store(tmp_path / "store"))
    with pytest.raises(StoreError, match="not captured yet"):
        job.tokens(job.members["math"], "heldout")
    with pytest.raises(RecipeError, match=r"has no run\.json"):
        read_recipe(tmp_path)


def test_five_lines_of_python(family: Path) -> None:
    import suture

    merged, tokenizer = suture.load(str(family / "base"), device="cpu")
    target, _ = suture.load(str(family / "lora"), device="cpu")
    prompts = suture.tokenize(tokenizer, [f"{a} {b}" for a in WORDS for b in WORDS])
    states, wanted = suture.capture(merged, prompts), suture.capture(target, prompts, entropy=True)
    assert suture.measure_bias(states, wanted).summary()["mean"] > 0.01
    surgery = suture.calibrate(states, wanted, rank=4, steps=60).surgery
    ids = torch.tensor([tokenizer("ash bay").input_ids])
    with suture.attach(merged, {"math": surgery}).domain("math") as model:
        corrected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    assert corrected.shape[1] <= ids.shape[1] + 4
