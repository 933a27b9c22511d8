"""What `deep` costs beside reading the calibration text: seconds of both, in one process, in turn.

    python benchmarks/repair.py examples/smollm2/recipe.yaml --domain code --json

`deep` counts whole: the target's pass that keeps residual streams, and the fit on the merged model. `forward` is one
plain pass of both models over the same text, without logits. Loading is in neither.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from suture.capture import capture
from suture.corrections import Surgery
from suture.layers import Layers
from suture.models import load_model
from suture.pipeline import Run, read_recipe
from suture.repair.fit import Lesson, repair
from suture.repair.residuals import Residuals, write_residuals
from suture.weights import Weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--domain")
    parser.add_argument("--budget", type=float, default=0.0075)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    recipe = read_recipe(given.recipe)
    recipe.surgery = [Surgery(module="affine", gate=False)]  # whose text is captured; nothing is kept for a repair
    job = Run(recipe)
    job.capture()
    (member,) = job.chosen([given.domain or next(iter(job.members))])
    tokens = job.tokens(member, "responses")
    target = Layers(load_model(member.checkpoint, job.dtype, job.device))
    merged = job.layers
    rank = max(1, int(given.budget * job.donor.count) // job._cost())
    rows: dict[str, list[float]] = {"forward": [], "residuals": [], "fit": []}
    for _ in range(given.rounds):
        began = time.perf_counter()
        for layers in (target, merged):
            capture(layers.model, tokens)
        rows["forward"].append(time.perf_counter() - began)
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            write_residuals(target, tokens, Path(folder))
            rows["residuals"].append(time.perf_counter() - began)
            lesson = Lesson(
                member.name, tokens, Residuals(Path(folder)), held=len(tokens) // 5, weights=Weights(member.checkpoint)
            )
            began = time.perf_counter()
            repair(merged, [lesson], rank=rank)
            rows["fit"].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in rows.items()}
    ratio = (medians["residuals"] + medians["fit"]) / medians["forward"]
    found = {"tokens": len(tokens.ids), "rank": rank, "threads": torch.get_num_threads(), **medians, "ratio": ratio}
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        print(", ".join(f"{name} {value:.4g}" for name, value in found.items()))


if __name__ == "__main__":
    main()
