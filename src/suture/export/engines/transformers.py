"""A fresh-process check of an export by transformers: `python transformers.py REQUEST.json`. It needs no suture.

One JSON document is the last line of stdout. Weights that are missing, left over or misshapen end it with status 1.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # in this file's folder its own name would hide the library's
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]

import torch
import transformers
from safetensors.torch import load_file

HF, ADAPTER = "hf", "adapter"


class Export:
    """A loaded export, and how it comes to answer for a domain."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.kind = request["to"]
        self.folder = Path(request["folder"])
        remote = bool(request.get("trust_remote_code")) or self.kind == HF
        named = {"dtype" if int(transformers.__version__.split(".")[0]) > 4 else "torch_dtype": request["dtype"]}
        self.model, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(self.folder), trust_remote_code=remote, output_loading_info=True, **named
        )
        faults = {key: sorted(map(str, info[key])) for key in info if key.endswith("_keys") and info[key]}
        if faults:
            sys.exit(f"weights do not fit the config: {faults}")
        self.model.eval()
        self.model.generation_config = transformers.GenerationConfig()  # greedy means greedy, whatever the folder says
        if self.kind == ADAPTER:
            self._adapters(sorted({case["domain"] for case in request["cases"] if case["domain"] is not None}))

    def _adapters(self, domains: list[str]) -> None:
        """Load adapters; every tensor of each must have found its place."""
        import peft
        from safetensors import safe_open

        plain = self.model
        # PEFT makes modules of these names, which may hold no dot; a domain's may
        self.slots = {domain: f"domain{place}" for place, domain in enumerate(domains)}
        for domain, slot in self.slots.items():
            folder = self.folder / "adapters" / domain
            if self.model is plain:
                self.model = peft.PeftModel.from_pretrained(plain, str(folder), adapter_name=slot)
            else:
                self.model.load_adapter(str(folder), adapter_name=slot)
            found = peft.get_peft_model_state_dict(self.model, adapter_name=slot, save_embedding_layers=False)
            with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            wrong = set(found) ^ set(stored)
            wrong |= {name for name in set(found) & set(stored) if not same(found[name], stored[name])}
            if wrong:
                sys.exit(f"adapter {domain}: tensors that did not load: {sorted(wrong)}")
        self.model.eval()

    def answer(self, domain: str | None, call: Any) -> Any:
        """Run a call of the model under a domain."""
        if self.kind == HF:
            self.model.set_domain(domain)
        elif self.kind == ADAPTER and domain is None and hasattr(self.model, "disable_adapter"):
            with self.model.disable_adapter():
                return call()
        elif self.kind == ADAPTER and domain is not None:
            self.model.set_adapter(self.slots[domain])
        return call()


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether one is the other but for the dtype that it was read in."""
    return one.shape == two.shape and torch.equal(one.float(), two.to(one.dtype).float())


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sequences of any length as one left-padded batch [B, T]."""
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@torch.inference_mode()
def check(request: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Each case's largest difference of logits, over the largest logit, and the tokens that it writes."""
    export = Export(request)
    by_domain: dict[str | None, list[int]] = {}
    for case in request["cases"]:
        by_domain.setdefault(case["domain"], []).append(case["index"])
    done: list[dict[str, Any]] = []
    for domain, cases in by_domain.items():
        for start in range(0, len(cases), request["batch"]):
            done += together(export, domain, cases[start : start + request["batch"]], tensors, request["new_tokens"])
    return sorted(done, key=lambda case: int(case["index"]))


def together(
    export: Export, domain: str | None, cases: list[int], tensors: dict[str, torch.Tensor], new_tokens: int
) -> list[dict[str, Any]]:
    """Cases of one domain in one batch."""
    rows = [tensors[f"ids.{index}"] for index in cases]
    inputs = padded(rows)
    mask = inputs["attention_mask"]
    positions = {}
    stock = export.model.get_base_model() if hasattr(export.model, "get_base_model") else export.model
    if "position_ids" in inspect.signature(stock.forward).parameters:  # else models count the padding
        positions = {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
    logits = export.answer(domain, lambda: export.model(**inputs, **positions, use_cache=False).logits).float()
    settings = transformers.GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, num_beams=1, eos_token_id=None, pad_token_id=0, use_cache=True
    )
    written = export.answer(domain, lambda: export.model.generate(**inputs, generation_config=settings))
    found = []
    for row, index in enumerate(cases):
        reference = tensors[f"logits.{index}"]  # [T, V]
        gap = logits[row, mask[row].bool()] - reference  # [T, V]
        difference = float(gap.abs().max() / reference.abs().max())
        greedy = written[row, mask.shape[1] :].tolist()
        found.append({"index": index, "logits": difference, "greedy": greedy})
    return found


def main() -> None:
    """Read the request, check, and print what was found."""
    file = Path(sys.argv[1])
    request = json.loads(file.read_text())
    tensors = load_file(file.parent / request["tensors"])
    cases = check(request, tensors)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    if request["to"] == ADAPTER:
        import peft

        versions["peft"] = peft.__version__
    print(json.dumps({"engine": "transformers", "versions": versions, "cases": cases}))


if __name__ == "__main__":
    main()
