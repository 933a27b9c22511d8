"""`chat` and `serve`: an export folder in use."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from suture.cli.app import Json, app, console, hush, print_json, told
from suture.errors import SutureError

if TYPE_CHECKING:
    from suture.chat import Conversation, Turn
    from suture.exported import Export

ExportFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder that `suture export` wrote.", show_default=False)
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16; `auto`: float32 on a CPU, else bfloat16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0 or mps.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run the folder's modelling code even if it is not what this suture writes."
    ),
]


@app.command()
def chat(
    folder: ExportFolder,
    domain: Annotated[
        Optional[str],
        typer.Option(
            "--domain",
            "-d",
            help="Whose correction acts: a domain, `auto` (the router) or `none`; the export's default by default.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[Optional[str], typer.Option(help="The system message.", show_default=False)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens an answer has at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus, when sampling.")] = 1.0,
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Talk to an export in the terminal: answers token by token, `/domain` and `/compare` while you talk.

    Slash commands: `/domain NAME|auto|none`, `/compare`, `/system TEXT`, `/reset`, `/help`, `/quit`. Ctrl-C stops an
    answer, Ctrl-D leaves. Lines that are piped in are messages and commands as well; with `--json` each answer is one
    line of JSON.

    Examples:

        suture chat smollm2-hf --domain math

        printf 'What is 12 times 15?\\n/compare\\n' | suture chat smollm2-hf -d math
    """
    with told(as_json):
        from suture.exported import open_export

        export = open_export(folder)
        start = export.parse(domain) if domain is not None else _start(export)
        hush()
        from suture.chat import Conversation
        from suture.sampling import Settings

        opened = _opened(export, dtype, device, trust_remote_code)
        settings = Settings(max_new_tokens, temperature, top_p, seed)
        if sys.stdin.isatty():
            _note(f"{export.name}: domains {', '.join(export.words)}; /help lists the commands")
        conversation = Conversation(opened, start, system, settings, say=_note)
        for line in _lines(conversation):
            try:
                if not _hear(conversation, line, as_json):
                    break
            except SutureError as error:
                if not sys.stdin.isatty():
                    raise
                typer.secho(f"error: {error}", fg="red", err=True)
            except KeyboardInterrupt:
                _note("\nstopped")


def _start(export: Export) -> str | None:
    """The export's default, or its only domain; with several, none until one is chosen."""
    if export.default is None and (export.fixed or len(export.domains) == 1):
        return export.domains[0]
    return export.default


def _opened(export: Export, dtype: str, device: str, trust_remote_code: bool) -> Any:
    from suture.exported import open_model
    from suture.models import DTYPES, choose_device, choose_dtype

    if dtype not in ("auto", *DTYPES):
        raise SutureError(f"--dtype: unknown {dtype!r}; known: auto, {', '.join(DTYPES)}")
    place = choose_device(device)
    return open_model(export, choose_dtype(dtype, place), place, trust_remote_code=trust_remote_code)


def _lines(conversation: Conversation) -> Iterator[str]:
    """Lines of a terminal, with a prompt and a history, or of a pipe; empty ones are left out."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # input() edits lines once it is imported
    while True:
        try:
            line = input(f"{conversation.shown}> ").strip()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            _note("\n/quit or Ctrl-D leaves")
            continue
        if line:
            yield line


def _hear(conversation: Conversation, line: str, as_json: bool) -> bool:
    """Answer a line or carry it out; False where it ends the conversation."""
    if line == "/compare":
        if conversation.turns or conversation.opened.export.fixed:
            _show(*conversation.compare(), as_json)
        else:
            conversation.comparing = True
            _note("the next answer will be compared")
        return True
    if line.startswith("/") and not line.startswith("//"):
        return conversation.command(line)
    message = line[1:] if line.startswith("//") else line
    if conversation.comparing:
        conversation.comparing = False
        conversation.answer(message)
        _show(*conversation.compare(), as_json)
        return True
    turn = conversation.answer(message, None if as_json else lambda piece: typer.echo(piece, nl=False))
    if as_json:
        _print_line(_row(turn))
    else:
        typer.echo()
    return True


def _show(corrected: Turn, uncorrected: Turn, as_json: bool) -> None:
    """Two answers to one message, in two columns."""
    if as_json:
        return _print_line({"corrected": _row(corrected), "uncorrected": _row(uncorrected)})
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True)
    for name in (corrected.domain, "uncorrected"):
        table.add_column(str(name), ratio=1)
    table.add_row(Text(corrected.answer), Text(uncorrected.answer))
    console().print(table)


def _row(turn: Turn) -> dict[str, Any]:
    return {"domain": turn.domain, "prompt": turn.user, "text": turn.answer, "tokens": turn.tokens}


def _print_line(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False))


def _note(line: str) -> None:
    typer.echo(line, err=True)


@app.command()
def serve(
    folder: ExportFolder,
    more: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="[-- OPTIONS]", help="Options for vLLM, behind `--`.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8000,
    engine: Annotated[str, typer.Option(help="vllm or transformers; `auto`: vLLM where it is installed.")] = "auto",
    name: Annotated[
        Optional[str], typer.Option(help="The model's name; the export's by default.", show_default=False)
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: Trust = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print vLLM's command line, or the models; stop.")] = False,
    as_json: Json = False,
) -> None:
    """Serve an export by the OpenAI protocol, one model name for each domain.

    NAME is the export's default (without one: uncorrected), NAME:math the model corrected for math, NAME:auto the
    router's choice. Requests for different domains may come at the same time.

    Examples:

        suture serve smollm2-hf --port 8000

        suture serve smollm2-adapter --engine vllm --dry-run -- --gpu-memory-utilization 0.5
    """
    with told(as_json):
        from suture.exported import open_export
        from suture.serve import bind, choose_engine, execute, names, serve_transformers, vllm_command

        export = open_export(folder)
        models = names(export, name)
        chosen = choose_engine(engine, dry_run=dry_run)
        if chosen == "vllm":
            command = vllm_command(export, name, host, port, dtype, more)
            if not dry_run:
                execute(command)
            if as_json:
                return print_json({"engine": chosen, "models": list(models), "command": command})
            return typer.echo(shlex.join(command))
        if more:
            raise SutureError(f"transformers' server takes no further options ({more[0]}): they are for --engine vllm")
        if dry_run:
            if as_json:
                return print_json({"engine": chosen, "models": list(models), "command": None})
            return typer.echo("\n".join(models))
        socket = bind(host, port)  # before the model is loaded: a port in use is told at once
        hush()
        opened = _opened(export, dtype, device, trust_remote_code)
        socket.listen()  # from here on requests wait until the server takes them
        address = f"http://{host}:{socket.getsockname()[1]}/v1"
        if as_json:
            typer.echo(json.dumps({"engine": chosen, "address": address, "models": list(models)}))
        else:
            _note(f"{address}   models: {', '.join(models)}")
        serve_transformers(opened, models, socket)
