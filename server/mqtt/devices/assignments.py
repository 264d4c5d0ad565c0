"""What the server wants of each device: one retained message per device, numbered so that only the latest counts.

The number starts with the server's epoch, so that it grows over restarts too. Wants to train that an earlier server left behind are
withdrawn at the start; wants to serve a release stay, since a device that was away shall find them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from edge_fl.errors import ProtocolError
from edge_fl.wire.messages import Mode, Request, Want, decode
from server.mqtt.connection import Heard, Link
from server.mqtt.retained import Connect, read_retained

WANTS_PER_EPOCH = 2**20
LASTING: frozenset[Mode] = frozenset({"serve"})


class Wants:
    """The current want of every device that was asked for something."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._current: dict[str, Want] = {}
        self._count = 0
        self._lock = threading.Lock()
        link.on("req", self._asked)
        link.on_return(lambda _: self.say_again())

    def ask(self, device: str, mode: Mode, **fields: Any) -> None:
        """Replaces what is wanted of a device."""
        with self._lock:
            self._count += 1
            want = Want(self._link.epoch * WANTS_PER_EPOCH + self._count, mode, **fields)
            self._current[device] = want
            self._publish(device, want)

    def again(self, device: str) -> None:
        """Says the current want once more, under its number: nothing is done twice."""
        with self._lock:
            if want := self._current.get(device):
                self._publish(device, want)

    def say_again(self) -> None:
        """Says every current want once more."""
        for device in list(self._current):
            self.again(device)

    def current(self, device: str) -> Want | None:
        """What is wanted of a device now."""
        return self._current.get(device)

    def withdraw(self, devices: Iterable[str]) -> None:
        """Clears the retained wants of these devices."""
        with self._lock:
            for device in devices:
                self._current.pop(device, None)
                self._link.forget(self._link.topics.want(device))

    def withdraw_passing(self) -> None:
        """Clears every want that has no meaning without this run."""
        self.withdraw([device for device, want in self._current.items() if want.mode not in LASTING])

    def _publish(self, device: str, want: Want) -> None:
        self._link.say(self._link.topics.want(device), want, retain=True)

    def _asked(self, heard: Heard) -> None:
        if isinstance(heard.message, Request) and heard.message.ask == "want":
            self.again(heard.address.device)


def withdraw_leftovers(link: Link, connect: Connect) -> int:
    """Clears the wants to train that a server which was killed left behind; how many there were."""
    cleared = 0
    for topic, payload in read_retained(connect, [link.topics.want("+")]).items():
        try:
            lasting = decode(payload, Want).mode in LASTING
        except ProtocolError:
            lasting = False
        if not lasting:
            link.forget(topic)
            cleared += 1
    return cleared
