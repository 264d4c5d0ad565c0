"""Connect a command to the broker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_fl_server.mqtt.reader import ServerConnect


def connect_to(host: str, port: int | None, identity: Path | str | None) -> ServerConnect:
    """Return a function that opens connections to the broker; the MQTT client is imported only now."""
    from edge_fl_server.mqtt.connector import connector

    return connector(host, port or 0, identity)
