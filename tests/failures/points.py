"""Points of the protocol at which a process is killed: named functions, before or after their call.

`arm` wraps one of them in this process. At its n-th call the victim gets SIGKILL: this process, or another one (the broker) by its id.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Point:
    """A function as "module:Name.attribute"; `late`: after its call, not before."""

    where: str
    late: bool = False


SERVER = {
    "round announced": Point("edge_fl_server.mqtt.device_clients:DeviceClients._announce_round", late=True),
    "broadcast on the broker": Point("edge_fl_server.mqtt.device_clients:SharedBlobs.send", late=True),
    "one device assigned": Point("edge_fl_server.mqtt.devices.assignments:Assignments.assign", late=True),
    "report validated, not yet stored": Point("edge_fl_server.mqtt.journal:Journal.accept"),
    "report stored, not yet acknowledged": Point("edge_fl_server.mqtt.journal:Journal.accept", late=True),
    "round aggregated, no checkpoint": Point("edge_fl_server.runs.checkpoint:save"),
    "checkpoint half written": Point("edge_fl_server.runs.checkpoint:_stem", late=True),
    "checkpoint written": Point("edge_fl_server.runs.checkpoint:save", late=True),
    "release on the broker, not yet signed": Point("edge_fl_server.release.repository:Repository.publish"),
    "final personalisation": Point("edge_fl_server.training.rounds:final_personalisation"),
}
DEVICE = {
    "broadcast fetched": Point("edge_fl_devices.workers.full:FullWorker.perform"),
    "trained, nothing kept": Point("edge_fl_devices.storage.store:Store.keep_own"),
    "personal parts kept, no report": Point("edge_fl_devices.storage.store:Store.keep"),
    "report in the outbox": Point("edge_fl_devices.storage.store:Store.keep", late=True),
    "report sent, not acknowledged": Point("edge_fl_devices.runtime.device:Device._send", late=True),
    "report acknowledged, still in the outbox": Point("edge_fl_devices.storage.store:Store.forget"),
}
POINTS = {**SERVER, **DEVICE}


@dataclass(frozen=True)
class Death:
    """Kill this process, or the process `victim`, at the `nth` call of `point`."""

    point: str
    nth: int = 1
    victim: int = 0


def located(point: Point) -> tuple[Any, str]:
    """The owner of a point's function and its name there. Raises AttributeError, ImportError."""
    module, _, path = point.where.partition(":")
    *owners, name = path.split(".")
    owner: Any = import_module(module)
    for inner in owners:
        owner = getattr(owner, inner)
    return owner, name


def arm(death: Death | None, done: Callable[[], None] = lambda: None) -> None:
    """Wrap the point's function in this process; `done` is called just before the kill."""
    if death is None:
        return
    point, reached = POINTS[death.point], 0
    owner, name = located(point)
    original = getattr(owner, name)

    @wraps(original)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        nonlocal reached
        reached += 1
        dies = reached == death.nth
        if dies and not point.late:
            kill()
        result = original(*arguments, **keywords)
        if dies and point.late:
            kill()
        return result

    def kill() -> None:
        done()
        os.kill(death.victim or os.getpid(), signal.SIGKILL)

    setattr(owner, name, wrapped)
    for table in vars(import_module(original.__module__)).values():  # dispatch tables that hold the original
        if isinstance(table, dict):
            table.update({key: wrapped for key, value in table.items() if value is original})
