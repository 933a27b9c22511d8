"""`generate`, and what a user asks before anything is run: `list` and `doctor`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from suture.cli.app import (
    Json,
    Quiet,
    StoreFolder,
    app,
    hush,
    open_run,
    print_json,
    print_rows,
    told,
)
from suture.errors import SutureError


@app.command()
def generate(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run.", show_default=False)
    ],
    domain: Annotated[
        str,
        typer.Option(
            "--domain",
            "-d",
            help="Whose correction acts; also chooses the chat template. `auto`: as a router says, by the prompt.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        Optional[str], typer.Option("--prompt", "-p", help="The prompt; stdin by default.", show_default=False)
    ] = None,
    surgery: Annotated[
        Optional[str],
        typer.Option(
            help="Which correction, by label; the recipe's last by default (for `auto` the last on the final states).",
            show_default=False,
        ),
    ] = None,
    uncorrected: Annotated[bool, typer.Option("--uncorrected", help="The merged model as it is.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus, when sampling.")] = 1.0,
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is: no template of the recipe.")] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="With `auto`: put the prompt into the merged model's chat template.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    store: StoreFolder = None,
) -> None:
    """Write text with the corrected model, token by token.

    The domain is named by you. What the recipe does to prompts (its template, the chat template) is done to this one
    too, unless `--raw`.

    With `-d auto` a router names the domain from what the merged model makes of the prompt, or abstains, and then
    nothing is corrected. The prompt is taken as it is, and must have the form that the recipe gives its own.

    Examples:

        suture generate recipe.yaml --domain math --prompt "What is 12 times 15?"

        suture generate runs/smollm2 -d code --uncorrected < prompt.txt

        suture generate recipe.yaml -d math --surgery standard-l1 --temperature 0.7 --seed 3 -p "..."

        suture generate runs/smollm2 -d auto --chat -p "Write a limerick about a lighthouse."
    """
    with told(as_json):
        if prompt is None and sys.stdin.isatty():
            raise SutureError("give a prompt with --prompt, or on stdin")
        if uncorrected and surgery is not None:
            raise SutureError("--surgery names a correction, --uncorrected asks for none: leave one of them out")
        job = open_run(recipe, store, quiet)
        from suture.generate import AUTO, generate_text
        from suture.routing import routable
        from suture.sampling import Settings

        routed = domain == AUTO and AUTO not in job.members
        if routed and uncorrected:
            raise SutureError("-d auto chooses a correction, --uncorrected asks for none: name a domain")
        if chat and not routed:
            raise SutureError("--chat is for -d auto: the recipe says whether a domain has a chat template")
        if chat and raw:
            raise SutureError("--raw leaves the prompt as it is, --chat does not: leave one of them out")
        member = None if routed else job.chosen([domain])[0]
        settings = Settings(max_new_tokens, temperature, top_p, seed)
        label = None if uncorrected else (routable(job, surgery) if routed else job.surgery(surgery)).label
        text = prompt if prompt is not None else sys.stdin.read().removesuffix("\n").removesuffix("\r")
        if not text.strip():
            raise SutureError("the prompt is empty")
        stream = None if as_json else lambda piece: typer.echo(piece, nl=False)
        answer = generate_text(job, member, text, label, settings, raw=raw, chat=chat, stream=stream)
        if as_json:
            return print_json({"domain": domain, "surgery": label, "prompt": text, **answer})
        typer.echo()
        if routed:
            chosen = answer["routed"]
            job.progress.note(f"routed: {chosen}, {label}" if chosen else "routed: abstained, nothing was corrected")


@app.command("list")
def list_(
    what: Annotated[
        str, typer.Argument(help="methods, modules, losses or artifacts; all but artifacts by default.")
    ] = "",
    as_json: Json = False,
    store: StoreFolder = None,
) -> None:
    """Names that recipes can use: merge methods, surgery modules, losses; or the artifacts in the store."""
    with told(as_json):
        from suture.inventory import inventory

        if what in ("", "methods"):
            hush()
        found = inventory(what, store)
        if as_json:
            return print_json(found)
        for name, rows in found.items():
            print_rows(name.capitalize(), rows)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Look at versions, device, memory, disk and the hub; say what is missing and the command that mends it.

    Exit code 1 if something that suture needs is missing.
    """
    with told(as_json):
        from suture.doctor import examine

        rows = [vars(check) for check in examine()]
        if as_json:
            print_json({"checks": rows})
        else:
            print_rows("Environment", rows, left=4)
        if any(row["state"] == "missing" for row in rows):
            raise typer.Exit(1)
