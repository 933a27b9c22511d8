"""Exports do what the attached model does: in heads, as adapters, as code; and what differs is never shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from relatives import make_family, write
from test_attach import PROMPTS
from test_cli import call as _call
from tiny import ARCHITECTURES, tiny_model
from torch import Tensor

from suture.attach import attach
from suture.checkpoint import header, weight_files
from suture.errors import RecipeError, SurgeryError, SutureError
from suture.export import verify
from suture.export.head import HeadFolding, head_lora
from suture.export.kinds import KINDS, narrowed
from suture.export.shards import add_tensors, link_shards
from suture.export.verify import Case, VerificationError, judge
from suture.models import hidden_size
from suture.recipe import Recipe, load_recipe
from suture.surgery import Affine, make_surgery


def straight(hidden: int, name: str = "linear", strength: float = 0.7) -> Affine:
    """A random linear module that moves states by as much as they are large."""
    module = make_surgery(name, hidden, rank=4)
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    module.strength = strength
    assert isinstance(module, Affine)
    return module.eval().requires_grad_(False)


def call(*arguments: Any) -> Any:
    return _call(*map(str, arguments))


def logits(model: Any) -> list[Tensor]:
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in PROMPTS]


def attached_logits(model: Any, surgery: Affine) -> list[Tensor]:
    with attach(model, {"a": surgery}, probe=False).domain("a"):
        return logits(model)


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, two in zip(found, expected, strict=True):
        assert float((one - two).abs().max()) <= 1e-5 * float(two.abs().max())


def fold(model: Any, surgery: Affine, source: Path, folder: Path) -> Any:
    """A checkpoint in `folder` whose head has the correction, loaded by stock classes."""
    model.save_pretrained(source, max_shard_size="12KB")
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    change = HeadFolding(model, surgery, {k: v for file in weight_files(source) for k, v in header(file).items()})
    assert link_shards(source, folder, change) == []
    change.finish(folder)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not [name for name, faults in info.items() if faults]
    return loaded


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_linear_module_folds_into_any_head(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    surgery = straight(hidden_size(model))
    expected, plain = attached_logits(model, surgery), logits(model)
    before = {file.name: file.read_bytes() for file in tmp_path.glob("source/*.safetensors")}
    loaded = fold(model, surgery, tmp_path / "source", tmp_path / "folded")
    same(logits(loaded), expected)
    assert float((expected[0] - plain[0]).abs().max()) > 0.05 * float(plain[0].abs().max())  # no trifle
    assert not loaded.config.tie_word_embeddings
    assert loaded.get_input_embeddings().weight.data_ptr() != loaded.get_output_embeddings().weight.data_ptr()
    for name, content in before.items():
        assert (tmp_path / "source" / name).read_bytes() == content
    loaded.save_pretrained(tmp_path / "again")
    same(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")), expected)


def test_a_constant_goes_into_a_head_with_a_bias_and_into_no_other(tmp_path: Path) -> None:
    settings = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.PhiConfig(**settings, num_attention_heads=4, pad_token_id=0, initializer_range=0.2)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    surgery = straight(32, "affine")
    expected = attached_logits(model, surgery)
    same(logits(fold(model, surgery, tmp_path / "source", tmp_path / "folded")), expected)
    with pytest.raises(SurgeryError, match="holds no bias"):
        HeadFolding(tiny_model(), surgery, {})
    with pytest.raises(SurgeryError, match="take a linear module"):
        head_lora(model, surgery, model.lm_head.weight)


def test_shards_that_do_not_change_are_linked(tmp_path: Path) -> None:
    model = tiny_model("mistral")
    source, folder = tmp_path / "source", tmp_path / "folded"
    fold(model, straight(32), source, folder)
    inodes = {file.stat().st_ino for file in source.glob("*.safetensors")}
    linked = [file for file in folder.glob("*.safetensors") if file.stat().st_ino in inodes]
    assert len(inodes) > 3
    assert len(linked) == len(inodes) - 1  # but the one with the head


def test_a_tensor_that_is_there_is_not_added(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    with pytest.raises(Exception, match=r"has a tensor model\.norm\.weight already"):
        add_tensors(tmp_path, {"model.norm.weight": torch.ones(32)})
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt2"])
def test_a_head_lora_is_loaded_by_peft(architecture: str, tmp_path: Path) -> None:
    """Tied heads too: the embedding stays as it is."""
    from peft import PeftModel

    model = tiny_model(architecture)
    surgery = straight(hidden_size(model))
    expected, plain = attached_logits(model, surgery), logits(model)
    head_lora(model, surgery, model.get_output_embeddings().weight).save(tmp_path, "merged", torch.float32)
    adapted = PeftModel.from_pretrained(model, str(tmp_path))
    same(logits(adapted), expected)
    with adapted.disable_adapter():
        same(logits(adapted), plain)


# Which correction goes where


def recipe(tmp_path: Path, *modules: dict[str, Any]) -> Recipe:
    (tmp_path / "family").mkdir()
    surgery = [{"rank": 4, "samples": 12, **module} for module in modules]
    return load_recipe(write(make_family(tmp_path / "family"), "any", surgery=surgery))


DARTS, AFFINE, DEEP, HEAL = ({"module": name} for name in ("darts", "affine", "deep", "heal"))
MIXED = {"module": "auto", "rank": None, "among": ["darts", "linear"]}


@pytest.mark.parametrize(
    ("kind", "label", "domains", "expected"),
    [
        ("hf", None, [], "affine"),
        ("vllm", "darts", ["math"], "darts"),
        ("plain", None, [], "heal"),
        ("plain", "deep", ["math"], "deep"),
        ("adapter", None, [], "deep"),
        ("gguf", "affine", ["chat"], "affine"),
    ],
)
def test_the_last_correction_that_fits_is_exported(
    kind: str, label: str | None, domains: list[str], expected: str, tmp_path: Path
) -> None:
    found = narrowed(recipe(tmp_path, DARTS, AFFINE, DEEP, HEAL), kind, label, domains)
    assert [each.label for each in found.surgery] == [expected]
    assert list(found.domains) == (domains or ["math", "chat"])


@pytest.mark.parametrize(
    ("kind", "label", "domains", "modules", "message"),
    [
        ("onnx", None, [], [DARTS], "unknown kind 'onnx'"),
        ("hf", "dart", [], [DARTS], "unknown surgery 'dart'; did you mean 'darts'"),
        ("hf", None, ["mth"], [DARTS], "unknown domain 'mth'; did you mean 'math'"),
        ("plain", "darts", [], [DARTS, DEEP], "darts is not linear in the state; export it --to hf or vllm or take"),
        ("adapter", None, [], [DARTS], "can hold none of darts.*add module linear or deep"),
        (
            "hf",
            "deep",
            [],
            [DARTS, DEEP],
            "acts inside the layers.*--to plain or adapter or gguf or take --surgery darts",
        ),
        ("adapter", "heal", [], [HEAL], "one correction for all domains.*--to plain"),
        ("plain", "auto", ["math"], [MIXED], "may choose what is not linear"),
        ("plain", "auto", ["math"], [{**MIXED, "among": ["affine", "deep"]}], "may choose what is not linear"),
        ("plain", None, [], [DEEP], "holds one domain, or heal for all: name it with --domain"),
        ("plain", None, ["math"], [HEAL], "leave --domain out"),
    ],
)
def test_what_a_kind_cannot_hold_is_refused_with_the_alternatives(
    kind: str, label: str | None, domains: list[str], modules: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises((RecipeError, SurgeryError), match=message):
        narrowed(recipe(tmp_path, *modules), kind, label, domains)


def test_every_kind_is_said_in_the_help() -> None:
    assert all(kind in call("export", "--help").stdout for kind in KINDS)


# Judging


def case(lead: float) -> Case:
    return Case("math", torch.tensor([1, 2]), torch.full((2, 4), 2.0), torch.tensor([3, 1]), torch.tensor([9.0, lead]))


def answer(difference: float, greedy: list[int]) -> dict[str, Any]:
    return {"engine": "e", "versions": {}, "cases": [{"index": 0, "logits": difference, "greedy": greedy}]}


def test_greedy_tokens_may_part_only_where_the_reference_is_tied() -> None:
    assert judge(answer(1e-6, [3, 1]), [case(9.0)], 1e-5)["greedy"] == "2/2"
    assert judge(answer(1e-6, [3, 0]), [case(1e-5)], 1e-5)["greedy"] == "1/1"
    with pytest.raises(VerificationError, match="1 of 2 greedy tokens agree") as found:
        judge(answer(1e-6, [3, 0]), [case(1e-3)], 1e-5)
    assert found.value.report["rows"][0]["greedy"] == 1
    for difference in (1e-4, float("nan")):
        with pytest.raises(VerificationError, match="logits by"):
            judge(answer(difference, [3, 1]), [case(9.0)], 1e-5)


# The whole way


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(recipe, store) of a tiny family with a correction of each sort."""
    place = tmp_path_factory.mktemp("export")
    (place / "family").mkdir()
    fast = {"rank": 4, "samples": 12}
    steps = {"steps": 20, "batch": 4, "T_max": 32}
    surgery = [{"module": "darts", **fast, **steps}, {"module": "affine", **fast}, {"module": "deep", **fast}]
    return write(make_family(place / "family"), "three", surgery=surgery), place / "store"


