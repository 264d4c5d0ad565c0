"""What a person sees of a run while it goes on: lines on stderr, and on a terminal a bar of the rounds below them."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

from edge_fl.cli import is_quiet, say
from server.rounds import RoundResult


class Progress:
    """Of a run of `rounds` rounds. `live` draws the bar; by default only on a terminal, and never under `--quiet`."""

    def __init__(self, rounds: int, *, live: bool | None = None) -> None:
        self._rounds = rounds
        self._live = (sys.stderr.isatty() if live is None else live) and not is_quiet()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._live:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                SpinnerColumn,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[rate]}"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("rounds", total=self._rounds, rate="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None

    def say(self, line: str) -> None:
        """One line that stays."""
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            say(line)

    def busy(self, doing: str) -> None:
        """What the run is doing now, beside the bar; without one, a line."""
        if self._bar:
            self._bar.update(self._task, description=doing)
        else:
            say(doing)

    def round(self, result: RoundResult) -> None:
        """One round is over."""
        self.say(
            f"round {result.round}/{self._rounds}: {len(result.answered)} of {len(result.asked)} answered, {result.seconds:.1f} s"
        )
        if self._bar:
            rate = f"{60 / max(result.seconds, 1e-3):.1f} rounds/min"
            self._bar.update(self._task, completed=result.round, rate=rate)
