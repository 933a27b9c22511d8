"""Run in vLLM's environment: `PYTHON vllm_deep.py REQUEST.json SETTINGS`, the settings vLLM's, as JSON. No tests.

Unlike the check script it asks for no log-probabilities of prompts, since vLLM then reads nothing from its prefix
cache. All cases are asked for twice; the second time their prompts are in the cache.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

for name, value in {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)


def main() -> None:
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError

    path = Path(sys.argv[1])
    request = json.loads(path.read_text())
    tensors = load_file(path.parent / request["tensors"])
    llm = LLM(model=request["folder"], dtype="float32", disable_log_stats=False, **json.loads(sys.argv[2]))
    answers: list[dict[str, Any]] = []
    for _ in range(2):
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=request["new_tokens"],
                ignore_eos=True,
                logprobs=0,
                extra_args={"suture_domain": case["domain"]},
            )
            for case in request["cases"]
        ]
        prompts = [{"prompt_token_ids": tensors[f"ids.{case['index']}"].tolist()} for case in request["cases"]]
        for case, output in zip(request["cases"], llm.generate(prompts, params, use_tqdm=False), strict=True):
            written = output.outputs[0]
            chosen = [step[token].logprob for step, token in zip(written.logprobs, written.token_ids, strict=True)]
            answers.append({"index": case["index"], "greedy": list(written.token_ids), "logprobs": chosen})
    refused = ""
    try:
        llm.generate([{"prompt_token_ids": [5]}], SamplingParams(extra_args={"suture_domain": "cook"}), use_tqdm=False)
    except VLLMValidationError as error:
        refused = str(error)
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    wanted = {
        name.removeprefix("vllm:"): value for name, value in counts.items() if "preempt" in name or "prefix" in name
    }
    print("\n" + json.dumps({"cases": answers, "refused": refused, "counts": wanted}), flush=True)


if __name__ == "__main__":
    main()
