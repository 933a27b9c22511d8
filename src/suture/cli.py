"""The command line: one command a stage, `run` for all. Heavy imports happen inside the commands."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from suture.errors import SutureError
from suture.progress import SILENT, Progress, TerminalProgress
from suture.store import check_folder

if TYPE_CHECKING:
    from suture.pipeline import Run
    from suture.recipe import Recipe

app = typer.Typer(
    name="suture",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help=(
        "Measure and correct merged language models.\n\n"
        "Merging fine-tunes gives one model that is worse than each parent at the parent's own job. suture takes a "
        "recipe (a mergekit configuration, a target and prompts for each domain), measures how far the merged model's "
        "final hidden states are from each target's, corrects it, and scores what that did on held-out text.\n\n"
        "Start with `suture run RECIPE`. Results, tables and `--json` documents go to stdout; progress and notes to "
        "stderr."
    ),
)

RecipeFile = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="The recipe: a YAML file (see docs/recipe.md).", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars and notes.")]
NoGate = Annotated[
    bool,
    typer.Option(
        "--no-gate",
        help="Choose no strengths: every correction acts in full, as in the paper. (`auto` still chooses.)",
    ),
]
StoreFolder = Annotated[
    Optional[Path],
    typer.Option("--store", help="Folder of artifacts; `$SUTURE_HOME/store` by default.", show_default=False),
]


@contextmanager
def _told(as_json: bool) -> Iterator[None]:
    """Errors meant for users as one message and exit code 1; with --json also as the document."""
    try:
        yield
    except (SutureError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError):
            place = f"{error.filename}: " if error.filename else ""
            message = f"{place}{error.strerror or error}"
        if as_json:
            _print_json({"error": {"type": type(error).__name__, "message": message}})
        typer.secho(f"error: {message}", fg="red", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.secho("stopped; finished stages are kept, run the same command to go on", err=True)
        raise typer.Exit(130) from None


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _hush() -> None:
    """Other libraries' chatter: warnings that a user of suture can do nothing about."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    logging.getLogger("mergekit").setLevel(logging.ERROR)
    from transformers.utils import logging as chatter

    chatter.set_verbosity_error()
    chatter.disable_progress_bar()


def _open(
    recipe: Path,
    store: Path | None,
    quiet: bool,
    *,
    gate: bool = True,
    change: Callable[[Recipe], Recipe] | None = None,
) -> Run:
    """A checked run of a recipe file, or of the recipe kept in a run's folder, changed as a command wants it."""
    started = time.monotonic()
    if store is not None:
        check_folder(store)
    progress: Progress = SILENT if quiet else TerminalProgress()
    progress.note("loading libraries")
    _hush()
    from suture.pipeline import Run, read_recipe
    from suture.store import Store

    read = read_recipe(recipe)
    if change is not None:
        read = change(read)
    for surgery in [] if gate else read.surgery:
        surgery.gate = False
    job = Run(read, store=Store(store) if store else None, progress=progress, started=started)
    for weight in job.merge.weights if job.merge else []:
        progress.note(weight.sentence())
    return job


