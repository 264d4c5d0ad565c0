"""The states of the protocol at which something dies: each a place in our code, named, and whether it happens before or after it.

`arm` wraps one of them in this process; when the place is reached for the n-th time, the victim is killed as by a power cut: this
process itself, or another one (the broker) by its id.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Point:
    """`where` is "module:Name.attribute"; `late` says that it happens after, not before."""

    where: str
    late: bool = False


SERVER = {
    "round announced": Point("server.mqtt.fleet:MqttFleet._announce", late=True),
    "broadcast on the broker": Point("server.mqtt.fleet:Broadcasts.send", late=True),
    "one device asked": Point("server.mqtt.devices.assignments:Wants.ask", late=True),
    "report judged, not yet written down": Point("server.mqtt.journal:Journal.accept"),
    "report written down, not yet acknowledged": Point("server.mqtt.journal:Journal.accept", late=True),
    "round aggregated, no checkpoint": Point("server.runs.checkpoint:save"),
    "checkpoint half written": Point("server.runs.checkpoint:_stem", late=True),
    "checkpoint written": Point("server.runs.checkpoint:save", late=True),
    "release on the broker, not yet signed": Point("server.release.repository:Repository.publish"),
    "closing step": Point("server.training.rounds:close"),
}
DEVICE = {
    "broadcast fetched": Point("devices.workers.full:FullWorker.perform"),
    "trained, nothing kept": Point("devices.storage.store:Store.keep_own"),
    "personal parts kept, no report": Point("devices.storage.store:Store.keep"),
    "report in the outbox": Point("devices.storage.store:Store.keep", late=True),
    "report sent, not acknowledged": Point("devices.runtime.device:Device._send", late=True),
    "report acknowledged, still in the outbox": Point("devices.storage.store:Store.forget"),
}
POINTS = {**SERVER, **DEVICE}


@dataclass(frozen=True)
class Death:
    """At `point`, for the `nth` time, of this process or of `victim`."""

    point: str
    nth: int = 1
    victim: int = 0


def arm(death: Death | None, done: Callable[[], None] = lambda: None) -> None:
    """Wraps the place in this process; `done` is called just before the kill."""
    if death is None:
        return
    point, reached = POINTS[death.point], 0
    module, _, path = point.where.partition(":")
    *owners, name = path.split(".")
    owner: Any = import_module(module)
    for one in owners:
        owner = getattr(owner, one)
    place = getattr(owner, name)

    @wraps(place)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        nonlocal reached
        reached += 1
        dies = reached == death.nth
        if dies and not point.late:
            kill()
        result = place(*arguments, **keywords)
        if dies and point.late:
            kill()
        return result

    def kill() -> None:
        done()
        os.kill(death.victim or os.getpid(), signal.SIGKILL)

    setattr(owner, name, wrapped)
    for table in vars(import_module(module)).values():  # that hold the place as it was
        if isinstance(table, dict):
            table.update({key: wrapped for key, value in table.items() if value is place})
