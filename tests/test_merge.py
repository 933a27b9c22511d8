"""Merging against the formulas, mergekit's own command and PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import ARCHITECTURES, nearby, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from suture.adapter import lora_factors
from suture.checkpoint import parse_reference, resolve
from suture.engine import merge_methods
from suture.errors import FamilyError, MergeError
from suture.merge import Merge
from suture.store import FileHashes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two full fine-tunes, and two LoRA fine-tunes of one tiny Llama."""
    folder = tmp_path_factory.mktemp("family")
    base = tiny_model(tie_word_embeddings=False)
    base.config.architectures = ["LlamaForCausalLM"]
    for name, model in (("base", base), ("one", nearby(base, 1, 0.3)), ("two", nearby(base, 2, 0.3))):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    for name, settings in (("lora", {"lora_alpha": 16}), ("rslora", {"lora_alpha": 6, "use_rslora": True})):
        save_adapter(folder, name, **settings)
    return folder


def save_adapter(folder: Path, name: str, **settings: Any) -> None:
    base = tiny_model(tie_word_embeddings=False)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "gate_proj"], task_type="CAUSAL_LM", **settings)
    adapted = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(len(name))
    for key, tensor in adapted.named_parameters():
        if "lora_" in key:
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    adapted.save_pretrained(folder / name)


def weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def config_of(method: str, *models: tuple[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    found = {"merge_method": method, "models": [{"model": name, "parameters": given} for name, given in models], **more}
    return {**found, "base_model": "base", "dtype": "float32"} if method != "linear" else {**found, "dtype": "float32"}


def merged(family: Path, config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    return dict(Merge(config, family, seed=seed).tensors())


def test_task_arithmetic_is_equation_1(family: Path) -> None:
    found = merged(family, config_of("task_arithmetic", ("one", {"weight": 0.5}), ("two", {"weight": 0.7})))
    base, one, two = (weights(family / name) for name in ("base", "one", "two"))
    assert set(found) == set(base)
    for name, tensor in found.items():
        expected = base[name] + 0.5 * (one[name] - base[name]) + 0.7 * (two[name] - base[name])
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=1e-6)


def test_weighted_average(family: Path) -> None:
    found = merged(family, config_of("linear", ("one", {"weight": 1.0}), ("two", {"weight": 3.0})))
    one, two = weights(family / "one"), weights(family / "two")
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, 0.25 * one[name] + 0.75 * two[name], atol=1e-6, rtol=1e-6)


def ties(base: Tensor, parents: list[Tensor], density: float, normalize: bool) -> Tensor:
    """TIES for one tensor with weights of one: trim by magnitude, elect signs, add what agrees."""
    taus = []
    for parent in parents:
        tau = parent - base
        keep = int(density * tau.numel())
        threshold = tau.abs().flatten().sort(descending=True).values[keep - 1]
        taus.append(torch.where(tau.abs() >= threshold, tau, 0.0))
    stacked = torch.stack(taus)
    elected = torch.sign(stacked.sum(0))
    agree = torch.sign(stacked) == elected
    total = (stacked * agree).sum(0)
    return base + (total / agree.sum(0).clamp(min=1) if normalize else total)


@pytest.mark.parametrize("normalize", [True, False])
def test_ties_is_trim_elect_merge(family: Path, normalize: bool) -> None:
    config = config_of(
        "ties",
        ("one", {"weight": 1.0, "density": 0.5}),
        ("two", {"weight": 1.0, "density": 0.5}),
        parameters={"normalize": normalize},
    )
    found = merged(family, config)
    base, one, two = (weights(family / name) for name in ("base", "one", "two"))
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        expected = ties(base[name], [one[name], two[name]], 0.5, normalize)
        torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["dare_ties", "dare_linear"])
