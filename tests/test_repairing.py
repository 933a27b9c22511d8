"""Corrections inside the layers, the whole way on a tiny family: run, heal, gate, auto, generate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from relatives import WORDS, make_family, open_run, recipe, write, write_prompts
from tiny import nearby, tiny_model, tiny_tokenizer
from torch import Tensor
from typer.testing import CliRunner

from suture.attach import attach
from suture.capture import capture
from suture.cli import app
from suture.errors import PromptError, RecipeError, SurgeryError, SutureError
from suture.evaluate.heldout import gap_closed
from suture.gate import Gate
from suture.history import read_history
from suture.models import load
from suture.pipeline import Run, RunResult
from suture.recipe import load_recipe
from suture.repair.fit import Repaired
from suture.repair.patch import Change, Patch, patched
from suture.report.tables import correction_rows
from suture.store import Artifact, Store
from suture.surgery import load_surgery

FIT = {"samples": 24, "T_max": 32, "steps": 20}
DEEP, HEAL = {"module": "deep", "rank": 8, **FIT}, {"module": "heal", **FIT}
ALL = [
    DEEP,
    HEAL,
    {"module": "svd", "rank": 8, **FIT},
    {"module": "asvd", "rank": 8, **FIT},
    {"module": "distil", "rank": 8, **FIT, "steps": 3},
    {"module": "affine", "rank": 16, **FIT},
    {"module": "auto", "among": ["affine", "deep"], **FIT},
]
LABELS = ["deep", "heal", "svd", "asvd", "distil", "affine", "auto"]
ADAPTERS = ["deep", "svd", "asvd", "distil"]
DOMAINS = ["math", "chat"]


def near(**changes: Any) -> dict[str, Any]:
    """Changes to the recipe: a weak merge of near parents, which one plain checkpoint can bring nearer to both."""
    merge = recipe()["merge"]
    for model in merge["models"]:
        model["parameters"]["weight"] = 0.15
    return {"merge": merge, "response_tokens": 10, **changes}


@pytest.fixture(scope="module")
def kin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The family with targets nearer to their base, and text of no domain."""
    folder = make_family(tmp_path_factory.mktemp("kin"), full=0.05, lora=0.1)
    lines = [f"{a}+{b}+{a}{b}{a}" for a in WORDS[8:] for b in WORDS[8:12]]
    (folder / "guard.txt").write_text("\n".join(lines))
    write(folder, "all", **near(surgery=ALL, guard="guard.txt"))
    return folder


@pytest.fixture(scope="module")
def finished(kin: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, RunResult]:
    """(store's folder, run's folder, result) of a run with every correction inside the layers."""
    place = tmp_path_factory.mktemp("finished")
    return place, place / "run", open_run(kin / "all.yaml", place).run(place / "run")


@pytest.fixture
def copied(finished: tuple[Path, Path, RunResult], tmp_path: Path) -> Path:
    """A copy of the finished run's store."""
    shutil.copytree(finished[0] / "store", tmp_path / "store")
    return tmp_path


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def document(*arguments: Any) -> Any:
    found = invoke(*arguments, "--json", "--quiet")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def kl_of(scores: Any, domain: str, model: str) -> float:
    rows = [each if isinstance(each, dict) else each.row() for each in scores]
    (found,) = [
        row["value"]
        for row in rows
        if (row["domain"], row["model"], row["metric"], row["split"]) == (domain, model, "kl", "heldout")
    ]
    return float(found)


def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("suture.reading.load_model", refuse)
    monkeypatch.setattr("suture.merge.Merge.model", refuse)


def residuals(store: Path) -> list[Path]:
    return list((store / "store" / "residuals").glob("*"))


def logits(model: Any, tokens: Any) -> Tensor:
    """[N, V] of transformers' own forward, one sequence at a time."""
    with torch.inference_mode():
        return torch.cat([model(input_ids=row[None]).logits[0] for row in tokens.sequences])


def kl_by_hand(model: Any, target: Any, tokens: Any) -> float:
    """Mean KL(target || model) over the tokens of the responses."""
    total, count = 0.0, 0
    for row, start in zip(tokens.sequences, tokens.prompt_lengths.tolist(), strict=True):
        with torch.inference_mode():
            one = torch.log_softmax(model(input_ids=row[None]).logits[0, start - 1 : -1].double(), -1)
            two = torch.log_softmax(target(input_ids=row[None]).logits[0, start - 1 : -1].double(), -1)
        total += float((two.exp() * (two - one)).sum())
        count += len(row) - start
    return total / count


def plain_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# --- a run


