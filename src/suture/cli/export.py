"""`export`: a corrected model for the engines that people run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from suture.cli.app import Json, Quiet, StoreFolder, app, open_run, print_export, print_json, told
from suture.store import check_folder


@app.command()
def export(
    recipe: Annotated[
        Path, typer.Argument(metavar="RUN", help="A recipe, or the folder of a run.", show_default=False)
    ],
    to: Annotated[str, typer.Option(help="hf, plain, adapter, vllm or gguf.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The new folder.", show_default=False)],
    surgery: Annotated[
        Optional[str],
        typer.Option(help="Which correction, by label; the recipe's last that fits by default.", show_default=False),
    ] = None,
    domain: Annotated[
        Optional[list[str]],
        typer.Option("--domain", "-d", help="Only this domain; may be given again.", show_default=False),
    ] = None,
    default: Annotated[
        Optional[str],
        typer.Option(
            help="For hf and vllm: the domain that acts when none is asked for, `auto` or `none`; `auto` by default, "
            "where there are several domains.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the folder if it is a checkpoint.")] = False,
    python: Annotated[
        Optional[Path],
        typer.Option(help="Interpreter of the engine's environment, if it is not this one.", show_default=False),
    ] = None,
    llama_cpp: Annotated[
        Optional[Path],
        typer.Option("--llama-cpp", help="For gguf: llama.cpp's source, or its converter.", show_default=False),
    ] = None,
    outtype: Annotated[str, typer.Option(help="For gguf: f32, f16, bf16 or q8_0.")] = "f32",
    as_json: Json = False,
    quiet: Quiet = False,
    store: StoreFolder = None,
) -> None:
    """Write a corrected model as a folder that other programs load.

    `hf`: the merged weights with code and modules of all domains, which transformers and vLLM load with
    `trust_remote_code`; the domain is chosen by the caller, or by a router from the prompt. `plain`: the correction in
    the weights, for anything that loads the merged model. `adapter`: the merged weights and a LoRA for each domain.
    `vllm`: as `hf`, for the plugin that this package brings. `gguf`: as `plain`, by llama.cpp's own converter.

    Each export is loaded in a process of its own by the engine's own classes, and compared with the model that was
    scored: logits and greedy tokens of held-out prompts, in left-padded batches. One that differs is kept as
    `DIR.failed`. What the run has not made yet is made first.

    Examples:

        suture export runs/smollm2 --to plain --surgery heal --out smollm2-healed

        suture export recipe.yaml --to hf --out smollm2-hf

        suture export recipe.yaml --to adapter --surgery deep --out smollm2-adapters

        suture export recipe.yaml --to vllm --python vllm-env/bin/python --out smollm2-vllm
    """
    with told(as_json):
        check_folder(out)
        from suture.export.kinds import narrowed

        job = open_run(recipe, store, quiet, change=lambda read: narrowed(read, to, surgery, domain or []))
        from suture.exporting import Exporting, Options

        options = Options(default, force, python, llama_cpp, outtype)
        done = Exporting(job, to, options).export(out)
        if as_json:
            return print_json(done.document())
        print_export(done)
