"""One model behind the OpenAI protocol under a name for each domain, asked by the `openai` client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade_exports import DOMAINS, adapter_export, attached, hf_export, manifest, plain_export, reference
from typer.testing import CliRunner

from suture.cli import app
from suture.errors import ModelError, ResourceError, SutureError
from suture.exported import open_export, open_model
from suture.serve import Named, bind, choose_engine, names, vllm_command

BY_NAME = {"tiny": None, "tiny:code": "code", "tiny:math": "math"}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter_export(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def address(adapters: Path) -> Iterator[str]:
    """A server in a process of its own."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    command = [sys.executable, "-m", "suture.cli", "serve", str(adapters), "--port", "0", "--json", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--engine", "transformers"], stdout=subprocess.PIPE, env=environment, text=True
    ) as server:
        try:
            assert server.stdout is not None
            told = json.loads(server.stdout.readline())
            assert told["models"] == list(BY_NAME)
            yield told["address"]
        finally:
            server.terminate()
            server.wait(timeout=20)


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Any]:
    from openai import OpenAI

    with OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60) as found:
        yield found


def ask(client: Any, model: str, text: str = "why?", **more: Any) -> Any:
    settings = {"temperature": 0, "max_tokens": 10, **more}
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **settings)


# Requests


def test_the_model_is_listed_once_for_each_domain(client):
    assert [model.id for model in client.models.list()] == list(BY_NAME)


@pytest.mark.parametrize("model", BY_NAME)
def test_a_name_gives_its_domain(client, model):
    answer = ask(client, model)
    assert answer.choices[0].message.content == reference("why?", BY_NAME[model], 10)
    assert (answer.model, answer.choices[0].finish_reason, answer.usage.completion_tokens) == (model, "length", 10)


@pytest.mark.parametrize("model", ["tiny:code", "tiny:math"])
def test_streamed_answers_are_the_same(client, model):
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, model, stream=True)]
    assert "".join(pieces) == reference("why?", BY_NAME[model], 10)
    assert sum(map(bool, pieces)) == 10  # a token a letter here


def test_text_without_a_template(client):
    answer = client.completions.create(model="tiny:math", prompt="12", temperature=0, max_tokens=8)
    assert answer.choices[0].text == reference("12", "math", 8, chat=False)


def test_the_responses_protocol(client):
    answer = client.responses.create(model="tiny:code", input="why?", temperature=0, max_output_tokens=10)
    assert answer.output_text == reference("why?", "code", 10)


def test_requests_for_different_domains_do_not_mix(client):
    asked = [(model, text) for text in ("why?", "hello", "12") for model in BY_NAME] * 2
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda pair: ask(client, *pair).choices[0].message.content, asked))
    assert answers == [reference(text, BY_NAME[model], 10) for model, text in asked]


def test_a_temperature_samples(client):
    answers = [ask(client, "tiny", temperature=2, seed=seed).choices[0].message.content for seed in (1, 2, 1)]
    assert answers[0] == answers[2] != answers[1]


def test_errors_look_as_the_protocol_says(client):
    from openai import APIStatusError, NotFoundError

    with pytest.raises(NotFoundError) as unknown:
        ask(client, "tiny:maths")
    assert unknown.value.body == {
        "message": "unknown model 'tiny:maths'; did you mean 'tiny:math'?",
        "type": "invalid_request_error",
        "param": None,
        "code": "model_not_found",
    }
    with pytest.raises(APIStatusError) as unexpected:
        ask(client, "tiny", extra_body={"no_such_field": 1})
    assert "no_such_field" in unexpected.value.body["message"]
    with pytest.raises(NotFoundError, match="not served for this model"):
        client.post("/systemone", body={"model": "tiny"}, cast_to=object)


# What is served


def test_a_name_of_an_export_with_code_is_its_base_with_a_domain(tmp_path):
    opened = open_model(open_export(hf_export(tmp_path)), torch.float32, torch.device("cpu"))
    ids = torch.tensor([opened.tokenizer("<s>user: why? A:", add_special_tokens=False).input_ids])
    for domain in (None, *DOMAINS):
        named = Named(opened, domain)
        assert named.config.model_type == "llama"  # as the server looks for thinking and tool calls
        out = named.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, pad_token_id=0)
        text = opened.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert text == attached("why?", domain, 10)


def test_names_of_an_export(tmp_path, adapters):
    export = open_export(adapters)
    assert names(export) == BY_NAME
    assert list(names(export, "org/m")) == ["org/m", "org/m:code", "org/m:math"]
    manifest(tmp_path, "hf", router={}, default="auto")
    assert names(open_export(tmp_path)) == {
        "tiny": "auto",
        "tiny:code": "code",
        "tiny:math": "math",
        "tiny:auto": "auto",
    }
    manifest(tmp_path, "plain", domains=["math"])
    assert names(open_export(tmp_path)) == {"tiny": "math", "tiny:math": "math"}


