"""`heal`, and studies of what corrections buy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from suture.cli.app import (
    Json,
    NoGate,
    Quiet,
    RecipeFile,
    StoreFolder,
    app,
    console,
    open_run,
    print_export,
    print_json,
    told,
)
from suture.store import check_folder

if TYPE_CHECKING:
    from suture.recipe import Recipe


@app.command()
def heal(
    recipe: RecipeFile,
    out: Annotated[
        Optional[Path],
        typer.Option(help="Folder for the checkpoint; `<name>-healed` by default.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the folder if it is a checkpoint.")] = False,
    no_gate: NoGate = False,
    as_json: Json = False,
    quiet: Quiet = False,
    store: StoreFolder = None,
) -> None:
    """Repair the merged weights for all domains at once: one plain checkpoint, which stock classes load.

    Layer by layer and in closed form, each linear is changed so that the merged model does on each domain's text what
    that domain's target does. Held-out scores are printed beside the uncorrected merged model; the checkpoint is loaded
    in a process of its own and compared with what was scored. It is what `export --to plain` writes of the recipe's
    `heal`. With `guard` text in the recipe its perplexity is reported too.
    The settings are those of the recipe's first `module: heal`, if it has one.

    Examples:

        suture heal recipe.yaml --out healed

        suture heal recipe.yaml --out healed --force --json > healed.json
    """
    with told(as_json):
        from suture.corrections import Surgery

        if out is not None:
            check_folder(out)

        def alone(read: Recipe) -> Recipe:
            found = [each for each in read.surgery if each.module == "heal"]
            read.surgery = found[:1] or [Surgery(module="heal", samples=read.samples)]
            return read

        job = open_run(recipe, store, quiet, gate=not no_gate, change=alone)
        from suture.exporting import Exporting, Options

        done = Exporting(job, "plain", Options(force=force)).export(out or Path(f"{job.recipe.name}-healed"))
        if as_json:
            return print_json(done.document())
        print_export(done)


study_app = typer.Typer(no_args_is_help=True, help="Many corrections of one merge, compared on held-out text.")
app.add_typer(study_app, name="study")


@study_app.command("repair")
def study_repair(
    recipe: RecipeFile,
    out: Annotated[
        Optional[Path], typer.Option(help="Folder for results; `studies/<name>` by default.", show_default=False)
    ] = None,
    module: Annotated[
        Optional[list[str]], typer.Option(help="Only this module; may be given again.", show_default=False)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    store: StoreFolder = None,
) -> None:
    """Quality against parameters, seconds and calibration tokens, for every correction, domain by domain.

    The recipe's merge, domains and numbers of prompts are kept; its corrections are replaced by the study's: last-layer
    modules at several ranks, `deep`, `svd` and `asvd` at several budgets, `distil`, `heal`, the paper's own, and the
    strongest again on fewer prompts. It takes some thirty times as long as one correction; finished ones are kept.

    Examples:

        suture study repair recipe.yaml

        suture study repair recipe.yaml --module deep --module svd --json
    """
    with told(as_json):
        from suture.report.tables import rich_table
        from suture.study import HEADER, document, rows, widened
        from suture.study import study_repair as carry_out

        if out is not None:
            check_folder(out)
        job = open_run(recipe, store, quiet, change=lambda read: widened(read, module))
        place = out or Path("studies") / str(job.recipe.name)
        points = carry_out(job, place)
        if as_json:
            return print_json(document(points))
        console().print(rich_table("Corrections on held-out text", HEADER, rows(points)))
        typer.echo(f"{place}/study.md · study.json · study.png")