def _console() -> Any:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=120)


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
    with _told(as_json):
        from suture.report.tables import HEADER, caption, rich_table, score_rows, verdicts

        if out is not None:
            check_folder(out)
        job = _open(recipe, store, quiet, gate=not no_gate)
        result = job.run(out or Path("runs") / str(job.recipe.name))
        if as_json:
            return _print_json(result.document())
        console = _console()
        console.print(rich_table(caption(result.scores), HEADER, score_rows(result.scores)))
        for line in verdicts(result.scores):
            console.print(line, highlight=False, markup=False)
        count = len(result.reused)
        kept = f", {count} stage{'s' if count > 1 else ''} reused" if count else ""
        console.print(
            f"\n{result.folder}/report.md · figures/ · scores.json   "
            f"({result.seconds:.0f} s, {result.peak / 2**30:.2f} GiB at most{kept})",
            highlight=False,
            markup=False,
            soft_wrap=True,
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
    with _told(as_json):
        if out is not None:
            check_folder(out)
        job = _open(recipe, store, quiet)
        place = job.write_merged(out, force)
        weights = [vars(weight) for weight in job.merge.weights] if job.merge else []
        if as_json:
            return _print_json({"merged": str(place), "weights": weights, "seed": job.recipe.merge_seed})
        typer.echo(place)


@app.command()
def capture(recipe: RecipeFile, as_json: Json = False, quiet: Quiet = False, store: StoreFolder = None) -> None:
    """Read calibration and held-out text with each target and the merged model, and keep their final hidden states.

    Targets also write the held-out text, greedily. States are found again by the content of weights, tokens and
    settings.
    """
    with _told(as_json):
        job = _open(recipe, store, quiet)
        job.capture()
        rows = [row for member in job.members.values() for row in job.describe_states(member)]
        if as_json:
            return _print_json({"states": rows, "reused": job.reused})
        _print_rows("Captured states", rows)


@app.command()
def bias(recipe: RecipeFile, as_json: Json = False, quiet: Quiet = False, store: StoreFolder = None) -> None:
    """How far the merged model's states are from each target's, by position, and where errors matter (Figures 1 and 2).

    δ is the mean absolute difference of a state (Eq. 2); `late_over_early` compares positions 100-255 with 0-49.
    """
    with _told(as_json):
        job = _open(recipe, store, quiet)
        job.capture()
        rows = []
        for member in job.members.values():
            report, artifact = job.bias(member)
            rows.append({"domain": member.name, **report.summary(), "path": str(artifact.path / "bias.parquet")})
        if as_json:
            return _print_json({"bias": rows})
        shown = ("domain", "tokens", "mean", "early", "late", "late_over_early", "slope", "mean_entropy")
        _print_rows("Bias on held-out text", [{key: row[key] for key in shown} for row in rows])


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
    with _told(as_json):
        job = _open(recipe, store, quiet, gate=not no_gate)
        members = job.chosen(domain)
        job.capture(None if any(each.module == "heal" for each in job.recipe.surgery) else members)
        rows = [job.describe_surgery(member, surgery) for member in members for surgery in job.recipe.surgery]
        job.release()
        if as_json:
            return _print_json({"surgery": rows})
        _print_rows("Corrections", [{key: value for key, value in row.items() if key != "path"} for row in rows])


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
    and compared with what was scored before it is kept. With `guard` text in the recipe its perplexity is reported too.
    The settings are those of the recipe's first `module: heal`, if it has one.

    Examples:

        suture heal recipe.yaml --out healed

        suture heal recipe.yaml --out healed --force --json > healed.json
    """
    with _told(as_json):
        from suture.corrections import Surgery
        from suture.report.tables import HEADER, caption, rich_table, score_rows, verdicts

        if out is not None:
            check_folder(out)

        def alone(read: Recipe) -> Recipe:
            found = [each for each in read.surgery if each.module == "heal"]
            read.surgery = found[:1] or [Surgery(module="heal")]
            return read

        job = _open(recipe, store, quiet, gate=not no_gate, change=alone)
        result = job.heal(out or Path(f"{job.recipe.name}-healed"), force=force)
        if as_json:
            return _print_json(result.document())
        console = _console()
        console.print(rich_table(caption(result.scores), HEADER, score_rows(result.scores)))
        for line in verdicts(result.scores):
            console.print(line, highlight=False, markup=False)
        if result.strength is not None and result.strength < 1:
            console.print(f"strength {result.strength:g}, chosen on prompts that were held back", highlight=False)
        console.print(
            f"\n{result.folder}   ({result.seconds:.0f} s, {result.peak / 2**30:.2f} GiB at most)",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


@app.command()
def generate(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run.", show_default=False)
    ],
    domain: Annotated[
        str,
        typer.Option(
            "--domain", "-d", help="Whose correction acts; also chooses the chat template.", show_default=False
        ),
    ],
    prompt: Annotated[
        Optional[str], typer.Option("--prompt", "-p", help="The prompt; stdin by default.", show_default=False)
    ] = None,
    surgery: Annotated[
        Optional[str],
        typer.Option(help="Which correction, by label; the recipe's last by default.", show_default=False),
    ] = None,
    uncorrected: Annotated[bool, typer.Option("--uncorrected", help="The merged model as it is.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus, when sampling.")] = 1.0,
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is: no template of the recipe.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    store: StoreFolder = None,
) -> None:
    """Write text with the corrected model, token by token.

    The domain is named by you and never guessed. What the recipe does to prompts (its template, the chat template) is
    done to this one too, unless `--raw`.

    Examples:

        suture generate recipe.yaml --domain math --prompt "What is 12 times 15?"

        suture generate runs/smollm2 -d code --uncorrected < prompt.txt

        suture generate recipe.yaml -d math --surgery standard-l1 --temperature 0.7 --seed 3 -p "..."
    """
    with _told(as_json):
        if prompt is None and sys.stdin.isatty():
            raise SutureError("give a prompt with --prompt, or on stdin")
        if uncorrected and surgery is not None:
            raise SutureError("--surgery names a correction, --uncorrected asks for none: leave one of them out")
        job = _open(recipe, store, quiet)
        from suture.generate import Settings, generate_text

        (member,) = job.chosen([domain])
        settings = Settings(max_new_tokens, temperature, top_p, seed)
        label = None if uncorrected else job.surgery(surgery).label
        text = prompt if prompt is not None else sys.stdin.read().removesuffix("\n").removesuffix("\r")
        if not text.strip():
            raise SutureError("the prompt is empty")
        stream = None if as_json else lambda piece: typer.echo(piece, nl=False)
        answer = generate_text(job, member, text, label, settings, raw=raw, stream=stream)
        if as_json:
            return _print_json({"domain": domain, "surgery": label, "prompt": text, **answer})
        typer.echo()


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
    with _told(as_json):
        from suture.report.tables import rich_table
        from suture.study import HEADER, document, rows, widened
        from suture.study import study_repair as carry_out

        if out is not None:
            check_folder(out)
        job = _open(recipe, store, quiet, change=lambda read: widened(read, module))
        place = out or Path("studies") / str(job.recipe.name)
        points = carry_out(job, place)
        if as_json:
            return _print_json(document(points))
        _console().print(rich_table("Corrections on held-out text", HEADER, rows(points)))
        typer.echo(f"{place}/study.md · study.json · study.png")


@app.command("list")
def list_(
    what: Annotated[
        str, typer.Argument(help="methods, modules, losses or artifacts; all but artifacts by default.")
    ] = "",
    as_json: Json = False,
    store: StoreFolder = None,
) -> None:
    """Names that recipes can use: merge methods, surgery modules, losses; or the artifacts in the store."""
    with _told(as_json):
        from suture.inventory import inventory

        if what in ("", "methods"):
            _hush()
        found = inventory(what, store)
        if as_json:
            return _print_json(found)
        for name, rows in found.items():
            _print_rows(name.capitalize(), rows)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Look at versions, device, memory, disk and the hub; say what is missing and the command that mends it.

    Exit code 1 if something that suture needs is missing.
    """
    with _told(as_json):
        from suture.doctor import examine

        rows = [vars(check) for check in examine()]
        if as_json:
            _print_json({"checks": rows})
        else:
            _print_rows("Environment", rows, left=4)
        if any(row["state"] == "missing" for row in rows):
            raise typer.Exit(1)


def _print_rows(title: str, rows: list[dict[str, Any]], left: int = 1) -> None:
    from suture.report.tables import plain, rich_table

    if not rows:
        typer.echo(f"{title}: none")
        return
    texts = [[plain(value) for value in row.values()] for row in rows]
    numbers = sum(isinstance(value, str) for value in rows[0].values())
    _console().print(rich_table(title, list(rows[0]), texts, max(left, numbers)))


def main() -> None:
    """Entry point of the `suture` command."""
    app()


if __name__ == "__main__":
    main()
