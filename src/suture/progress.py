"""Progress of long stages: silent by default, bars on stderr when a terminal command asks for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], None]


class Progress:
    """The silent one. `stage` yields a function to call with the units done; `note` says one line."""

    def stage(self, name: str, total: int) -> AbstractContextManager[Advance]:
        """A named stage of `total` units."""
        return self._silent()

    def note(self, message: str) -> None:
        """One line about what was chosen, found or skipped."""

    @contextmanager
    def _silent(self) -> Iterator[Advance]:
        yield lambda units: None


class TerminalProgress(Progress):
    """Bars with the stage's name, the share done and the time left, on stderr (rich)."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(stderr=True)

    def stage(self, name: str, total: int) -> AbstractContextManager[Advance]:
        return self._bar(name, total)

    def note(self, message: str) -> None:
        self.console.print(message, style="dim", markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def _bar(self, name: str, total: int) -> Iterator[Advance]:
        started = time.monotonic()
        if not self.console.is_terminal:
            self.note(f"{name} ...")
            yield lambda units: None
            self.note(f"{name:<36} {time.monotonic() - started:6.1f} s")
            return
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        with Bar(
            TextColumn("{task.description:<36}"),
            BarColumn(bar_width=28),
            TaskProgressColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("spent"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        ) as bar:
            task = bar.add_task(name, total=max(total, 1))
            yield lambda units: bar.advance(task, units)
            bar.update(task, completed=max(total, 1))
        self.note(f"{name:<36} {time.monotonic() - started:6.1f} s")


SILENT = Progress()
