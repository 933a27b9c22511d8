"""Commands of the stages, and `run` for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from suture.cli.app import (
    Json,
    NoGate,
    Quiet,
    RecipeFile,
    StoreFolder,
    app,
    open_run,
    print_json,
    print_rows,
    print_scores,
    told,
)
from suture.store import check_folder


@app.command()
def run(
    recipe: RecipeFile,
    out: Annotated[
        Optional[Path], typer.Option(help="Folder for results; `runs/<name>` by default.", show_default=False)
    ] = None,
    no_gate: NoGate = False,
    as_json: Json = False,
    quiet: Quiet = False,
    store: StoreFolder = None,
) -> None:
    """Merge, capture, measure, calibrate and score: everything that a recipe asks for.

    The folder gets `scores.json`, `report.md`, `figures/`, the bias of each domain and the trained modules. Stages
    whose artifacts exist are skipped, so a stopped run goes on where it was and a second one ends quickly.

    Examples:

        suture run recipe.yaml

        suture run recipe.yaml --out results/first --json > first.json
    """
    with told(as_json):
        if out is not None:
            check_folder(out)
        job = open_run(recipe, store, quiet, gate=not no_gate)
        result = job.run(out or Path("runs") / str(job.recipe.name))
        if as_json:
            return print_json(result.document())
        count = len(result.reused)
        kept = f", {count} stage{'s' if count > 1 else ''} reused" if count else ""
        print_scores(
            result.scores,
            f"{result.folder}/report.md · figures/ · scores.json   "
            f"({result.seconds:.0f} s, {result.peak / 2**30:.2f} GiB at most{kept})",
        )


@app.command()
def merge(
    recipe: RecipeFile,
    out: Annotated[
        Optional[Path], typer.Option(help="Write the checkpoint into this new folder.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the folder if it exists.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    store: StoreFolder = None,
) -> None:
    """Write the merged model as a checkpoint, by mergekit's engine.

    Without `--out` it is kept in the store, and later commands load it from there instead of merging in memory. `run`
    and `capture` need no checkpoint on disk.

    Examples:

        suture merge recipe.yaml --out merged

        suture merge recipe.yaml --json --quiet
    """
    with told(as_json):
        if out is not None:
            check_folder(out)
        job = open_run(recipe, store, quiet)
        place = job.write_merged(out, force)
        weights = [vars(weight) for weight in job.merge.weights] if job.merge else []
        if as_json:
            return print_json({"merged": str(place), "weights": weights, "seed": job.recipe.merge_seed})
        typer.echo(place)


@app.command()
def capture(recipe: RecipeFile, as_json: Json = False, quiet: Quiet = False, store: StoreFolder = None) -> None:
    """Read calibration and held-out text with each target and the merged model, and keep their final hidden states.

    Targets also write the held-out text, greedily. States are found again by the content of weights, tokens and
    settings.
    """
    with told(as_json):
        job = open_run(recipe, store, quiet)
        job.capture()
        rows = [row for member in job.members.values() for row in job.describe_states(member)]
        if as_json:
            return print_json({"states": rows, "reused": job.reused})
        print_rows("Captured states", rows)


@app.command()
def bias(recipe: RecipeFile, as_json: Json = False, quiet: Quiet = False, store: StoreFolder = None) -> None:
    """How far the merged model's states are from each target's, by position, and where errors matter (Figures 1 and 2).

    δ is the mean absolute difference of a state (Eq. 2); `late_over_early` compares positions 100-255 with 0-49.
    """
    with told(as_json):
        job = open_run(recipe, store, quiet)
        job.capture()
        rows = []
        for member in job.members.values():
            report, artifact = job.bias(member)
            rows.append({"domain": member.name, **report.summary(), "path": str(artifact.path / "bias.parquet")})
        if as_json:
            return print_json({"bias": rows})
        shown = ("domain", "tokens", "mean", "early", "late", "late_over_early", "slope", "mean_entropy")
        print_rows("Bias on held-out text", [{key: row[key] for key in shown} for row in rows])


@app.command()
def calibrate(
    recipe: RecipeFile,
    domain: Annotated[
        Optional[list[str]], typer.Option(help="Only this domain; may be given again.", show_default=False)
    ] = None,
    no_gate: NoGate = False,
    as_json: Json = False,
    quiet: Quiet = False,
    store: StoreFolder = None,
) -> None:
    """Make the corrections that a recipe asks for. Those of the last layer need captured states, but no language model.

    Examples:

        suture calibrate recipe.yaml

        suture calibrate recipe.yaml --domain math --domain code
    """
    with told(as_json):
        job = open_run(recipe, store, quiet, gate=not no_gate)
        members = job.chosen(domain)
        job.capture(None if any(each.module == "heal" for each in job.recipe.surgery) else members)
        rows = [job.describe_surgery(member, surgery) for member in members for surgery in job.recipe.surgery]
        job.release()
        if as_json:
            return print_json({"surgery": rows})
        print_rows("Corrections", [{key: value for key, value in row.items() if key != "path"} for row in rows])