def test_the_command_line_of_vllm_for_adapters(adapters):
    base = ["vllm", "serve", str(adapters), "--host", "0.0.0.0", "--port", "9", "--served-model-name", "tiny"]
    loras = ["--enable-lora", "--max-loras", "3", "--max-lora-rank", "8", "--lora-modules"]
    paths = [f"tiny:{domain}={adapters}/adapters/{domain}" for domain in DOMAINS]
    assert vllm_command(open_export(adapters), None, "0.0.0.0", 9) == base + loras + paths


def test_the_rank_is_one_that_vllm_makes_room_for(tmp_path):
    folder = adapter_export(tmp_path / "a,b")
    file = folder / "adapters" / "math" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rank_pattern": {"x": 33}}))
    command = vllm_command(open_export(folder), None, "h", 1)
    assert command[command.index("--max-lora-rank") + 1] == "64"
    assert json.loads(command[-1]) == {"name": "tiny:math", "path": str(folder / "adapters" / "math")}
    file.write_text(json.dumps({"r": 513}))
    with pytest.raises(ModelError, match="rank above 512, vLLM's limit"):
        vllm_command(open_export(folder), None, "h", 1)


def test_the_command_line_of_vllm_for_other_kinds(tmp_path):
    manifest(tmp_path, "hf")
    (tmp_path / "config.json").write_text(json.dumps({"suture": {"base_model_type": "llama"}}))
    export = open_export(tmp_path)
    shared = ["vllm", "serve", str(tmp_path), "--host", "h", "--port", "1", "--served-model-name"]
    plugin = ["--middleware", "suture.vllm_plugin.DomainNames"]
    more = ["--dtype", "float32", "--seed", "1"]
    found = vllm_command(export, "m", "h", 1, "float32", ["--seed", "1"])
    assert found == [*shared, "m", "m:code", "m:math", *plugin, *more]
    (tmp_path / "config.json").write_text(json.dumps({"suture": {"base_model_type": "opt"}}))
    with pytest.raises(ModelError, match=r"plugin for vLLM has no model of type 'opt' \(it has gemma2, llama"):
        vllm_command(export, None, "h", 1)
    manifest(tmp_path, "plain", domains=["math"])
    assert vllm_command(open_export(tmp_path), None, "h", 1) == [*shared, "tiny", "tiny:math"]
    manifest(tmp_path, "gguf")
    with pytest.raises(ModelError, match="llama-server"):
        vllm_command(open_export(tmp_path), None, "h", 1)


def test_the_engine_is_what_is_installed(monkeypatch):
    there: set[str] = set()
    monkeypatch.setattr("suture.serve.importlib.util.find_spec", lambda name: name if name in there else None)
    with pytest.raises(SutureError, match=r"needs fastapi, uvicorn, openai: pip install 'suture\[serve\]'"):
        choose_engine("auto")
    with pytest.raises(SutureError, match="vLLM is not installed here"):
        choose_engine("vllm")
    assert choose_engine("vllm", dry_run=True) == "vllm"
    there |= {"fastapi", "uvicorn", "openai"}
    assert choose_engine("auto") == "transformers"
    there.add("vllm")
    assert choose_engine("auto") == "vllm"
    assert choose_engine("transformers") == "transformers"
    monkeypatch.setattr("suture.serve.importlib.metadata.version", lambda _: "5.9.1")
    with pytest.raises(SutureError, match=r"transformers 5\.9\.1 has no server that suture knows: pip install"):
        choose_engine("transformers")
    with pytest.raises(SutureError, match="unknown 'vlm'; did you mean 'vllm'"):
        choose_engine("vlm")


def test_a_port_in_use_is_told():
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ResourceError, match=f"cannot listen at 127.0.0.1:{port}"):
            bind("127.0.0.1", port)


def test_a_dry_run_prints_what_would_run(adapters, tmp_path):
    def call(*arguments: str) -> Any:
        result = CliRunner().invoke(app, ["serve", "--dry-run", *arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    line = call(str(adapters), "--engine", "vllm", "--", "--seed", "1")
    assert line.startswith(f"vllm serve {adapters} --host 127.0.0.1 --port 8000 --served-model-name tiny --enable-lora")
    assert line.endswith(" --seed 1\n")
    told = json.loads(call(str(adapters), "--engine", "vllm", "--json"))
    assert told["command"][:2] == ["vllm", "serve"]
    assert call(str(plain_export(tmp_path)), "--engine", "transformers") == "tiny\ntiny:math\n"
    refused = CliRunner().invoke(app, ["serve", str(adapters), "--engine", "transformers", "--", "--seed", "1"])
    assert refused.exit_code == 1
    assert "transformers' server takes no further options (--seed)" in refused.stderr
