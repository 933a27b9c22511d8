"""The stand-alone check of exports: another process, and other versions of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_attach import PROMPTS, strong
from tiny import nearby, tiny_model
from torch import Tensor

from suture.attach import attach
from suture.export.engines import transformers as engine
from suture.export.remote import write_remote
from suture.models import hidden_size

TOKENS = 4


def write_request(folder: Path, to: str, by_domain: dict[str | None, Any]) -> Path:
    """A request beside the export in `folder / "export"`; `by_domain` gives each domain's corrected model."""
    tensors: dict[str, Tensor] = {}
    cases = []
    for domain, enter in by_domain.items():
        with enter as model:
            for prompt in PROMPTS:
                ids = torch.tensor([prompt])
                index = len(cases)
                settings = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
                written = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
                tensors[f"ids.{index}"] = ids[0]
                tensors[f"logits.{index}"] = model(input_ids=ids, use_cache=False).logits[0].detach().clone()
                tensors[f"greedy.{index}"] = written[0, len(prompt) :].clone()
                cases.append({"index": index, "domain": domain})
    save_file(tensors, folder / "request.safetensors")
    request = {
        "folder": str(folder / "export"),
        "dtype": "float32",
        "trust_remote_code": to == "hf",
        "new_tokens": TOKENS,
        "to": to,
        "tensors": "request.safetensors",
        "batch": 2,
        "cases": cases,
    }
    (folder / "request.json").write_text(json.dumps(request))
    return folder / "request.json"


def exported(folder: Path, architecture: str) -> Path:
    """An hf export of two domains, and the request to check it."""
    model = tiny_model(architecture)
    hidden = hidden_size(model)
    surgeries = {"math": strong(hidden), "code": strong(hidden, "cosine", 1)}
    folder.mkdir()
    model.save_pretrained(folder / "export")
    write_remote(folder / "export", surgeries, model)
    attached = attach(model, surgeries, probe=False)
    return write_request(folder, "hf", {name: attached.domain(name) for name in (None, "math", "code")})


def right(request: Path, document: dict[str, Any]) -> None:
    """Every case agrees with its reference."""
    tensors = load_file(request.parent / "request.safetensors")
    assert document["engine"] == "transformers"
    assert [case["index"] for case in document["cases"]] == list(range(len(json.loads(request.read_text())["cases"])))
    for case in document["cases"]:
        assert case["logits"] <= 1e-5
        assert case["greedy"] == tensors[f"greedy.{case['index']}"].tolist()


def run(python: str, request: Path, home: Path) -> dict[str, Any]:
    """The check as a process of its own, code of the checkpoint in a folder of the test's."""
    import os

    environment = {**os.environ, "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, str(engine.__file__), str(request)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return document


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "neox"])
def test_remote_code_in_a_fresh_process(architecture: str, tmp_path: Path) -> None:
    request = exported(tmp_path / architecture, architecture)
    document = run(sys.executable, request, tmp_path / "home")
    right(request, document)
    assert set(document["versions"]) == {"transformers", "torch"}


def here(request: Path) -> dict[str, Any]:
    return {
        "engine": "transformers",
        "cases": engine.check(json.loads(request.read_text()), load_file(request.parent / "request.safetensors")),
    }


class Held:
    """A model that is what it is."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *_: object) -> None:
        return None


def test_a_plain_checkpoint(tmp_path: Path) -> None:
    for architecture in ("llama", "bloom"):  # bloom takes no positions
        folder = tmp_path / architecture
        model = tiny_model(architecture)
        model.save_pretrained(folder / "export")
        request = write_request(folder, "plain", {"math": Held(model), None: Held(model)})
        right(request, here(request))


def test_a_difference_is_measured(tmp_path: Path) -> None:
    model = tiny_model()
    nearby(model, 1, 1.0).save_pretrained(tmp_path / "export")
    cases = here(write_request(tmp_path, "plain", {None: Held(model)}))["cases"]
    assert all(case["logits"] > 1e-2 for case in cases)


def test_adapters_by_domain_and_the_root_without_one(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "export")
    models: dict[str | None, Any] = {None: Held(tiny_model())}
    for seed, domain in enumerate(("math", "code")):
        adapted = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in adapted.named_parameters():
            if "lora_" in name:
                tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
        adapted.eval().save_pretrained(tmp_path / "export" / "adapters" / domain)
        models[domain] = Held(adapted)
    request = write_request(tmp_path, "adapter", models)
    right(request, here(request))
    file = tmp_path / "export" / "adapters" / "code" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.elsewhere.lora_A.weight"] = tensors.popitem()[1]
    save_file(tensors, file)
    with (
        pytest.raises(SystemExit, match="adapter code: tensors that did not load"),
        pytest.warns(match="missing adapter keys"),
    ):
        here(request)


def test_weights_that_are_missing_or_left_over_end_the_check(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "export")
    request = write_request(tmp_path, "plain", {None: Held(model)})
    file = tmp_path / "export" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.more"] = tensors.pop("lm_head.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SystemExit, match=r"weights do not fit the config.*lm_head\.weight.*model\.more"):
        here(request)


@pytest.mark.slow
def test_transformers_4_reads_the_same_folder(tmp_path: Path) -> None:
    """A venv that has transformers 4.57 before this one's packages; torch and the rest are shared."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = str(home / "bin" / "python")
    packages = ["transformers==4.57.6", "huggingface_hub<1", "tokenizers>=0.22,<0.23"]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", *packages]
    subprocess.run(pip, check=True)
    site = next(home.glob("lib/python*/site-packages"))
    shared = [path for path in sys.path if path.endswith("-packages")]
    (site / "shared.pth").write_text("\n".join(shared) + "\n")
    for architecture in ("llama", "gpt2", "mixtral"):
        request = exported(tmp_path / architecture, architecture)
        document = run(python, request, tmp_path / "home")
        assert document["versions"]["transformers"] == "4.57.6"
        right(request, document)