def test_dare_is_seeded_and_leaves_the_callers_generator_alone(family: Path, method: str) -> None:
    config = config_of(method, ("one", {"weight": 0.5, "density": 0.5}), ("two", {"weight": 0.5, "density": 0.5}))
    torch.manual_seed(11)
    expected_next = torch.rand(3)
    torch.manual_seed(11)
    first = merged(family, config, seed=5)
    assert torch.equal(torch.rand(3), expected_next)
    again, other = merged(family, config, seed=5), merged(family, config, seed=6)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    untouched = (first[name] == weights(family / "base")[name]).float().mean()
    assert float(untouched) == pytest.approx(0.25, abs=0.05)  # dropped from both task vectors, each with chance 1/2


@pytest.mark.parametrize("method", ["task_arithmetic", "linear", "ties", "slerp"])
def test_disk_memory_and_mergekits_own_command_agree(family: Path, method: str, tmp_path: Path) -> None:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    given: dict[str, Any] = {} if method == "slerp" else {"weight": 0.6}
    config = config_of(method, ("base" if method == "slerp" else "one", given), ("two", given))
    if method == "slerp":
        config["parameters"] = {"t": 0.3}
    merge = Merge(config, family)
    merge.write(tmp_path / "ours")
    absolute = {**config, "models": [{**m, "model": str(family / m["model"])} for m in config["models"]]}
    if "base_model" in config:
        absolute["base_model"] = str(family / "base")
    run_merge(MergeConfiguration.model_validate(absolute), str(tmp_path / "theirs"), MergeOptions(quiet=True))
    theirs, ours = weights_of(tmp_path / "theirs"), weights_of(tmp_path / "ours")
    model = merge.model(torch.float32, CPU)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor)
        assert torch.equal(model.state_dict()[name], tensor)
    for file in ("config.json", "tokenizer.json", "generation_config.json", "mergekit_config.yml"):
        assert (tmp_path / "ours" / file).exists()


def weights_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return found


@pytest.mark.parametrize("name", ["lora", "rslora"])
def test_an_adapter_reads_as_what_peft_merges(family: Path, name: str) -> None:
    found = merged(family, config_of("linear", (f"base+{name}", {"weight": 1.0})))
    base = tiny_model(tie_word_embeddings=False)
    expected = PeftModel.from_pretrained(base, str(family / name)).merge_and_unload().state_dict()
    plain = weights(family / "base")
    changed = "model.layers.1.mlp.down_proj.weight"
    assert not torch.allclose(plain[changed], expected[changed], atol=1e-3)
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], atol=1e-6, rtol=1e-6)


def test_adapter_patterns_of_rank_and_alpha(family: Path) -> None:
    save_adapter(
        family, "patterns", lora_alpha=8, rank_pattern={"down_proj": 2}, alpha_pattern={"layers.0.mlp.down_proj": 10}
    )
    checkpoint = resolve(parse_reference("base+patterns", family))
    factors = lora_factors(checkpoint)
    assert factors["model.layers.0.mlp.down_proj.weight"][2] == 5.0
    assert factors["model.layers.1.mlp.down_proj.weight"][2] == 4.0
    assert factors["model.layers.1.self_attn.q_proj.weight"][2] == 2.0
    test_an_adapter_reads_as_what_peft_merges(family, "patterns")


def test_adapters_that_are_more_than_lora_are_refused(family: Path) -> None:
    save_adapter(family, "dora", use_dora=True)
    with pytest.raises(MergeError, match=r"dora is not a plain LoRA \(use_dora\)"):
        lora_factors(resolve(parse_reference("base+dora", family)))


