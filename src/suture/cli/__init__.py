"""The command line: one command a stage, `run` for all. Heavy imports happen inside the commands."""

from __future__ import annotations

from suture.cli.app import app

# in the order that `--help` shows their commands in
from suture.cli import stages  # isort: skip
from suture.cli import repair  # isort: skip
from suture.cli import export  # isort: skip
from suture.cli import other  # isort: skip
from suture.cli import talk  # isort: skip
from suture.cli import push  # isort: skip

__all__ = ["app", "export", "main", "other", "push", "repair", "stages", "talk"]


def main() -> None:
    """Entry point of the `suture` command."""
    app()
