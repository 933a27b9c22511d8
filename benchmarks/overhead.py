"""What a correction costs while text is generated: tokens per second of an export over those of the merged checkpoint.

    python benchmarks/overhead.py MERGED EXPORT [EXPORT ...] --batch 1 8 --json

Both models are in one process and take turns, so that what else the machine does falls on both; the figure is the
median of the ratios of neighbouring runs. For exports with code a domain acts that is not the router's choice.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def seconds(model: Any, ids: torch.Tensor, tokens: int) -> float:
    """Of one call of `generate`."""
    settings = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    began = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return time.perf_counter() - began


def load(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()
    if hasattr(model, "set_domain"):
        model.set_domain(model.domains[0])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("merged", type=Path)
    parser.add_argument("exports", type=Path, nargs="+")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    merged = load(given.merged)
    rows = []
    for folder in given.exports:
        model = load(folder)
        for batch in given.batch:
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(100, merged.config.vocab_size - 1, (batch, given.prompt), generator=generator)
            ratios, rate = [], []
            for turn in range(given.rounds + 1):
                pair = [seconds(each, ids, given.tokens) for each in ((merged, model), (model, merged))[turn % 2]]
                one, two = pair if turn % 2 == 0 else reversed(pair)
                if turn:  # the first pair warms up
                    ratios.append(two / one)
                    rate.append(batch * given.tokens / one)
            rows.append(
                {
                    "export": folder.name,
                    "batch": batch,
                    "merged_tokens_per_second": round(statistics.median(rate), 1),
                    "overhead_percent": round(100 * (statistics.median(ratios) - 1), 2),
                    "lowest": round(100 * (min(ratios) - 1), 2),
                    "highest": round(100 * (max(ratios) - 1), 2),
                }
            )
        del model
    if given.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
