"""A tiny family on disk: a base, two fine-tunes, prompts of two domains, and a recipe that merges them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from tiny import nearby, tiny_model, tiny_tokenizer

from suture.pipeline import Run
from suture.recipe import load_recipe
from suture.store import Store

WORDS = ["ash", "bay", "cob", "dew", "elm", "fog", "gum", "hay", "ivy", "jay", "kit", "log", "map", "nut", "oak", "pea"]


def make_family(folder: Path, full: float = 0.3, lora: float = 0.3) -> Path:
    """A base, a full fine-tune, a LoRA fine-tune, prompts of two domains, and a recipe."""
    base = tiny_model(initializer_range=0.4)
    base.config.architectures = ["LlamaForCausalLM"]
    for name, model in (("base", base), ("full", nearby(base, 1, full))):
        model.save_pretrained(folder / name)
        tiny_tokenizer(chat=True).save_pretrained(folder / name)
    adapted = get_peft_model(tiny_model(initializer_range=0.4), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    generator = torch.Generator().manual_seed(2)
    for name, tensor in adapted.named_parameters():
        if "lora_" in name:
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * lora)
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    adapted.save_pretrained(folder / "lora")
    write_prompts(folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(), sort_keys=False))
    return folder


def write_prompts(folder: Path) -> None:
    lines = [{"q": f"{a} {b} {a}"} for a in WORDS for b in WORDS[:2]]
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "lines.txt").write_text("\n".join(f"{a}-{b}" for a in WORDS[:4] for b in WORDS))


def recipe(**changes: Any) -> dict[str, Any]:
    """The paper's protocol: both corrections are trained on all prompts, without responses, and act as they are."""
    models = [{"model": name, "parameters": {"weight": 0.5}} for name in ("full", "base+lora")]
    surgery = {"rank": 4, "T_max": 32, "steps": 30, "samples": 12, "batch": 4}
    paper = {"calibrate_on": "prompts", "gate": False, **surgery}
    return {
        "merge": {"merge_method": "task_arithmetic", "base_model": "base", "models": models, "dtype": "float32"},
        "domains": {
            "math": {"target": "full", "prompts": {"path": "words.jsonl", "template": "Q {q} A"}},
            "chat": {"target": "lora", "prompts": "lines.txt", "chat_template": True},
        },
        "surgery": [
            {"module": "standard", "loss": "l1", "name": "standard-l1", **paper},
            {"module": "darts", "loss": "ewl1", "name": "darts", **paper},
        ],
        "heldout": {"samples": 6, "tokens": 10},
        "device": "cpu",
        **changes,
    }


def write(family: Path, name: str, **changes: Any) -> Path:
    """A recipe file in the family's folder."""
    path = family / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe(**changes), sort_keys=False))
    return path


def open_run(path: Path, store: Path) -> Run:
    """A recipe that is ready to run, its store in a folder."""
    return Run(load_recipe(path), store=Store(store / "store"))
