"""Export folders written by hand: the manifest, a tiny checkpoint, and a correction for each of two domains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_model, tiny_tokenizer

from suture.attach import attach
from suture.repair.patch import Change, Patch, patched
from suture.surgery import Darts, Surgery

DOMAINS = ("code", "math")


def manifest(folder: Path, kind: str, **changes: Any) -> None:
    """Write suture.json, as far as it is read when an export is used."""
    known = {"format": 1, "to": kind, "name": "tiny", "domains": list(DOMAINS), "default": None, "router": None}
    (folder / "suture.json").write_text(json.dumps(known | changes))


def patch(seed: int, rank: int = 2, size: float = 0.6) -> Patch:
    """A random change of two linears of the tiny Llama."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.layers.0.mlp.down_proj": (32, 48), "model.layers.1.self_attn.o_proj": (32, 32)}
    made = {
        name: Change(
            torch.randn(out, rank, generator=generator) * size, torch.randn(rank, inner, generator=generator) * size
        )
        for name, (out, inner) in shapes.items()
    }
    return Patch(made)


PATCHES = {name: patch(seed) for seed, name in enumerate(DOMAINS, 1)}


def merged(**settings: Any) -> Any:
    """The merged model of all exports here."""
    return tiny_model("llama", initializer_range=0.4, **settings)


def _write(folder: Path, model: Any, chat: bool) -> None:
    model.save_pretrained(folder)
    tiny_tokenizer(chat=chat).save_pretrained(folder)


def adapter_export(folder: Path, chat: bool = True, **changes: Any) -> Path:
    """`--to adapter`: the merged checkpoint, and a PEFT adapter for each domain."""
    _write(folder, merged(), chat)
    for name, each in PATCHES.items():
        each.save(folder / "adapters" / name, "tiny", torch.float32)
    manifest(folder, "adapter", **changes)
    return folder


def plain_export(folder: Path, **changes: Any) -> Path:
    """`--to plain` for one domain: its patch in the weights."""
    model = merged()
    with patched(model, PATCHES["math"]):
        _write(folder, model, True)
    manifest(folder, "plain", **{"domains": ["math"], **changes})
    return folder


def surgery(seed: int) -> Surgery:
    """A random module on the final states, strong enough to change what is said."""
    generator = torch.Generator().manual_seed(seed)
    made = Darts(32, rank=4, t_max=64)
    for tensor in made.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
    return made.eval().requires_grad_(False)


SURGERIES = {name: surgery(seed) for seed, name in enumerate(DOMAINS, 1)}


def hf_export(folder: Path, router: Any = None, **changes: Any) -> Path:
    """`--to hf`: modelling code, and a module on the final states for each domain."""
    from suture.export.remote import write_remote

    model = merged()
    _write(folder, model, True)
    write_remote(folder, SURGERIES, model, router=router, default=changes.get("default"))
    manifest(folder, "hf", router=None if router is None else {}, **changes)
    return folder


def attached(text: str, domain: str | None, new_tokens: int) -> str:
    """What the merged model with a domain's module attached writes."""
    model = merged()
    with attach(model, SURGERIES, probe=False).domain(domain):
        return _written(model, text, new_tokens, True)


def reference(text: str, domain: str | None, new_tokens: int, chat: bool = True) -> str:
    """What the merged model with a domain's patch in its weights writes, greedily: no export, no adapters."""
    model = merged()
    with patched(model, PATCHES[domain] if domain else Patch({})):
        return _written(model, text, new_tokens, chat)


def _written(model: Any, text: str, new_tokens: int, chat: bool) -> str:
    tokenizer = tiny_tokenizer(chat=chat)
    if chat:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    ids = torch.tensor([tokenizer(text, add_special_tokens=not chat).input_ids])  # [1, T]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
