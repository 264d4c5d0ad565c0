"""Connect a command to the broker, and end it on SIGTERM as on Ctrl-C."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.mqtt.reader import ServerConnect


def connect_to(host: str, port: int | None, identity: Path | str | None) -> ServerConnect:
    """Return a function that opens connections to the broker; the MQTT client is imported only now."""
    from server.mqtt.connector import connector

    return connector(host, port or 0, identity)


def interrupt_on_sigterm() -> None:
    """Make SIGTERM raise KeyboardInterrupt, so that a run ends as with Ctrl-C."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
