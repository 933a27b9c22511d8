"""The program, what its commands share, and how they tell errors."""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from suture.errors import SutureError
from suture.progress import SILENT, Progress, TerminalProgress
from suture.store import check_folder

if TYPE_CHECKING:
    from suture.evaluate.heldout import Score
    from suture.export.manifest import Exported
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
def told(as_json: bool) -> Iterator[None]:
    """Errors meant for users as one message and exit code 1; with --json also as the document."""
    try:
        yield
    except (SutureError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError):
            place = f"{error.filename}: " if error.filename else ""
            message = f"{place}{error.strerror or error}"
        if as_json:
            print_json({"error": {"type": type(error).__name__, "message": message}})
        typer.secho(f"error: {message}", fg="red", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.secho("stopped; finished stages are kept, run the same command to go on", err=True)
        raise typer.Exit(130) from None


def print_json(value: Any) -> None:
    """One document on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def hush() -> None:
    """Other libraries' chatter: warnings that a user of suture can do nothing about."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    logging.getLogger("mergekit").setLevel(logging.ERROR)
    from transformers.utils import logging as chatter

    chatter.set_verbosity_error()
    chatter.disable_progress_bar()


def open_run(
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
    hush()
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


def console() -> Any:
    """A terminal, or 120 columns where there is none."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=120)


def print_scores(scores: Sequence[Score], place: str, more: Sequence[str] = ()) -> None:
    """Held-out scores as a table, what they say in sentences with more behind them, and where the results are."""
    from suture.report.tables import HEADER, caption, rich_table, score_rows, verdicts

    terminal = console()
    terminal.print(rich_table(caption(scores), HEADER, score_rows(scores)))
    for line in [*verdicts(scores), *more]:
        terminal.print(line, highlight=False, markup=False)
    terminal.print(f"\n{place}", highlight=False, markup=False, soft_wrap=True)


def print_export(done: Exported) -> None:
    """An export's held-out scores, what it was compared with, and where it is."""
    rows = done.manifest["corrections"].items()
    partly = [(name, row["strength"]) for name, row in rows if row["strength"] is not None and row["strength"] < 1]
    more = [f"{name}: strength {strength:g}, chosen on prompts that were held back" for name, strength in partly]
    for found in done.manifest["verified"]:
        measure = "logprobs" if "logprobs" in found else "logits"
        more.append(
            f"loaded by {found['engine']} in a process of its own: {measure} within {found[measure]:.1g} of the model "
            f"that was scored, {found['greedy']} greedy tokens equal"
        )
    print_scores(done.scores, f"{done.folder}   ({done.seconds:.0f} s, {done.peak / 2**30:.2f} GiB at most)", more)


def print_rows(title: str, rows: list[dict[str, Any]], left: int = 1) -> None:
    """Rows as a table on stdout; the first `left` columns, and all that hold text, are aligned left."""
    from suture.report.tables import plain, rich_table

    if not rows:
        typer.echo(f"{title}: none")
        return
    texts = [[plain(value) for value in row.values()] for row in rows]
    numbers = sum(isinstance(value, str) for value in rows[0].values())
    console().print(rich_table(title, list(rows[0]), texts, max(left, numbers)))
