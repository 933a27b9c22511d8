"""Folders on disk are believed only as far as their bytes go; references say exactly one model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from handmade import tensors
from safetensors.torch import save_file

from suture.checkpoint import Reference, header, locate, parse_reference, resolve, weight_files
from suture.errors import ModelError
from suture.store import FileHashes

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 538090408\n"
)


def found(text: str, folder: Path | None = None):
    return resolve(parse_reference(text, folder))


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as told:
        found(str(folder))
    return str(told.value)


def edit(file: Path, **fields) -> None:
    loaded = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**loaded, **fields}))


# What a folder holds


def test_a_good_checkpoint(checkpoint):
    folder = checkpoint("good")
    model = found(str(folder))
    assert (model.base, model.folder, model.adapter) == (folder, folder, None)
    assert model.config["hidden_size"] == 4
    assert model.adapter_config == {}
    assert model.shards == [folder / "model.safetensors"]
    assert model.tensors["lm_head.weight"] == ("F32", (7, 4))
    assert set(model.tensors) == set(tensors())
    assert model.size == (folder / "model.safetensors").stat().st_size


def test_transformers_own_checkpoint_has_the_same_header(tmp_path):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="2KB")
    read = found(str(tmp_path / "sharded"))
    assert len(read.shards) > 1
    assert read.tensors == {key: ("BF16", tuple(value.shape)) for key, value in model.state_dict().items()}


def test_a_missing_shard_is_named(checkpoint):
    folder = checkpoint("sharded", shards=3)
    assert len(found(str(folder)).shards) == 3
    (folder / "model-00002-of-00003.safetensors").unlink()
    told = refused(folder)
    assert str(folder) in told
    assert "lacks 1 of its 3 shards: model-00002-of-00003.safetensors; download" in told


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": null}', '{"weight_map": []}'])
def test_an_index_without_shards(checkpoint, content):
    folder = checkpoint("sharded", shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    assert f"{folder}/model.safetensors.index.json names no shards" in refused(folder)


def test_two_sets_of_weights_in_one_folder(checkpoint):
    folder = checkpoint("sharded", shards=2)
    save_file(tensors(), folder / "model.safetensors")
    assert f"{folder} has both model.safetensors and an index of shards" in refused(folder)


def test_a_stray_safetensors_file_is_no_shard(checkpoint):
    folder = checkpoint("stray")
    save_file({"x": torch.ones(2)}, folder / "surgery.safetensors")
    assert found(str(folder)).shards == [folder / "model.safetensors"]


def test_a_git_lfs_pointer_is_called_one(checkpoint):
    folder = checkpoint("lfs")
    (folder / "model.safetensors").write_text(POINTER)
    assert f"{folder}/model.safetensors is a Git LFS pointer, not weights: run `git lfs pull`" in refused(folder)
    shards = checkpoint("lfs shards", shards=2)
    (shards / "model-00002-of-00002.safetensors").write_text(POINTER)
    assert "model-00002-of-00002.safetensors is a Git LFS pointer" in refused(shards)


def test_a_truncated_file_is_told_with_both_sizes(checkpoint):
    folder = checkpoint("short")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    assert f"{file} is cut short ({len(whole) - 10} of {len(whole)} bytes): download it again" in refused(folder)
    file.write_bytes(whole[:40])
    assert f"{file} is not a safetensors file, or is cut short" in refused(folder)


def framed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a safetensors file, or is cut short"),
        (b"PK\x03\x04", "is not a safetensors file, or is cut short"),
        (b"<html><body>404 not found</body></html>", "is not a safetensors file, or is cut short"),
        (framed(b"{not json}"), "has a broken safetensors header"),
        (framed(b"\xff\xfe\xfd"), "has a broken safetensors header"),
        (framed(b"[1, 2, 3]"), "has a broken safetensors header"),
        (framed(b'{"a": 1}'), "has a broken safetensors header"),
        (framed(b'{"a": {"dtype": "F32", "shape": [1]}}'), "has a broken safetensors header"),
        (framed(b'{"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}1234'), "has a broken safetensors header"),
        (framed(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": []}}'), "has a broken safetensors header"),
    ],
)
def test_garbage_is_told_by_file(checkpoint, content, message):
    folder = checkpoint("garbage")
    (folder / "model.safetensors").write_bytes(content)
    assert f"{folder}/model.safetensors {message}: download it again" in refused(folder)


def test_pickled_weights_are_refused(checkpoint):
    folder = checkpoint("pickled")
    (folder / "model.safetensors").unlink()
    torch.save(tensors(), folder / "pytorch_model.bin")
    told = refused(folder)
    assert f"{folder} has only pickled weights (pytorch_model.bin)" in told
    assert "convert them to safetensors" in told


def test_no_weights_at_all(checkpoint):
    folder = checkpoint("empty")
    (folder / "model.safetensors").unlink()
    assert f"{folder} holds no model.safetensors, no index and no adapter_model.safetensors" in refused(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing: a model folder needs one"),
        (b"{", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"[]", "should hold a JSON object"),
        (POINTER.encode(), "is a Git LFS pointer: run `git lfs pull`"),
    ],
)
def test_a_config_that_cannot_be_read(checkpoint, content, message):
    file = checkpoint("broken") / "config.json"
    file.unlink() if content is None else file.write_bytes(content)
    assert f"{file} {message}" in refused(file.parent)


def test_headers_need_no_weights_in_memory(tmp_path):
    file = tmp_path / "huge.safetensors"
    entry = {"huge": {"dtype": "BF16", "shape": [1 << 20, 1 << 19], "data_offsets": [0, 1 << 40]}}
    content = framed(json.dumps({"__metadata__": {"format": "pt"}, **entry}).encode())
    with file.open("wb") as handle:
        handle.write(content)
        handle.truncate(len(content) + (1 << 40))  # sparse
    assert header(file) == {"huge": ("BF16", (1 << 20, 1 << 19))}


# References


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("org/name", Reference("org/name")),
        ("gpt2", Reference("gpt2")),
        ("org/name@v1.0", Reference("org/name", "v1.0")),
        ("org/name+org/lora", Reference("org/name", None, "org/lora")),
        ("org/name@a+org/lora@b", Reference("org/name", "a", "org/lora", "b")),
        ("org/name+org/lora@b", Reference("org/name", None, "org/lora", "b")),
    ],
)
def test_references(text, reference):
    assert parse_reference(text) == reference
    assert str(reference) == text


@pytest.mark.parametrize("text", ["", "+", "org/name+", "+org/lora", "a/b+c/d+e/f"])
def test_references_that_cannot_be_read(text):
    with pytest.raises(ModelError, match=r"cannot read the model reference .*: write a folder, org/name\[@revision\]"):
        parse_reference(text)


def test_a_revision_must_be_there():
    with pytest.raises(ModelError, match="'org/name@' ends in @ without a revision"):
        parse_reference("org/name@")


def test_relative_paths_start_from_the_recipes_folder(checkpoint, adapter, tmp_path, monkeypatch):
    base, lora = checkpoint("recipes/base"), adapter("recipes/loras/math", "org/base")
    monkeypatch.chdir("/")
    folder = tmp_path / "recipes"
    assert parse_reference("base", folder) == Reference(str(base))
    assert parse_reference("./base+loras/math", folder) == Reference(str(base), None, str(lora))
    assert parse_reference("../recipes/base", folder) == Reference(str(base))
    assert parse_reference("org/base+loras/math", folder) == Reference("org/base", None, str(lora))
    assert parse_reference("base", tmp_path) == Reference("base")  # not there: a name on the hub
    both = found("base+loras/math", folder)
    assert (both.base, both.adapter, both.folder) == (base, lora, base)
    assert both.adapter_config["lora_alpha"] == 4


def test_the_users_own_folder(checkpoint, tmp_path, monkeypatch):
    base = checkpoint("home/models/base")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert found("~/models/base", Path("/")).base == base


def test_paths_with_plus_and_at(checkpoint, adapter, tmp_path):
    base, lora = checkpoint("c++/base@v2"), adapter("c++/lora+more", None)
    assert parse_reference(str(base)) == Reference(str(base))
    assert parse_reference("c++/base@v2", tmp_path) == Reference(str(base))
    assert parse_reference(f"{base}+{lora}") == Reference(str(base), None, str(lora))
    assert parse_reference("base@v2+lora+more", tmp_path / "c++") == Reference(str(base), None, str(lora))
    assert parse_reference(f"org/name@v1+{lora}") == Reference("org/name", "v1", str(lora))
    assert parse_reference(f"{base}+org/lora@b") == Reference(str(base), None, "org/lora", "b")


def test_a_local_folder_has_no_revisions(checkpoint):
    folder = checkpoint("base")
    with pytest.raises(ModelError, match=r"base@v1' asks for a revision, but .*base is a local folder"):
        parse_reference(f"{folder}@v1")


def test_an_adapter_alone_names_its_base(checkpoint, adapter):
    base = checkpoint("base")
    lora = adapter("lora", str(base))
    model = found(str(lora))
    assert (model.base, model.adapter) == (base, lora)
    assert str(model.reference) == f"{base}+{lora}"
    # what is written wins over what the adapter says
    other = checkpoint("other")
    assert found(f"{other}+{lora}").base == other


def test_an_adapters_relative_base(checkpoint, adapter, tmp_path, monkeypatch):
    beside = checkpoint("runs/base")
    lora = adapter("runs/lora", "../base")
    monkeypatch.chdir("/")
    assert found(str(lora)).base == beside
    here = checkpoint("base")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")  # PEFT's own reading comes first
    assert found(str(lora)).base == here


def test_an_adapter_without_its_base(adapter, tmp_path):
    nameless, lost = adapter("nameless", None), adapter("lost", str(tmp_path / "gone"))
    assert refused(nameless) == f"{nameless}/adapter_config.json names no base model: write it as base+{nameless}"
    told = refused(lost)
    assert f"the base that {lost}/adapter_config.json names: no such folder: {tmp_path / 'gone'}" in told
    assert f"or write base+{lost}" in told


def test_adapters_are_checked_too(checkpoint, adapter):
    base = checkpoint("base")
    lora = adapter("lora", str(base))
    (lora / "adapter_model.safetensors").write_text(POINTER)
    assert "adapter_model.safetensors is a Git LFS pointer" in refused(lora)
    (lora / "adapter_model.safetensors").unlink()
    torch.save({}, lora / "adapter_model.bin")
    assert "only pickled weights (adapter_model.bin)" in refused(lora)
    (lora / "adapter_config.json").write_text("{")
    assert f"{lora}/adapter_config.json is not valid JSON" in refused(lora)
    with pytest.raises(ModelError, match=r"base/adapter_config\.json is missing: an adapter needs one"):
        found(f"{base}+{base}")


@pytest.mark.parametrize("name", ["/no/such/folder", "./folder", "../folder", "~/folder", "a/b/c"])
def test_folders_that_are_not_there(name):
    with pytest.raises(ModelError, match=f"no such folder: {name}"):
        locate(name)


# Without a connection


def test_local_copies_take_the_place_of_the_hub(checkpoint, tmp_path, monkeypatch):
    kept = checkpoint("home/models/org/name")
    checkpoint("home/models/gpt2")
    monkeypatch.setenv("SUTURE_HOME", str(tmp_path / "home"))
    assert found("org/name").base == kept
    assert found("gpt2").base == tmp_path / "home" / "models" / "gpt2"


def test_the_offline_error_says_where_to_put_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("SUTURE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "models" / "org" / "name"
    with pytest.raises(ModelError) as told:
        found("org/name")
    assert str(told.value).startswith("org/name is neither a local folder nor to be had from the hub (")
    assert str(told.value).endswith(f"; without a connection, put the checkpoint into {place}")
    assert "\n" not in str(told.value)
    with pytest.raises(ModelError) as told:
        found("org/name@v1")
    assert str(told.value).endswith(f"put the checkpoint into {place} and leave out @v1")


def test_the_hubs_cache_is_used_without_a_connection(checkpoint, tmp_path, monkeypatch):
    import huggingface_hub

    cache = tmp_path / "cache" / "models--org--name"
    commit = "a" * 40
    folder = checkpoint("source")
    shutil.copytree(folder, cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *args, **more: real(*args, cache_dir=cache.parent, **more)
    )
    assert found("org/name").base == cache / "snapshots" / commit
    assert found(f"org/name@{commit}").base == cache / "snapshots" / commit


# Fingerprints


@pytest.fixture
def mark(tmp_path):
    return lambda folder: found(str(folder)).fingerprint(FileHashes(tmp_path / "hashes.json"))


def test_fingerprints_do_not_depend_on_the_place_or_on_provenance(checkpoint, mark, tmp_path):
    first = checkpoint("first", transformers_version="4.40.0", torch_dtype="float32", _name_or_path="/home/ann/x")
    second = checkpoint("second", transformers_version="5.1.0", dtype="bfloat16", use_cache=False)
    shutil.copytree(first, tmp_path / "copied")
    assert mark(first) == mark(second) == mark(tmp_path / "copied")
    assert len(mark(first)) == 64


def test_fingerprints_change_with_what_is_computed(checkpoint, mark):
    weights = tensors()
    weights["model.norm.weight"][2] += 1e-3
    generation = checkpoint("ends")
    (generation / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    found = [
        mark(checkpoint("first")),
        mark(checkpoint("weight", weights)),
        mark(checkpoint("theta", rope_theta=500000.0)),
        mark(checkpoint("added", rope_scaling={"type": "linear", "factor": 2.0})),
        mark(generation),
    ]
    assert len(set(found)) == 5


def test_sampling_settings_are_not_part_of_a_fingerprint(checkpoint, mark):
    plain, sampled = checkpoint("plain"), checkpoint("sampled")
    (sampled / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    assert mark(plain) == mark(sampled)


def test_fingerprints_change_with_modelling_code(checkpoint, mark):
    folder = checkpoint("remote", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    (folder / "modeling_own.py").write_text("SCALE = 1\n")
    before = mark(folder)
    (folder / "modeling_own.py").write_text("SCALE = 2\n")
    assert mark(folder) != before


def test_fingerprints_of_adapters(checkpoint, adapter, mark, tmp_path):
    base = checkpoint("base")
    moved = checkpoint("moved")
    first = mark(adapter("first", str(base)))
    assert first != mark(base)
    both = {"target_modules": ["q_proj", "v_proj"]}
    turned = {"target_modules": ["v_proj", "q_proj"], "inference_mode": True, "peft_version": "0.18.0"}
    assert mark(adapter("both", str(base), **both)) == mark(adapter("turned", str(moved), **turned))
    others = [
        mark(adapter("alpha", str(base), lora_alpha=8)),
        mark(adapter("rs", str(base), use_rslora=True)),
        mark(adapter("weights", str(base), layers=(1,))),
        mark(adapter("elsewhere", str(checkpoint("theta", rope_theta=1e6)))),
    ]
    assert len({first, *others}) == 5


def test_target_modules_may_be_a_pattern(checkpoint, adapter, mark):
    base = str(checkpoint("base"))
    one, two = (adapter(name, base, target_modules=name) for name in (".*q_proj|x", ".*x|q_proj"))
    assert mark(one) != mark(two)


def test_weight_files_come_in_a_fixed_order(checkpoint):
    folder = checkpoint("sharded", shards=3)
    assert [file.name for file in weight_files(folder)] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
