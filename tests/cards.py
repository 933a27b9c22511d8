"""Export folders and manifests by hand, for tests of the model card and of `push`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from suture.evaluate.heldout import Score
from suture.export.card import write_card
from suture.store import write_json

BASE = "org/base-0.1B"
LICENCES = {BASE: "apache-2.0", "code": "apache-2.0", "math": "apache-2.0"}
KL = {"merged": 0.06, "target": 0.0, "code": 0.03, "math": 0.09}  # math is made worse


def scores(*others: str) -> list[dict[str, Any]]:
    """Rows of two domains: the correction halves the gap of code and widens that of math by half."""
    found = []
    for domain in ("code", "math"):
        for model in ("target", "merged", "darts", *others):
            kl = KL[domain] if model not in KL else KL[model]
            values = {"kl": kl, "agreement": 0.9, "perplexity": 1.5, "rho_l1": 0.1}
            found += [Score(domain, model, name, "heldout", value, 1890) for name, value in values.items()]
            found.append(Score(domain, model, "rho_l1", "calibration", 0.2, 3000))
    return [score.row() for score in found]


def manifest(to: str = "hf", **changes: Any) -> dict[str, Any]:
    models = [{"model": f"{BASE}+{name}", "parameters": {"weight": 0.5}} for name in ("code", "math")]
    domains = {
        "code": {"target": "code", "prompts": "prompts/code.jsonl"},
        "math": {
            "target": "math",
            "prompts": {"path": "math.jsonl", "template": "Question: {question}\nAnswer:"},
            "chat_template": True,
        },
    }
    one = {"surgery": "darts", "module": "darts", "rank": 16, "strength": 0.9, "parameters": 313344}
    return {
        "format": 1,
        "to": to,
        "name": "tiny-merge",
        "domains": ["code", "math"],
        "default": None,
        "corrections": {"code": one, "math": {**one, "strength": None}},
        "router": None,
        "dtype": "torch.float32",
        "merged": "0123456789abcdef",
        "base": BASE,
        "targets": {"code": f"{BASE}+code", "math": f"{BASE}+math"},
        "recipe": {
            "name": "tiny-merge",
            "merge": {"merge_method": "task_arithmetic", "base_model": BASE, "models": models, "dtype": "float32"},
            "domains": domains,
            "heldout": {"samples": 30, "tokens": 64},
        },
        "scores": scores(),
        "notes": ["the tokenizer is that of the base"],
        "verified": [
            {
                "engine": "transformers",
                "versions": {"transformers": "5.24.0"},
                "cases": 3,
                "logits": 1e-6,
                "greedy": "9/9",
            }
        ],
        "versions": {"python": "3.11.9", "suture": "0.1.0"},
        **changes,
    }


def write_export(folder: Path, to: str = "hf", **changes: Any) -> Path:
    """An export folder with a small checkpoint, tokenizer files, a figure and a model card."""
    from handmade import write_checkpoint

    write_checkpoint(folder, architectures=["SutureLlamaForCausalLM"])
    document = manifest(to, **changes)
    write_json(folder / "suture.json", document)
    write_json(folder / "tokenizer.json", {"vocab": ["/home/user/word"]})
    figure = folder.parent / "scores.png"
    figure.write_bytes(b"\x89PNG\r\n\x1a\n")
    write_card(folder, document, licences=LICENCES, figure=figure)
    return folder
