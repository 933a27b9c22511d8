"""`push`: an export folder to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from suture.cli.app import Json, Quiet, app, print_json, print_rows, told

if TYPE_CHECKING:
    from suture.push import Push


@app.command()
def push(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that `suture export` wrote.", show_default=False)
    ],
    repository: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="The repository; made if it is not there.", show_default=False)
    ],
    public: Annotated[bool, typer.Option("--public", help="For everybody to see; private by default.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be sent, and connect to nothing.")
    ] = False,
    branch: Annotated[
        Optional[str],
        typer.Option("--revision", "--branch", help="A branch; made if it is not there.", show_default=False),
    ] = None,
    message: Annotated[
        Optional[str], typer.Option("--message", "-m", help="The commit's first line.", show_default=False)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Upload an export to the Hugging Face hub, in one commit, as a private repository unless `--public`.

    The folder is checked first: that it was verified, that its files belong to it, and that its texts name no folder of
    this machine. The token is that of `hf auth login`, or `HF_TOKEN`.

    Examples:

        suture push smollm2-hf my-org/smollm2-merged --dry-run

        suture push smollm2-hf my-org/smollm2-merged --public
    """
    with told(as_json):
        from suture.push import plan_push
        from suture.push import push as carry_out

        plan = plan_push(folder, repository, public=public, branch=branch, message=message)
        for note in plan.notes:
            typer.echo(f"note: {note}", err=True)
        if dry_run:
            return print_json(plan.document()) if as_json else _show(plan)
        if as_json or quiet:
            from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

            disable_progress_bars()
        done = carry_out(plan)
        if as_json:
            made = {"url": done.url, "commit": done.commit, "created": done.created, "removed": list(done.removed)}
            return print_json({**plan.document(), **made})
        for name in done.removed:
            typer.echo(f"removed from the repository, of an older export: {name}", err=True)
        typer.echo(f"{done.url}   ({_visibility(plan)}, {len(plan.files)} files, commit {done.commit[:8]})")


def _show(plan: Push) -> None:
    rows = [{"file": name, "MB": f"{size / 1e6:.3f}"} for name, size in plan.files.items()]
    rows.append({"file": "total", "MB": f"{sum(plan.files.values()) / 1e6:.3f}"})
    print_rows(f"{plan.repository}, {_visibility(plan)}, branch {plan.branch or 'main'}", rows)
    typer.echo(f"commit: {plan.message}\nnothing was sent")


def _visibility(plan: Push) -> str:
    return "private" if plan.private else "public"
