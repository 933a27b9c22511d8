"""Checkpoints and adapters written by hand: only what their readers look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 7,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def tensors(rows: int = 7, layers: int = 2, width: int = 4) -> dict[str, torch.Tensor]:
    """Weights of a llama in which only the query projection is left of a layer."""
    names = {"model.embed_tokens.weight": (rows, width), "lm_head.weight": (rows, width), "model.norm.weight": (width,)}
    names |= {f"model.layers.{layer}.self_attn.q_proj.weight": (width, width) for layer in range(layers)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


def write_checkpoint(
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
    *,
    shards: int = 1,
    tokens: dict[str, int] | None = None,
    **fields: Any,
) -> Path:
    """A checkpoint folder; a config field of None is left out."""
    folder.mkdir(parents=True)
    config = {key: value for key, value in {**CONFIG, **fields}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    weights = tensors() if weights is None else weights
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
    else:
        places = {key: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, key in enumerate(weights)}
        for place in set(places.values()):
            save_file({key: weights[key] for key in places if places[key] == place}, folder / place)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    if tokens is not None:
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": tokens}}))
    return folder


def write_adapter(
    folder: Path,
    base: str | None,
    *,
    layers: tuple[int, ...] = (0,),
    shape: tuple[int, int] = (4, 4),
    factors: dict[str, torch.Tensor] | None = None,
    **fields: Any,
) -> Path:
    """A LoRA folder for query projections of [out, in] = `shape`, or with the given factors."""
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **fields}
    if base is not None:
        settings["base_model_name_or_path"] = base
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    if factors is None:
        factors = {}
        for layer in layers:
            place = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
            factors |= {f"{place}A.weight": torch.ones(2, shape[1]), f"{place}B.weight": torch.ones(shape[0], 2)}
    save_file(factors, folder / "adapter_model.safetensors")
    return folder