def test_effective_weights(family: Path) -> None:
    def shown(config: dict[str, Any]) -> list[tuple[float | None, float | None, float | None]]:
        return [(row.given, row.effective, row.density) for row in Merge(config, family).weights]

    pair = (("one", {"weight": 0.5, "density": 0.4}), ("two", {"weight": 1.5, "density": 0.4}))
    assert shown(config_of("ties", *pair)) == [(0.5, None, 0.4), (1.5, None, 0.4)]  # divided element by element
    said = Merge(config_of("ties", *pair), family).weights[0].sentence()
    assert said == "weight 0.5 over the weights that agree at each element, density 0.4: one"
    assert shown(config_of("ties", *pair, parameters={"normalize": False})) == [(0.5, 0.5, 0.4), (1.5, 1.5, 0.4)]
    average = (("one", {"weight": 1}), ("two", {"weight": 3}))
    assert shown(config_of("linear", *average)) == [(1, 0.25, None), (3, 0.75, None)]
    assert Merge(config_of("linear", *average), family).weights[0].sentence() == "weight 0.25 (written 1): one"
    assert shown(config_of("dare_linear", *pair)) == [(0.5, 0.5, 0.4), (1.5, 1.5, 0.4)]
    scaled = config_of("task_arithmetic", *pair, parameters={"lambda": 0.3})
    assert shown(scaled) == [(0.5, pytest.approx(0.15), 0.4), (1.5, pytest.approx(0.45), 0.4)]
    found = merged(family, config_of("task_arithmetic", ("one", {"weight": 0.5}), parameters={"lambda": 0.3}))
    base, one = (weights(family / parent)["lm_head.weight"] for parent in ("base", "one"))
    torch.testing.assert_close(found["lm_head.weight"], base + 0.15 * (one - base), atol=1e-6, rtol=1e-6)
    plain = (("one", {"weight": 0.5}), ("two", {"weight": [0.1, 0.9]}))
    assert shown(config_of("task_arithmetic", *plain)) == [(0.5, 0.5, None), (None, None, None)]


def test_parameters_that_do_nothing_are_noted(family: Path) -> None:
    merge = Merge(config_of("ties", ("one", {"weight": 0.5, "densty": 0.5})), family)
    assert merge.notes == ["merge: ties has no parameter 'densty', so it does nothing; did you mean 'density'?"]
    assert Merge(config_of("ties", ("one", {"weight": 0.5, "density": 0.5})), family).notes == []


def test_fingerprint_is_of_contents(family: Path, tmp_path: Path) -> None:
    import shutil

    hashes = FileHashes(tmp_path / "hashes.json")
    config = config_of("task_arithmetic", ("one", {"weight": 0.5}), ("base+lora", {"weight": 0.7}))
    first = Merge(config, family).fingerprint(hashes)
    shutil.copytree(family, tmp_path / "elsewhere")
    assert Merge(config, tmp_path / "elsewhere").fingerprint(hashes) == first
    assert Merge(config, family, seed=1).fingerprint(hashes) != first
    config["models"][0]["parameters"]["weight"] = 0.6
    assert Merge(config, family).fingerprint(hashes) != first


