"""What the devices' commands share: an option, warnings on stderr, how Ctrl-C ends them, and what trains; nothing heavy at import."""

from __future__ import annotations

import logging
import signal
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_fl.console.output import is_quiet

if TYPE_CHECKING:
    from devices.runtime.runner import Runner

Port = Annotated[
    int | None, typer.Option(min=1, max=65535, help="The broker's port [8883 with an identity, else 1883].")
]


def stop_on_signal(runner: Runner) -> None:
    """The first Ctrl-C lets the devices leave in order, the second ends at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        runner.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def log_warnings() -> None:
    """Warnings go to stderr, under `--quiet` only errors."""
    logging.basicConfig(level=logging.ERROR if is_quiet() else logging.WARNING, format="%(message)s")


def full_worker() -> Any:
    """What trains on a full device; torch comes with it."""
    from devices.workers.full import FullWorker

    return FullWorker