def test_a_run_scores_every_correction_and_the_guard(finished: tuple[Path, Path, RunResult]) -> None:
    _, folder, result = finished
    rows = json.loads((folder / "scores.json").read_text())
    assert rows == [score.row() for score in result.scores]
    held = {(r["domain"], r["model"], r["metric"]) for r in rows if r["split"] == "heldout" and r["domain"] != "guard"}
    models, metrics = ["target", "merged", *LABELS], ("kl", "agreement", "perplexity", "rho_l1")
    assert held == {(d, m, x) for d in DOMAINS for m in models for x in metrics}
    fitted = {(r["domain"], r["model"], r["metric"]) for r in rows if r["split"] == "calibration"}
    assert fitted == {(d, m, "rho_l1") for d in DOMAINS for m in models}
    guard = {r["model"]: r for r in rows if r["domain"] == "guard"}
    assert list(guard) == ["merged", "heal"]
    assert {(r["metric"], r["split"]) for r in guard.values()} == {("perplexity", "heldout")}
    assert guard["merged"]["n_tokens"] == guard["heal"]["n_tokens"] > 100
    assert guard["merged"]["value"] != guard["heal"]["value"]
    text = (folder / "report.md").read_text()
    change = 100 * (guard["heal"]["value"] / guard["merged"]["value"] - 1)
    assert f"text of no domain: perplexity {guard['heal']['value']:.2f} with heal, " in text
    assert f"merged ({change:+.2f}%)" in text
    assert "| guard |" not in text
    for name in ("scores", "bias", "entropy", "losses"):
        assert (folder / "figures" / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_each_correction_keeps_what_it_is(finished: tuple[Path, Path, RunResult]) -> None:
    _, folder, _ = finished
    sizes = {}
    for domain in DOMAINS:
        for label in LABELS:
            made = folder / "surgery" / domain / label
            history = json.loads((made / "history.json").read_text())
            own = history.get("domains", {}).get(domain, history)
            assert len(own["calibration_rows"]) == 19  # of 24
            assert not set(own["calibration_rows"]) & set(own["heldout_rows"])
            assert own["gate"]["prompts"] == 5
            assert history["seconds"] > 0
            sizes[domain, label] = history["parameters"]
        for label in ADAPTERS:
            assert (folder / "surgery" / domain / label / "adapter_model.safetensors").exists()
            patch = Patch.load(folder / "surgery" / domain / label)
            assert patch.count() == sizes[domain, label] <= sizes[domain, "distil"]
        history = json.loads((folder / "surgery" / domain / "deep" / "history.json").read_text())
        assert history["rank"] == 8
        assert len(history["linears"]) == 14
        assert len(json.loads((folder / "surgery" / domain / "distil" / "history.json").read_text())["losses"]) == 3
        # as large as the model, and one for all domains: it stays in the store
        assert [file.name for file in (folder / "surgery" / domain / "heal").glob("*.safetensors")] == []
    assert sizes["math", "svd"] == sizes["math", "asvd"] == sizes["math", "distil"]


def test_repair_inside_the_layers_closes_more_of_the_gap(finished: tuple[Path, Path, RunResult]) -> None:
    scores = finished[2].scores
    for domain in DOMAINS:
        closed = {label: gap_closed(scores, domain, label) or 0.0 for label in LABELS}
        assert closed["deep"] > 0.2
        assert closed["deep"] > closed["affine"] + 0.1
        assert closed["heal"] > 0.1
        assert closed["deep"] > closed["heal"]
        assert all(closed[label] > 0 for label in ("svd", "asvd", "affine"))


def test_the_kl_is_that_of_the_patched_model(kin: Path, finished: tuple[Path, Path, RunResult]) -> None:
    place, _folder, result = finished
    job = open_run(kin / "all.yaml", place)
    merged, member = job.merged_model(), job.members["chat"]
    target = load(f"{kin}/base+{kin}/lora", device="cpu")[0]
    tokens = job.tokens(member, "heldout")
    assert kl_by_hand(merged, target, tokens) == pytest.approx(kl_of(result.scores, "chat", "merged"), abs=1e-5)
    for label in ("deep", "heal", "distil"):
        with patched(merged, Patch.load(job.calibrate(member, job.surgery(label)).path)) as model:
            found = kl_by_hand(model, target, tokens)
        assert found == pytest.approx(kl_of(result.scores, "chat", label), abs=1e-5)


def test_a_second_run_loads_no_model(
    kin: Path, finished: tuple[Path, Path, RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, folder, _ = finished
    no_loading(monkeypatch)
    monkeypatch.setattr("suture.repairing.Layers", None)
    result = open_run(kin / "all.yaml", place).run(tmp_path / "again")
    for name in ("scores.json", "report.md"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    assert {"states of the merged model", "heal", *(f"deep for {domain}" for domain in DOMAINS)} <= set(result.reused)


def test_residual_streams_are_removed_at_the_end(finished: tuple[Path, Path, RunResult]) -> None:
    assert (finished[0] / "store" / "residuals").is_dir()
    assert not residuals(finished[0])


def test_one_domain_alone_needs_and_leaves_nothing_of_the_other(
    kin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(kin, "deep", **near(surgery=DEEP))
    arguments = ["calibrate", path, "--domain", "math", "--store", tmp_path / "store"]
    (row,) = document(*arguments)["surgery"]
    assert (row["domain"], row["surgery"]) == ("math", "deep")
    assert 0 < row["strength"] <= 1
    assert not residuals(tmp_path)
    no_loading(monkeypatch)
    assert document(*arguments)["surgery"] == [row]


@pytest.mark.parametrize("label", ADAPTERS)
def test_peft_puts_the_adapter_on_the_merged_checkpoint(
    label: str, kin: Path, finished: tuple[Path, Path, RunResult], tmp_path: Path
) -> None:
    place, folder, _ = finished
    document("merge", kin / "all.yaml", "--out", tmp_path / "merged", "--store", place / "store")
    job = open_run(kin / "all.yaml", place)
    for domain in DOMAINS:
        made = folder / "surgery" / domain / label
        model = PeftModel.from_pretrained(plain_model(tmp_path / "merged"), made)
        kept = job.patched_states(job.members[domain], made_key(job, domain, label))
        found = capture(model.get_base_model(), kept.tokens)
        torch.testing.assert_close(found.states, kept.states, atol=1e-4, rtol=1e-4)
        merged = job.states(job.members[domain], "heldout")[0].states
        assert float((found.states - merged).abs().max()) > 1e-2


def made_key(job: Run, domain: str, label: str) -> str:
    return job.calibrate(job.members[domain], job.surgery(label)).key


class Killed(Exception):
    pass


def test_a_run_that_is_stopped_between_repairs_goes_on(
    kin: Path, finished: tuple[Path, Path, RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(kin, "two", **near(surgery=[DEEP, HEAL], guard="guard.txt"))
    kept = Run._keep_patched

    def stopped(self: Run, model: Any, key: str, members: Any) -> None:
        kept(self, model, key, members)
        if len(list(members)) > 1:
            raise Killed  # the states of `heal` are there, the patch is not

    monkeypatch.setattr(Run, "_keep_patched", stopped)
    with pytest.raises(Killed):
        open_run(path, tmp_path).run(tmp_path / "run")
    monkeypatch.undo()
    monkeypatch.setenv("SUTURE_HOME", str(tmp_path))
    assert len(residuals(tmp_path)) == 3
    monkeypatch.setattr("suture.reading.load_model", None)  # targets are not read again
    result = open_run(path, tmp_path).run(tmp_path / "run")
    assert {"deep for math", "states of the target of math", "states of the target of chat"} <= set(result.reused)
    assert not residuals(tmp_path)
    for domain in DOMAINS:
        for label in ("deep", "heal"):
            assert kl_of(result.scores, domain, label) == kl_of(finished[2].scores, domain, label)


@pytest.mark.parametrize("kind", ["states", "surgery"])
def test_what_is_removed_is_made_again(
    kind: str, kin: Path, finished: tuple[Path, Path, RunResult], copied: Path
) -> None:
    """The patched model's states, or all corrections: their residual streams are gone, and come again."""
    for found in Store(copied / "store").list():
        inputs = found.spec["inputs"]
        if found.kind == kind and (kind == "surgery" or "patch" in inputs):
            shutil.rmtree(found.path)
    result = open_run(kin / "all.yaml", copied).run(copied / "run")
    assert not residuals(copied)
    assert result.scores == finished[2].scores


# --- heal


def healed(path: Path, out: Path, store: Path, *more: str) -> Any:
    return document("heal", path, "--out", out, "--store", store / "store", *more)


@pytest.fixture(scope="module")
def checkpoint(
    kin: Path, finished: tuple[Path, Path, RunResult], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """(folder, document) of `suture heal`."""
    out = tmp_path_factory.mktemp("healed") / "model"
    return out, healed(kin / "all.yaml", out, finished[0])


def test_heal_writes_a_plain_checkpoint_that_does_what_was_scored(
    kin: Path, finished: tuple[Path, Path, RunResult], checkpoint: tuple[Path, Any]
) -> None:
    place, _folder, result = finished
    out, told = checkpoint
    job = open_run(kin / "all.yaml", place)
    model, merged = plain_model(out), job.merged_model()
    targets = {"math": plain_model(kin / "full"), "chat": load(f"{kin}/base+{kin}/lora", device="cpu")[0]}
    assert (told["folder"], told["to"]) == (str(out), "plain")
    assert told["corrections"]["*"]["strength"] == 1
    assert told["verified"][0]["logits"] < 1e-5
    for domain, target in targets.items():
        tokens = job.tokens(job.members[domain], "heldout")
        made = job.calibrate(job.members[domain], job.surgery("heal"))
        with patched(merged, Patch.load(made.path)) as repaired:
            torch.testing.assert_close(logits(model, tokens), logits(repaired, tokens), atol=1e-4, rtol=1e-4)
        assert float((logits(model, tokens) - logits(merged, tokens)).abs().max()) > 1e-2
        assert kl_by_hand(model, target, tokens) == pytest.approx(kl_of(told["scores"], domain, "heal"), abs=1e-5)
        assert kl_of(told["scores"], domain, "heal") == kl_of(result.scores, domain, "heal")
    assert {row["model"] for row in told["scores"] if row["domain"] == "math"} == {"target", "merged", "heal"}
    assert {row["model"] for row in told["scores"] if row["domain"] == "guard"} == {"merged", "heal"}


def test_a_healed_checkpoint_is_whole(checkpoint: tuple[Path, Any], kin: Path) -> None:
    out, told = checkpoint
    kept = json.loads((out / "suture.json").read_text())
    assert kept["scores"] == told["scores"]
    assert {"suture", "torch", "transformers"} <= set(kept["versions"])
    assert [each["module"] for each in kept["recipe"]["surgery"]] == ["heal"]
    assert kept["recipe"]["merge"]["merge_method"] == "task_arithmetic"
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("oak").input_ids == tiny_tokenizer()("oak").input_ids
    assert tokenizer.chat_template == tiny_tokenizer(chat=True).chat_template
    assert not (out / "mergekit_config.yml").exists()  # it names folders of this machine; suture.json has the merge
    names = set(plain_model(kin / "base").state_dict())
    assert set(plain_model(out).state_dict()) == names
    assert not [path for path in out.parent.iterdir() if path != out]


def test_heal_prints_scores_and_takes_the_place_of_checkpoints_only(
    kin: Path, finished: tuple[Path, Path, RunResult], checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    store = ["--store", finished[0] / "store", "-q"]
    shutil.copytree(checkpoint[0], tmp_path / "model")
    (tmp_path / "model" / "old.txt").write_text("old")
    found = invoke("heal", kin / "all.yaml", "--out", tmp_path / "model", *store)
    assert found.exit_code == 1
    assert "exists: choose another folder, or --force" in found.stderr
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years")
    for more in ([], ["--force"]):
        found = invoke("heal", kin / "all.yaml", "--out", tmp_path / "precious", *store, *more)
        assert found.exit_code == 1
        assert "is no checkpoint, so it is not replaced" in found.stderr
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years"
    assert (tmp_path / "model" / "old.txt").exists()
    found = invoke("heal", kin / "all.yaml", "--out", tmp_path / "model", *store, "--force")
    assert found.exit_code == 0, found.output
    assert not (tmp_path / "model" / "old.txt").exists()
    for domain in DOMAINS:
        closed = gap_closed(finished[2].scores, domain, "heal")
        assert closed is not None
        assert f"{domain}: heal closes {100 * closed:.1f}% of the merged model's held-out KL gap" in found.stdout
        assert f"{kl_of(finished[2].scores, domain, 'heal'):.4f}" in found.stdout
    assert "text of no domain: perplexity" in found.stdout
    assert str(tmp_path / "model") in found.stdout


def test_a_merged_checkpoint_is_healed_too(
    kin: Path, finished: tuple[Path, Path, RunResult], checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    document("merge", kin / "all.yaml", "--out", tmp_path / "merged", "--store", finished[0] / "store")
    ready = near(surgery=HEAL, guard="guard.txt", merge=None, merged=str(tmp_path / "merged"))
    path = write(kin, "ready", **ready)
    told = healed(path, tmp_path / "healed", finished[0])
    assert told["verified"][0]["logits"] < 1e-5
    model, other = plain_model(tmp_path / "healed"), plain_model(checkpoint[0])
    assert set(model.state_dict()) == set(other.state_dict())
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, atol=1e-4, rtol=1e-3)
    for domain in DOMAINS:
        expected = kl_of(checkpoint[1]["scores"], domain, "heal")
        assert kl_of(told["scores"], domain, "heal") == pytest.approx(expected, abs=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "healed")
    assert tokenizer.chat_template == tiny_tokenizer(chat=True).chat_template
    assert (tmp_path / "healed" / "suture.json").exists()


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family that stores its linears [in, out]."""
    folder = tmp_path_factory.mktemp("gpt2")
    base = tiny_model("gpt2", initializer_range=0.4)
    base.config.architectures = ["GPT2LMHeadModel"]
    for name, model in (("base", base), ("one", nearby(base, 1, 0.1)), ("two", nearby(base, 2, 0.1))):
        model.save_pretrained(folder / name)
        tiny_tokenizer(chat=True).save_pretrained(folder / name)
    write_prompts(folder)
    return folder


def gpt2_recipe(folder: Path, name: str, **changes: Any) -> Path:
    models = [{"model": each, "parameters": {"weight": 0.2}} for each in ("one", "two")]
    merge = {"merge_method": "task_arithmetic", "base_model": "base", "models": models, "dtype": "float32"}
    domains = {
        "math": {"target": "one", "prompts": {"path": "words.jsonl", "template": "Q {q} A"}},
        "chat": {"target": "two", "prompts": "lines.txt"},
    }
    return write(folder, name, **{"merge": merge, "domains": domains, "response_tokens": 10, **changes})


@pytest.mark.parametrize("ready", [False, True])
def test_weights_that_are_stored_in_by_out_are_healed(gpt2: Path, ready: bool, tmp_path: Path) -> None:
    path = gpt2_recipe(gpt2, "recipe", surgery=HEAL)
    if ready:
        document("merge", path, "--out", tmp_path / "merged", "--store", tmp_path / "store")
        path = gpt2_recipe(gpt2, "ready", surgery=HEAL, merge=None, merged=str(tmp_path / "merged"))
    told = healed(path, tmp_path / "healed", tmp_path)
    job = open_run(path, tmp_path)
    model = plain_model(tmp_path / "healed")
    for domain, target in (("math", "one"), ("chat", "two")):
        tokens = job.tokens(job.members[domain], "heldout")
        found = kl_by_hand(model, plain_model(gpt2 / target), tokens)
        assert found == pytest.approx(kl_of(told["scores"], domain, "heal"), abs=1e-5)
        assert found < kl_of(told["scores"], domain, "merged")


def test_heal_with_a_rank_is_one_adapter_for_all(kin: Path, finished: tuple[Path, Path, RunResult]) -> None:
    place = finished[0]
    path = write(kin, "ranked", **near(surgery={**HEAL, "rank": 4, "linears": ["o_proj", "down_proj"]}))
    job = open_run(path, place)
    job.capture()
    made = [job.calibrate(member, job.recipe.surgery[0]) for member in job.members.values()]
    job.release()
    assert made[0] == made[1]
    patch = Patch.load(made[0].path)
    assert not patch.full
    assert {name.rsplit(".", 1)[-1] for name in patch.changes} <= {"o_proj", "down_proj"}
    assert (made[0].path / "adapter_model.safetensors").exists()
    assert 0 < patch.count() <= 4 * 2 * (32 + 32 + 48 + 32)
    assert set(json.loads((made[0].path / "history.json").read_text())["domains"]) == set(DOMAINS)


# --- the gate


def against(patch: Patch) -> Patch:
    """The opposite of a patch, three times as large."""
    changes = {name: Change(-3 * change.up.float(), change.down) for name, change in patch.changes.items()}
    return Patch(changes, patch.transposed)


def test_a_correction_that_harms_held_back_prompts_is_left_out(
    kin: Path, finished: tuple[Path, Path, RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import suture.repairing as repairing

    true = repairing.repair

    def harmful(*args: Any, **kwargs: Any) -> Repaired:
        layers, lessons, *_ = args
        found = true(*args, **kwargs)
        with patched(layers.model, against(found.patch)) as model:
            states = {each.name: capture(model, each.tokens).states for each in lessons}
        return Repaired(against(found.patch), states, found.choices)

    monkeypatch.setattr(repairing, "repair", harmful)
    wild = {"module": "standard", "loss": "l1", "lr": 3.0, "rank": 8, **FIT}  # far too large a step
    shared = [DEEP, HEAL, {"module": "distil", "rank": 8, **FIT, "steps": 3, "lr": 1.0}, wild]
    gated = open_run(write(kin, "gated", **near(surgery=shared, guard="guard.txt")), tmp_path)
    result = gated.run(tmp_path / "run")
    labels = ["deep", "heal", "distil", "standard-l1"]
    value = {(s.domain, s.model, s.metric, s.split): s.value for s in result.scores}
    for domain in DOMAINS:
        for label in labels:
            for metric in ("kl", "agreement", "perplexity", "rho_l1"):
                assert value[domain, label, metric, "heldout"] == value[domain, "merged", metric, "heldout"]
            history = read_history(Artifact("", "", tmp_path / "run" / "surgery" / domain / label), domain)
            assert history["strength"] == history["gate"]["strength"] == 0
            assert history["gate"]["kl"]["0"] < history["gate"]["kl"]["1"]
            assert history["rho_calibration"] == history["rho_heldout"] == 0
        made = tmp_path / "run" / "surgery" / domain / "standard-l1" / "surgery.json"
        assert json.loads(made.read_text())["strength"] == 0
    assert value["guard", "heal", "perplexity", "heldout"] == value["guard", "merged", "perplexity", "heldout"]
    report = (tmp_path / "run" / "report.md").read_text()
    assert report.count("no gain on held-back prompts beyond its error: the domain stays uncorrected") == len(
        labels
    ) * len(DOMAINS)
    # and the model that they leave is the merged one
    out = tmp_path / "healed"
    told = invoke("heal", kin / "gated.yaml", "--out", out, "--store", tmp_path / "store", "-q")
    assert told.exit_code == 0, told.output
    assert "strength 0, chosen on prompts that were held back" in told.stdout
    merged = gated.merged_model().state_dict()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in plain_model(out).state_dict().items())
    # without the gate they do what they do
    path = write(kin, "ungated", **near(surgery=[{**each, "gate": False} for each in shared]))
    worse = open_run(path, tmp_path).run(tmp_path / "worse").scores
    for domain in DOMAINS:
        assert all(kl_of(worse, domain, label) > 1.2 * value[domain, "merged", "kl", "heldout"] for label in labels)


def test_no_gate_trains_on_all_prompts(kin: Path, finished: tuple[Path, Path, RunResult], tmp_path: Path) -> None:
    place = finished[0]
    shared = [{"module": "affine", "rank": 8, **FIT}, {"module": "svd", "rank": 8, **FIT}, DEEP, HEAL]
    gated = write(kin, "gate-on", **near(surgery=shared))
    store = ["--store", place / "store"]
    rows = {
        name: document("calibrate", gated, *store, *more)["surgery"]
        for name, more in (("on", []), ("off", ["--no-gate"]))
    }
    off = write(kin, "gate-off", **near(surgery=[{**each, "gate": False} for each in shared]))
    # the same artifacts as those of a recipe without gates
    assert document("calibrate", off, *store)["surgery"] == rows["off"]
    for on, without in zip(rows["on"], rows["off"], strict=True):
        assert on["strength"] is not None
        assert without["strength"] is None
        one, two = (read_history(Artifact("", "", Path(row["path"])), row["domain"]) for row in (on, without))
        # repairs hold prompts back in any case: ridges and ranks are chosen there
        inside = on["surgery"] in ("deep", "heal")
        assert (len(one["calibration_rows"]), len(two["calibration_rows"])) == (19, 19 if inside else 24)
        assert two["gate"] is None
    run = invoke("run", gated, "--no-gate", "--out", tmp_path / "run", *store, "--json", "-q")
    assert run.exit_code == 0, run.output
    same = open_run(off, place)
    scores = [score.row() for member in same.members.values() for score in same.score(member)]
    assert json.loads(run.stdout)["scores"] == scores
    report = (tmp_path / "run" / "report.md").read_text()
    assert "gate False" in report
    assert "stays uncorrected" not in report


def test_the_gate_looks_at_what_targets_write_for_held_back_prompts(kin: Path, tmp_path: Path) -> None:
    """Whatever a correction was fitted on: here on prompts alone."""
    shared = [{"module": "affine", "rank": 8, "calibrate_on": "prompts", **FIT}, {**DEEP, "calibrate_on": "prompts"}]
    job = open_run(write(kin, "on-prompts", **near(surgery=shared)), tmp_path)
    job.capture()
    merged, target, member = job.merged_model(), plain_model(kin / "full"), job.members["math"]
    text = job.tokens(member, "responses").first(24).last(5)
    for surgery in job.recipe.surgery:
        artifact = job.calibrate(member, surgery)
        history = read_history(artifact, "math")
        gate = history["gate"]
        assert len(history["calibration_rows"]) == 19
        assert history["calibration_tokens"] == int(member.calibration.lengths[:19].sum())
        assert gate["prompts"] == 5
        assert gate["kl"]["0"] == pytest.approx(kl_by_hand(merged, target, text), abs=1e-5)
        if surgery.inside:
            with patched(merged, Patch.load(artifact.path)) as model:
                found = kl_by_hand(model, target, text)
        else:
            with attach(merged, {"math": load_surgery(artifact.path)}).domain("math") as model:
                found = kl_by_hand(model, target, text)
        assert gate["kl"][f"{gate['strength']:g}"] == pytest.approx(found, abs=1e-5)


def test_one_strength_for_all_is_what_the_report_says(tmp_path: Path) -> None:
    """A domain's own choice may be another than that of all."""
    gates = {
        "math": Gate(1.0, {0.0: 1.0, 0.5: 0.8, 1.0: 0.6}, 0.1, 5),
        "chat": Gate(0.0, {0.0: 1, 0.5: 0.99, 1.0: 1}, 0.1, 5),
    }
    history = {
        "strength": 0.5,
        "parameters": 10,
        "seconds": 1.0,
        "domains": {domain: {"gate": gate.row()} for domain, gate in gates.items()},
    }
    (tmp_path / "history.json").write_text(json.dumps(history))
    found = {domain: {"heal": read_history(Artifact("", "", tmp_path), domain)} for domain in gates}
    assert [row[3:6] for row in correction_rows(found)] == [("0.5", "0.8000", "1.0000"), ("0.5", "0.9900", "1.0000")]
    assert not any(row[-1] for row in correction_rows(found))


# --- auto


def auto(kin: Path, store: Path, **settings: Any) -> dict[str, Any]:
    """domain → auto.json."""
    path = write(kin, "auto", **near(surgery={"module": "auto", **FIT, **settings}))
    job = open_run(path, store)
    job.capture()
    made = {name: job.calibrate(member, job.recipe.surgery[0]) for name, member in job.members.items()}
    job.release()
    for name, artifact in made.items():
        assert read_history(artifact, name)["auto"] == json.loads((artifact.path / "auto.json").read_text())
    return {name: json.loads((artifact.path / "auto.json").read_text()) for name, artifact in made.items()}


def test_auto_takes_the_least_kl_on_held_back_prompts(kin: Path, finished: tuple[Path, Path, RunResult]) -> None:
    _, folder, result = finished
    for domain in DOMAINS:
        found = json.loads((folder / "surgery" / domain / "auto" / "auto.json").read_text())
        tried = found["tried"]
        assert [(row["surgery"], row["rank"]) for row in tried] == [
            ("affine", 16),
            ("affine", 32),
            ("deep", 4),
            ("deep", 16),
        ]
        assert found["chosen"] == min(tried, key=lambda row: row["kl"])
        assert all(row["kl"] <= row["kl_uncorrected"] for row in tried)
        assert len({row["kl_uncorrected"] for row in tried}) == 1
        chosen = found["chosen"]
        if chosen["surgery"] == "deep":
            assert (folder / "surgery" / domain / "auto" / "adapter_model.safetensors").exists()
        text = (folder / "report.md").read_text()
        assert f"chose {chosen['surgery']} of rank {chosen['rank']}" in text
        assert kl_of(result.scores, domain, "auto") < kl_of(result.scores, domain, "merged")


def test_auto_honours_what_it_is_given(kin: Path, finished: tuple[Path, Path, RunResult]) -> None:
    place = finished[0]
    count = open_run(kin / "all.yaml", place).donor.count
    for found in auto(kin, place, among=["standard", "svd"]).values():
        assert [row["surgery"] for row in found["tried"]] == ["standard-l1", "svd"]
    for found in auto(kin, place, budget=0.06, among=["affine", "darts", "deep"]).values():
        # the affine map of full rank has 2,080 parameters, a table of 32 positions 2,048
        assert found["tried"][0]["rank"] == 16
        assert [row["surgery"] for row in found["tried"]] == ["affine", "deep"]
        assert all(row["parameters"] <= 0.06 * count for row in found["tried"])
    for engine, among, tried in (("adapter", None, ["deep"]), ("plain", ["svd", "deep"], ["svd", "deep"])):
        for found in auto(kin, place, engine=engine, budget=0.05, among=among).values():
            assert [row["surgery"] for row in found["tried"]] == tried
            assert found["chosen"]["parameters"] <= 0.05 * count


def test_auto_hands_its_settings_on(kin: Path) -> None:
    surgery = {"module": "auto", "among": ["darts", "distil"], **FIT, "lr": 0.5, "calibrate_on": "prompts", "seed": 3}
    job = open_run(write(kin, "settings", **near(surgery=surgery)), kin)
    darts, distil = job.choices(job.recipe.surgery[0])
    for each in (darts, distil):
        assert (each.steps, each.lr, each.samples, each.calibrate_on, each.seed) == (20, 0.5, 24, "prompts", 3)
        assert each.gate
    assert darts.t_max == 32


# --- bad input


@pytest.mark.parametrize(
    ("surgery", "message"),
    [
        ({"module": "deeep"}, r"surgery\.0: unknown surgery module 'deeep'; did you mean 'deep'"),
        ({"module": "heel"}, r"surgery\.0: unknown surgery module 'heel'; did you mean 'heal'"),
        ({"module": "atuo"}, r"surgery\.0: unknown surgery module 'atuo'; did you mean 'auto'"),
        (
            {"module": "auto", "among": ["darts", "deap"]},
            r"surgery\.0: among: unknown module 'deap'; did you mean 'deep'",
        ),
        (
            {"module": "auto", "among": ["deep", "darts"], "engine": "adapter"},
            r"surgery\.0: among: darts is nothing that engine adapter can run",
        ),
        (
            {"module": "auto", "among": ["darts", "affine"], "budget": 0.001},
            r"surgery\.0: auto: nothing fits engine anything and budget 0\.001: each of darts, affine is larger",
        ),
        (
            {"module": "deep", "linears": ["o_prj"]},
            r"surgery\.0: linears: the merged model has no 'o_prj'; did you mean",
        ),
    ],
)
def test_bad_corrections_are_told_before_any_work(
    surgery: dict[str, Any], message: str, kin: Path, tmp_path: Path
) -> None:
    path = write(kin, "bad", **near(surgery={"samples": 24, **surgery}))
    with pytest.raises(SurgeryError, match=message):
        open_run(path, tmp_path)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("surgery", "message"),
    [
        ({"module": "darts", "linears": ["o_proj"]}, "linears are for deep and heal"),
        ({"module": "deep", "loss": "l1"}, "loss: deep has none to choose: leave it out"),
        ({"module": "deep", "rank": 2, "budget": 0.1}, "give either rank or budget"),
    ],
)
def test_commands_refuse_settings_that_do_not_fit(
    surgery: dict[str, Any], message: str, kin: Path, tmp_path: Path
) -> None:
    path = write(kin, "bad", **near(surgery=surgery))
    for command in ("run", "calibrate", "heal"):
        found = invoke(command, path, "--store", tmp_path / "store", "-q")
        assert found.exit_code == 1
        assert f"surgery.0: {message}" in found.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (None, SutureError, r"guard: .*no-such\.txt"),
        ("one line\n", PromptError, "guard: 1 different texts, but half of them hold and half are measured: give more"),
        ("one line\none line\n", PromptError, "guard: 1 different texts"),
        (
            "a\n" + "b" * 200,
            PromptError,
            r"guard: texts of up to 200 tokens, but .* reads 128 at most: lower max_length",
        ),
    ],
)
def test_bad_guard_text_is_told_before_any_work(
    text: str | None, error: type[SutureError], message: str, kin: Path, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "guard.txt").write_text(text)
    guard = str(tmp_path / "guard.txt") if text is not None else "no-such.txt"
    path = write(kin, "bad", **near(surgery=HEAL, guard=guard))
    with pytest.raises(error, match=message):
        open_run(path, tmp_path)
    assert not (tmp_path / "store").exists()


def test_no_domain_is_called_guard_beside_one(kin: Path) -> None:
    domains = {"guard": recipe()["domains"]["math"]}
    with pytest.raises(RecipeError, match="a domain cannot be called 'guard' beside guard text"):
        load_recipe(write(kin, "bad", **near(surgery=HEAL, guard="guard.txt", domains=domains)))
    load_recipe(write(kin, "bad", **near(surgery=HEAL, domains=domains)))


def test_a_guard_alone_is_measured(kin: Path, finished: tuple[Path, Path, RunResult], tmp_path: Path) -> None:
    path = write(kin, "guarded", **near(surgery={"module": "affine", **FIT}, guard="guard.txt"))
    scores = open_run(path, finished[0]).run(tmp_path / "run").scores
    (row,) = [score for score in scores if score.domain == "guard"]
    assert (row.model, row.metric) == ("merged", "perplexity")
    assert row in finished[2].scores


# --- generate


def written(model: Any, tokenizer: Any, text: str, count: int) -> str:
    ids = torch.tensor([tokenizer(text).input_ids])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_generate_writes_what_the_repaired_checkpoint_writes(
    kin: Path, finished: tuple[Path, Path, RunResult], checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    place, folder, _ = finished
    job = open_run(kin / "all.yaml", place)
    job.write_merged(tmp_path / "merged")
    adapted = PeftModel.from_pretrained(plain_model(tmp_path / "merged"), folder / "surgery" / "math" / "deep")
    models = {
        "heal": plain_model(checkpoint[0]),
        "deep": adapted.merge_and_unload(),
        "": plain_model(tmp_path / "merged"),
    }
    tokenizer = job.members["math"].tokenizer
    texts: dict[str, list[str]] = {}
    for word in WORDS[:4]:
        prompt = f"{word} pea {word}"
        for label, model in models.items():
            which = ["--surgery", label] if label else ["--uncorrected"]
            told = document(
                *("generate", folder, "-d", "math", "-p", prompt, "--max-new-tokens", 12, *which),
                *("--store", place / "store"),
            )
            assert told["text"] == written(model, tokenizer, f"Q {prompt} A", 12)
            texts.setdefault(label, []).append(told["text"])
    assert texts["heal"] != texts[""] != texts["deep"] != texts["heal"]


@pytest.mark.parametrize("surgery", [DEEP, HEAL])
def test_generate_makes_what_it_needs_and_leaves_no_residuals(
    surgery: dict[str, Any], kin: Path, tmp_path: Path
) -> None:
    path = write(kin, "alone", **near(surgery=surgery))
    arguments = ("generate", path, "-d", "math", "-p", "oak", "--max-new-tokens", 4, "--store", tmp_path / "store")
    told = document(*arguments)
    assert told["surgery"] == surgery["module"]
    assert not residuals(tmp_path)
    made = [found.kind for found in Store(tmp_path / "store").list()]
    assert made.count("surgery") == 1
    # a domain's own correction needs no other domain
    assert made.count("responses") == (4 if surgery is HEAL else 2)
    assert document(*arguments) == told