def test_a_tensor_that_is_not_finite_is_named(family: Path, tmp_path: Path) -> None:
    broken = tiny_model(tie_word_embeddings=False)
    broken.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    broken.save_pretrained(tmp_path / "broken")
    config = config_of("linear", (str(family / "one"), {"weight": 1}), (str(tmp_path / "broken"), {"weight": 1}))
    with pytest.raises(MergeError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is not finite"):
        Merge(config, family).model(torch.float32, CPU)
    with pytest.raises(MergeError, match="not finite"):
        Merge(config, family).write(tmp_path / "out")


def test_half_precision_parents_overflow_is_told(family: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        model = tiny_model(tie_word_embeddings=False).to(torch.float16)
        model.lm_head.weight[0, 0] = 60_000.0
        model.save_pretrained(tmp_path / name)
    base = tiny_model(tie_word_embeddings=False).to(torch.float16)
    base.save_pretrained(tmp_path / "base")
    config = {
        "merge_method": "task_arithmetic",
        "base_model": "base",
        "dtype": "float16",
        "models": [{"model": name, "parameters": {"weight": 1.0}} for name in ("a", "b")],
    }
    with pytest.raises(MergeError, match=r"lm_head\.weight is not finite.*float32"):
        dict(Merge(config, tmp_path).tensors())


def test_refusals(family: Path) -> None:
    with pytest.raises(MergeError, match="unknown method 'tie'; did you mean 'ties'"):
        Merge(config_of("tie", ("one", {})), family)
    with pytest.raises(MergeError, match=r"merge\.merge_method: missing"):
        Merge({"models": []}, family)
    with pytest.raises(MergeError, match=r"merge\.base_modle: unknown field; did you mean 'base_model'"):
        Merge({**config_of("linear", ("one", {"weight": 1})), "base_modle": "base"}, family)
    with pytest.raises(MergeError, match="Exactly one of"):
        Merge({"merge_method": "linear"}, family)
    other = tiny_model(hidden_size=16, head_dim=4)
    other.save_pretrained(family / "other")
    with pytest.raises(FamilyError, match="hidden_size: 32 in one, 16 in other"):
        Merge(config_of("linear", ("one", {"weight": 1}), ("other", {"weight": 1})), family)


def test_slices_make_a_deeper_model(family: Path) -> None:
    """A verbatim mergekit configuration of another form: layers stacked."""
    config = {
        "merge_method": "passthrough",
        "dtype": "float32",
        "slices": [
            {"sources": [{"model": "one", "layer_range": [0, 2]}]},
            {"sources": [{"model": "two", "layer_range": [1, 2]}]},
        ],
    }
    model = Merge(config, family).model(torch.float32, CPU)
    assert model.config.num_hidden_layers == 3
    name = "self_attn.o_proj.weight"
    assert torch.equal(model.state_dict()[f"model.layers.2.{name}"], weights(family / "two")[f"model.layers.1.{name}"])


# mergekit 0.1.5 has no layout for OPT, and expects buffers of GPT-NeoX that transformers no longer stores
@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {"opt", "neox"}))
def test_every_architecture_merges_into_memory(architecture: str, tmp_path: Path) -> None:
    """In memory, on disk and by hand: one merged model, tied heads and experts included."""
    # mergekit looks for Falcon's head even where it is tied
    one = tiny_model(architecture, **({"tie_word_embeddings": False} if architecture == "falcon" else {}))
    two = nearby(one, 1, 0.3)
    for name, model in (("one", one), ("two", two)):
        model.config.architectures = [type(model).__name__]
        model.save_pretrained(tmp_path / name)
    merge = Merge(config_of("linear", ("one", {"weight": 1}), ("two", {"weight": 1})), tmp_path)
    in_memory = merge.model(torch.float32, CPU)
    merge.write(tmp_path / "merged")
    from_disk = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for key, tensor in one.state_dict().items():
        expected = 0.5 * tensor + 0.5 * two.state_dict()[key]
        torch.testing.assert_close(in_memory.state_dict()[key], expected, atol=1e-6, rtol=1e-6)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(in_memory(input_ids=ids).logits, from_disk(input_ids=ids).logits)


def test_an_adapter_of_a_transposed_layer(tmp_path: Path) -> None:
    """GPT-2 stores its weights as [in, out]."""
    base = tiny_model("gpt2")
    base.config.architectures = ["GPT2LMHeadModel"]
    base.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        base, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "lora")
    expected = adapted.merge_and_unload().state_dict()["transformer.h.0.attn.c_attn.weight"]
    found = merged(tmp_path, config_of("linear", ("base+lora", {"weight": 1.0})))
    name = next(key for key in found if key.endswith("h.0.attn.c_attn.weight"))
    torch.testing.assert_close(found[name], expected, atol=1e-6, rtol=1e-6)


def test_methods_of_the_paper_are_there() -> None:
    names = {name for name, _ in merge_methods()}
    assert {"task_arithmetic", "linear", "ties", "dare_ties", "dare_linear"} <= names
