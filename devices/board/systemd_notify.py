"""What systemd hears of a service: that it is ready, that it is alive, that it leaves. One datagram each; nothing where nobody listens."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping

BEATS = 3  # per time that the watchdog waits


class Notifier:
    """Speaks to the socket that systemd named in the environment (`Type=notify`, `WatchdogSec=`)."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        patience_us = environment.get("WATCHDOG_USEC", "")
        self._every_s = int(patience_us) / 1e6 / BEATS if patience_us.isdigit() else math.inf
        self._next_s = -math.inf

    def ready(self) -> None:
        """The agent runs, with or without a broker."""
        self._tell("READY=1")

    def alive(self, now_s: float) -> None:
        """To be called often; it tells as often as the watchdog needs."""
        if now_s >= self._next_s and self._every_s < math.inf:
            self._next_s = now_s + self._every_s
            self._tell("WATCHDOG=1")

    def leaving(self) -> None:
        """It stops in order."""
        self._tell("STOPPING=1")

    def _tell(self, what: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.settimeout(1.0)
                out.sendto(what.encode(), self._address)
        except OSError:
            return  # whoever listened is gone, and will find out