def exported(ran: tuple[Path, Path], out: Path, *more: str) -> dict[str, Any]:
    result = call("export", ran[0], "--out", out, "--store", ran[1], "--json", "-q", *more)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("hf", ["--surgery", "darts"]),
        ("plain", ["--surgery", "affine", "--domain", "math"]),
        ("plain", ["--surgery", "deep", "--domain", "chat"]),
        ("adapter", ["--surgery", "deep"]),
        ("adapter", ["--surgery", "affine"]),
    ],
)
def test_an_export_is_loaded_by_its_engine_and_says_all_about_itself(
    ran: tuple[Path, Path], kind: str, more: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    told = exported(ran, out, "--to", kind, *more)
    kept = json.loads((out / "suture.json").read_text())
    (checked,) = kept["verified"]
    assert checked["engine"] == "transformers"
    assert checked["logits"] <= 1e-5
    assert checked["greedy"].split("/")[0] == checked["greedy"].split("/")[1] != "0"
    assert told["verified"] == kept["verified"]
    assert kept["to"] == kind
    assert str(tmp_path) not in (out / "suture.json").read_text() + (out / "README.md").read_text()
    label = "linear" if "affine" in more else more[1]
    assert {row["surgery"] for row in kept["corrections"].values()} == {label}
    assert {row["model"] for row in kept["scores"]} == {"merged", "target", label}
    card = (out / "README.md").read_text()
    assert "What it does not fix" in card
    assert label in card
    assert (out / "figures" / "scores.png").stat().st_size > 1000
    assert (out / "tokenizer.json").exists()
    assert (out / "generation_config.json").exists()
    assert not list(tmp_path.glob(".*"))
    if kind == "hf":
        assert kept["default"] == "auto"
        assert kept["router"]["accuracy"] >= 0
    again = call("export", ran[0], "--to", kind, "--out", out, "--store", ran[1], *more)
    assert again.exit_code == 1
    assert "--force" in again.stderr


def test_an_export_that_differs_is_kept_as_failed_and_nothing_is_lost(
    ran: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from suture.export import head

    out = tmp_path / "out"
    exported(ran, out, "--to", "plain", "--surgery", "affine", "--domain", "math")
    before = {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}
    kept = head.folded
    monkeypatch.setattr(head, "folded", lambda weight, surgery: kept(weight, surgery) * 1.001)
    arguments = ("--to", "plain", "--surgery", "affine", "--domain", "math", "--force", "--store", ran[1])
    found = call("export", ran[0], "--out", out, *arguments)
    assert found.exit_code == 1
    assert "differs from the model that was scored" in found.stderr
    assert {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()} == before
    report = json.loads((tmp_path / "out.failed" / "failed.json").read_text())
    assert max(row["logits"] for row in report["rows"]) > report["limit"] == 1e-5
    assert not (tmp_path / "out.failed" / "suture.json").exists()
    refused = call("push", tmp_path / "out.failed", "org/name", "--dry-run")
    assert refused.exit_code == 1


def test_an_engine_that_is_not_there_is_told_before_any_work(tmp_path: Path) -> None:
    verify.need_engine("transformers", None, "peft")
    with pytest.raises(SutureError, match=r"no llama-cpp-python: pip install llama-cpp-python, or name .* --python"):
        verify.need_engine("llama_cpp", None)
    with pytest.raises(SutureError, match=r"--python: .*nothing cannot be run"):
        verify.need_engine("vllm", tmp_path / "nothing")


def test_an_engine_that_cannot_load_is_told_with_its_last_lines(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(VerificationError, match="transformers cannot load the export"):
        verify.verify(tmp_path / "model", "plain", "transformers", [case(1.0)], dtype=torch.float32, limit=1e-5)
