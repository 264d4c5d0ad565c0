"""Notify systemd that the service is ready, alive or stopping (sd_notify protocol); does nothing outside systemd."""

import math
import os
import socket
from collections.abc import Mapping

from edge_fl.untrusted import whole

PER_TIMEOUT = 3  # notifications per watchdog timeout


class Notifier:
    """Sends datagrams to the socket in $NOTIFY_SOCKET (unit settings `Type=notify`, `WatchdogSec=`)."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        timeout_us = environment.get("WATCHDOG_USEC", "")
        self._every_s = (whole(timeout_us, 10**15) or math.inf) / 1e6 / PER_TIMEOUT
        self._next_s = -math.inf

    def ready(self) -> None:
        """Report that the agent runs, with or without a broker."""
        self._send("READY=1")

    def alive(self, now_s: float) -> None:
        """Notify the watchdog when the next notification is due; call often."""
        if now_s >= self._next_s and self._every_s < math.inf:
            self._next_s = now_s + self._every_s
            self._send("WATCHDOG=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.settimeout(1.0)
                out.sendto(state.encode(), self._address)
        except OSError:
            return  # systemd is gone
