"""An export is loaded in a process of its own, by the engine's own classes, and compared with the attached model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from suture.errors import SutureError

NEW_TOKENS = 16
BATCH = 4
MOST = 256  # tokens of a prompt
# what may differ, of the largest logit (vLLM: of log-probabilities, in nats), where all is float32
LIMITS = {"transformers": 1e-5, "vllm": 1e-4, "llama_cpp": 2e-3}
# where weights or states are stored in half precision, and so is what is folded into them
ROUNDED = {"transformers": 5e-2, "vllm": 0.5, "llama_cpp": 5e-2}
GGUF_LIMITS = {"f32": 2e-3, "f16": 5e-3, "bf16": 3e-2, "q8_0": 0.2}  # llama.cpp's own kernels round activations
LAST_LINES = 12


# a domain, a context in which the model is corrected for it, and prompts, [T] each
Group = tuple[str | None, AbstractContextManager[Any], Sequence[Tensor]]


@dataclass(frozen=True)
class Case:
    """A prompt [T] under a domain, its logits [T, V], and what is written greedily after it, with each step's lead."""

    domain: str | None
    ids: Tensor
    logits: Tensor
    greedy: Tensor
    leads: Tensor  # [m] of the best logit over the second


class VerificationError(SutureError):
    """An export that does not do what was scored; `report` says how far it is from that."""

    def __init__(self, message: str, report: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.report = dict(report)


@torch.inference_mode()
def reference(model: Any, groups: Iterable[Group]) -> list[Case]:
    """What the corrected model in memory does with each prompt, alone, without padding.

    Args:
        groups: domains, as they will be asked of the export, and what should act there.
    """
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    before, model.generation_config = model.generation_config, GenerationConfig()
    device = next(model.parameters()).device
    cases = []
    try:
        for domain, acting, texts in groups:
            with acting:
                for text in texts:
                    ids = text[:MOST].to(device)[None]  # [1, T]
                    logits = model(input_ids=ids, use_cache=False).logits[0].float().cpu()  # [T, V]
                    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
                    best = torch.stack([step[0].float() for step in out.logits]).topk(2).values.cpu()  # [m, 2]
                    written = out.sequences[0, ids.shape[1] :].cpu()
                    cases.append(Case(domain, ids[0].cpu().clone(), logits, written, best[:, 0] - best[:, 1]))
    finally:
        model.generation_config = before
    return cases


def verify(
    folder: Path,
    kind: str,
    engine: str,
    cases: Sequence[Case],
    *,
    dtype: torch.dtype,
    limit: float,
    python: Path | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Load an export with an engine in a fresh process and compare it.

    Args:
        folder: the export.
        kind: hf, plain, adapter, vllm or gguf.
        engine: transformers, vllm or llama_cpp.
        limit: of the largest difference: see `LIMITS`.
        python: the interpreter of the engine's environment; this one by default.
        trust_remote_code: whether a checkpoint may bring code of its own.

    Returns:
        For the manifest: engine, versions, cases, the largest difference, and how many greedy tokens agree.

    Raises:
        VerificationError: when it cannot be loaded, or differs.
    """
    name = str(dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory(prefix="suture-") as place:
        request = Path(place) / "request.json"
        tensors: dict[str, Tensor] = {}
        for index, case in enumerate(cases):
            tensors |= {f"ids.{index}": case.ids, f"logits.{index}": case.logits, f"greedy.{index}": case.greedy}
        save_file(tensors, request.with_suffix(".safetensors"))
        asked = {
            "folder": str(folder),
            "to": kind,
            "dtype": name,
            "trust_remote_code": trust_remote_code or kind == "hf",
            "new_tokens": NEW_TOKENS,
            "batch": BATCH,
            "tensors": "request.safetensors",
            "cases": [{"index": index, "domain": case.domain} for index, case in enumerate(cases)],
        }
        request.write_text(json.dumps(asked))
        script = resources.files("suture.export.engines") / f"{engine}.py"
        with resources.as_file(script) as file:
            command = [str(python or sys.executable), str(file), str(request)]
            done = subprocess.run(
                command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=_environment(python)
            )
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip()
        lines = "\n".join(said.splitlines()[-LAST_LINES:]) or f"it ended with status {done.returncode} and said nothing"
        raise VerificationError(f"{engine} cannot load the export:\n{lines}", {"engine": engine, "error": lines})
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        said = done.stdout[-400:]
        raise VerificationError(f"{engine} gave no answer: {said!r}", {"engine": engine, "error": said}) from error
    return judge(answer, cases, limit)


def need_engine(engine: str, python: Path | None, *more: str) -> None:
    """Refuse before any work when an interpreter's environment lacks an engine.

    Args:
        engine: the name of its package, too.
        python: the interpreter; this one by default.
        more: further packages that are needed.

    Raises:
        SutureError: with how to install it, or name another interpreter.
    """
    names = (engine, *more)
    code = (
        f"import importlib.util as u, sys; sys.exit(' '.join(n for n in {names!r} if u.find_spec(n) is None) or None)"
    )
    command = [str(python or sys.executable), "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env=_environment(python))
    except OSError as error:
        raise SutureError(f"--python: {python} cannot be run ({error.strerror}): name an interpreter") from error
    if done.returncode != 0:
        lacks = done.stderr.decode(errors="replace").strip().replace("llama_cpp", "llama-cpp-python")
        raise SutureError(
            f"the export is checked in {engine}, and {python or 'this environment'} has no {lacks}: pip install "
            f"{lacks}, or name the interpreter of an environment that has it with --python"
        )


def judge(answer: Mapping[str, Any], cases: Sequence[Case], limit: float) -> dict[str, Any]:
    """Compare an engine's answer with the reference. Greedy tokens part only where the reference is all but tied.

    Raises:
        VerificationError: with all cases in its report.
    """
    measure = "logprobs" if "logprobs" in answer["cases"][0] else "logits"
    rows, agree, total = [], 0, 0
    for found in answer["cases"]:
        case = cases[found["index"]]
        known, written = case.greedy.tolist(), list(found["greedy"])
        same = next(
            (step for step, pair in enumerate(zip(known, written, strict=True)) if len(set(pair)) > 1), len(known)
        )
        close = 2 * limit * (float(case.logits.abs().max()) if measure == "logits" else 1)
        tied = same < len(known) and float(case.leads[same]) <= close
        agree, total = agree + same, total + (same if tied else len(known))
        rows.append({"domain": case.domain, measure: found[measure], "greedy": same, "of": len(known), "tied": tied})
    worst = max(row[measure] for row in rows)
    report = {"engine": answer["engine"], "versions": answer["versions"], "limit": limit, "rows": rows}
    if not all(row[measure] <= limit for row in rows) or agree < total:  # nan is no number that is small
        raise VerificationError(
            f"the export differs from the model that was scored: {measure} by {worst:.2g} (allowed {limit:g}), "
            f"{agree} of {total} greedy tokens agree",
            report,
        )
    return {
        "engine": answer["engine"],
        "versions": answer["versions"],
        "cases": len(rows),
        measure: worst,
        "greedy": f"{agree}/{total}",
    }


def _environment(python: Path | None) -> dict[str, str]:
    """This process's, less what would lead another interpreter to this one's packages."""
    own = ("PYTHONPATH", "PYTHONHOME") if python is not None else ()
    kept = {key: value for key, value in os.environ.items() if key not in own}
    return {**kept, "TOKENIZERS_PARALLELISM": "false"}
