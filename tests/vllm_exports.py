"""Tiny exports for vLLM, with what transformers' models and suture's own arithmetic say about them. No tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import VOCABULARY, tiny_model, tiny_tokenizer
from torch import Tensor, nn

from suture.models import Head, decoder_of
from suture.repair.patch import Change, Patch, patched
from suture.router import Router
from suture.surgery import Affine, Surgery, make_surgery

HIDDEN = 64
# vLLM has no kernel on CPUs for smaller heads
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
OWN: dict[str, dict[str, Any]] = {"gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 8}}


def model_of(architecture: str) -> Any:
    return tiny_model(architecture, **SIZES, **OWN.get(architecture, {}))


def write_merged(folder: Path, model: Any) -> None:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def random_surgery(name: str, seed: int, size: float) -> Surgery:
    """A module whose correction is about as large as the states, which are of the given size."""
    generator = torch.Generator().manual_seed(seed)
    module = make_surgery(name, HIDDEN, rank=4, t_max=16).eval().requires_grad_(False)
    for key, tensor in module.named_parameters():
        scale = size / 2 if key in ("table.rows", "weights", "up.bias") else 0.15
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
    module.strength = 0.75
    return module


@torch.no_grad()
def states_of(model: Any, ids: Tensor) -> Tensor:
    """[T, H] raw."""
    found: Tensor = decoder_of(model)[1](input_ids=ids[None], use_cache=False).last_hidden_state[0]
    return found


@torch.no_grad()
def logits_of(model: Any, ids: Tensor, surgery: nn.Module | None) -> Tensor:
    """[T, V] without padding or cache."""
    states = states_of(model, ids)
    if surgery is not None:
        states = surgery(states, torch.arange(len(ids)))
    return Head(model)(states).float()


def random_patch(model: Any, seed: int, names: list[str]) -> Patch:
    """LoRAs of rank 2 on linears."""
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    for name in names:
        out, width = model.get_submodule(name).weight.shape
        up, down = torch.randn(out, 2, generator=generator), torch.randn(2, width, generator=generator)
        changes[name] = Change(up * 0.2, down * 0.2)
    return Patch(changes)


def head_patch(model: Any, surgery: Affine) -> Patch:
    """W (h - A B h) as a LoRA on the head; the module's offset has to be zero."""
    weight = model.get_output_embeddings().weight
    return Patch({"lm_head": Change(-surgery.strength * weight @ surgery.up.weight, surgery.down.weight)})


def prompts_of(lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def router_of(model: Any, prompts: list[Tensor]) -> Router:
    """A router that knows the prompts' last states, each of a domain of its own, and abstains for all others."""
    centres = torch.stack([states_of(model, ids)[-1] for ids in prompts])  # [K, H]
    router = Router(HIDDEN, len(prompts))
    router.centres.copy_(centres)
    router.limits.fill_(1e-3)
    return router


def write_request(
    place: Path, folder: Path, kind: str, model: Any, domains: Mapping[str | None, Any], lengths: tuple[int, ...]
) -> dict[str, Tensor]:
    """What the check script reads, and `after.<i>`: log-probabilities of the greedy tokens, in nats.

    Args:
        domains: domain → a surgery module, a patch, a function of [T] ids that gives a surgery module, or None.
        lengths: of the prompts; each is asked for in each domain.
    """
    new = 8
    place.mkdir(parents=True)
    cases: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for ids in prompts_of(lengths):
        for domain, how in domains.items():
            index = len(cases)
            cases.append({"index": index, "domain": domain})
            surgery = how if isinstance(how, nn.Module) or how is None else None
            if not (isinstance(how, (nn.Module, Patch)) or how is None):
                surgery = how(ids)
            with patched(model, how if isinstance(how, Patch) else Patch({})):
                row, after = ids, []
                for _ in range(new):
                    last = torch.log_softmax(logits_of(model, row, surgery)[-1], -1)
                    row = torch.cat([row, last.argmax()[None]])
                    after.append(last.max())
                tensors |= {f"ids.{index}": ids.clone(), f"logits.{index}": logits_of(model, ids, surgery)}
                tensors |= {f"greedy.{index}": row[len(ids) :].clone(), f"after.{index}": torch.stack(after)}
    save_file(tensors, place / "request.safetensors")
    request = {"folder": str(folder), "dtype": "float32", "trust_remote_code": kind == "hf", "new_tokens": new}
    request |= {"to": kind, "tensors": "request.safetensors", "batch": 6, "cases": cases}
    (place / "request.json").write_text(json.dumps(request))
    return tensors
