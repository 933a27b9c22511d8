"""vLLM's answer to a check request: log-probabilities and greedy tokens, compared with the reference's.

Run by the interpreter of vLLM's environment, which need not have suture: `PYTHON vllm.py REQUEST.json`. vLLM gives the
log-probabilities of tokens that were read or chosen: those are compared, in nats, where other engines compare logits.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

TOP = 20  # the most log-probabilities that vLLM gives for a token

# a script's own folder comes first on the path, and this one has files named as the engines are
sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]
# before vLLM is imported; what the caller's environment says wins
for name, value in {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: quicker to start, and an error is told here
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)


def engine(request: dict[str, Any], folder: Path, length: int, **more: Any) -> Any:
    """The export in vLLM; compiled only if the request says so, since that takes a minute."""
    from vllm import LLM

    return LLM(
        model=str(folder),
        dtype=request["dtype"],
        trust_remote_code=request["trust_remote_code"],
        enforce_eager=not request.get("compiled", False),
        max_model_len=length,
        max_num_seqs=max(2, int(request["batch"])),
        gpu_memory_utilization=float(request.get("gpu_memory_utilization", 0.9)),
        disable_log_stats=True,
        seed=0,
        **more,
    )


def answers(
    llm: Any, request: dict[str, Any], asked: list[tuple[dict[str, Any], int]], tensors: dict[str, Any], **how: Any
) -> Any:
    """vLLM's outputs for some (case, number of tokens of it), all in its queue at once.

    Args:
        how: `extra`: case → what goes into `extra_args`; `lora`: case → a LoRA request.
    """
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=request["new_tokens"],
            ignore_eos=True,
            logprobs=TOP,
            prompt_logprobs=None if "lora" in how else 0,
            extra_args=how["extra"](case) if "extra" in how else None,
        )
        for case, _ in asked
    ]
    prompts = [{"prompt_token_ids": tensors[f"ids.{case['index']}"][:count].tolist()} for case, count in asked]
    loras = [how["lora"](case) for case, _ in asked] if "lora" in how else None
    return llm.generate(prompts, params, lora_request=loras, use_tqdm=False)


def judged(
    results: dict[int, dict[str, Any]], asked: list[tuple[dict[str, Any], int]], outputs: Any, tensors: dict[str, Any]
) -> None:
    """Note each case's largest difference of log-probabilities, in nats, and vLLM's greedy tokens."""
    import torch

    for (case, count), output in zip(asked, outputs, strict=True):
        index = case["index"]
        ids = tensors[f"ids.{index}"].tolist()
        known = torch.log_softmax(tensors[f"logits.{index}"].double(), -1)  # [T, V]
        result = results.setdefault(index, {"index": index, "logprobs": 0.0, "greedy": []})
        steps = [(count - 1, output.outputs[0].logprobs[0])]  # (place, token → its log-probability as the next one)
        steps += enumerate((output.prompt_logprobs or [])[1:])
        for place, found in steps:
            for token, each in found.items():
                result["logprobs"] = max(result["logprobs"], abs(each.logprob - float(known[place, token])))
        if count == len(ids):
            result["greedy"] = list(output.outputs[0].token_ids)


def lengths(total: int) -> list[int]:
    """At most eight lengths up to a case's own, evenly spaced."""
    return sorted({total - total * part // 8 for part in range(8)} - {0})


def main() -> None:
    """Answer the request that the command line names."""
    import torch
    import transformers
    import vllm
    from safetensors.torch import load_file

    path = Path(sys.argv[1])
    request = json.loads(path.read_text())
    folder, kind, cases = Path(request["folder"]), request["to"], request["cases"]
    tensors = load_file(path.parent / request["tensors"])
    length = max(len(tensors[f"ids.{case['index']}"]) for case in cases) + request["new_tokens"] + 1
    results: dict[int, dict[str, Any]] = {}
    whole = [(case, len(tensors[f"ids.{case['index']}"])) for case in cases]

    if kind == "vllm":
        llm = engine(request, folder, length)
        found = answers(llm, request, whole, tensors, extra=lambda case: {"suture_domain": case["domain"]})
        judged(results, whole, found, tensors)
    elif kind == "hf":
        # the Transformers backend knows no domain of a request: one start for each, by the config's default
        for domain in dict.fromkeys(case["domain"] for case in cases):
            chosen = {"hf_overrides": {"suture_domain": domain}, "model_impl": "transformers"}
            some = [(case, count) for case, count in whole if case["domain"] == domain]
            llm = engine(request, folder, length, **chosen)
            judged(results, some, answers(llm, request, some, tensors), tensors)
            del llm
    elif kind == "adapter":
        from vllm.lora.request import LoRARequest

        adapters = sorted(each for each in (folder / "adapters").iterdir() if each.is_dir())
        ranks = [json.loads((each / "adapter_config.json").read_text()) for each in adapters]
        most = max(max([each["r"], *each.get("rank_pattern", {}).values()]) for each in ranks)
        loras = {each.name: LoRARequest(each.name, place, str(each)) for place, each in enumerate(adapters, 1)}
        # one slot more than adapters: without, requests for none of them got the last one's
        lora = {"enable_lora": True, "max_loras": len(loras) + 1, "max_lora_rank": lora_rank(most)}
        llm = engine(request, folder, length, **lora)
        # an adapter on the head ends vLLM where it is asked about a prompt: beginnings of it are asked for instead
        asked = [(case, part) for case, count in whole for part in lengths(count)]
        found = answers(llm, request, asked, tensors, lora=lambda case: loras.get(case["domain"]))
        judged(results, asked, found, tensors)
    else:
        llm = engine(request, folder, length)
        judged(results, whole, answers(llm, request, whole, tensors), tensors)

    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    document = {"engine": "vllm", "versions": versions, "cases": [results[index] for index in sorted(results)]}
    print("\n" + json.dumps(document), flush=True)


def lora_rank(rank: int) -> int:
    """The least rank that vLLM has kernels for and that is not below an adapter's.

    Raises:
        ValueError: above the largest.
    """
    for allowed in (1, 8, 16, 32, 64, 128, 256, 320, 512):
        if rank <= allowed:
            return allowed
    raise ValueError(f"an adapter has rank {rank}, above vLLM's largest, 512: export it with a smaller one")


if __name__ == "__main__":
    main()
