"""What one device keeps an eye on while its agent runs: new images, its board, drift, and its budgets; each becomes an event.

A thread looks every so often and delivers; what follows is the agent's decision. New images are counted once they have stopped changing for
one look, so that a picture that is half copied is not read, and lead to a refit at most every `refit_every_s`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from devices.agent.events import DataChanged, Drifted, Event, BudgetChanged, TierChanged
from devices.board import health, usage
from devices.board.health import Health, Readings
from devices.board.usage import Meter
from devices.config import DeviceConfig
from devices.data import sources
from devices.features import drift
from devices.features.child_loader import ChildFeatureLoader
from devices.runtime.device import Device
from edge_fl.errors import EdgeFLError
from edge_fl.wire.messages import Capability

log = logging.getLogger(__name__)
Deliver = Callable[[Event], None]


@dataclass
class DeviceMonitor:
    """Looks at one device's surroundings; `look` once, `run` for as long as the process lives."""

    config: DeviceConfig
    device: Device
    deliver: Deliver
    meter: Meter
    clock: Callable[[], float] = time.monotonic
    readings: Callable[[], Readings] = health.read
    inspect: Callable[[], Capability | None] = lambda: None
    _stamp: str = ""
    _settled: str = ""
    _refit_at_s: float = 0.0
    _health: Health = field(default_factory=Health)
    _told: dict[type, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stamp = self._settled = self._stamp_now()

    def run(self, stopped: threading.Event) -> None:
        """Looks every `watch_s` until `stopped`."""
        while not stopped.wait(self.config.watch_s):
            try:
                self.look()
            except (EdgeFLError, OSError, MemoryError) as error:
                log.warning("%s: watching: %s", self.config.id, error)

    def look(self) -> None:
        """Once around."""
        self._look_at_images()
        self._look_at_board()
        found = drift.measured(Path(self.config.folder))
        self._tell(Drifted(found), told=bool(found))
        why = usage.exceeded(self.meter.update(), self.config.budget)
        self._tell(BudgetChanged(why), told=bool(why))

    def _look_at_images(self) -> None:
        stamp, now_s = self._stamp_now(), self.clock()
        steady, self._stamp = stamp == self._stamp, stamp
        if stamp == self._settled or not steady or now_s < self._refit_at_s:
            return
        self._settled, self._refit_at_s = stamp, now_s + self.config.refit_every_s
        if found := self.inspect():
            before = self.device.state.capability
            self.deliver(DataChanged(replace(found, tier=before.tier)))

    def _look_at_board(self) -> None:
        can = self.device.state.capability
        out_of_memory = self.device.state.why == "out_of_memory"
        if can.tier == "head" and not self._health.why:
            return  # there is nothing to be demoted to
        wrong = health.judge(self.readings(), out_of_memory=out_of_memory)
        was, self._health = self._health, health.follow(self._health, wrong, self.clock())
        if was.why != self._health.why:
            why = self._health.why
            tier, note = ("head", f"head: {why}") if why else ("full", "full: well again")
            self.deliver(TierChanged(replace(can, tier=tier, notes=[note, *can.notes[1:]]), why))

    def _tell(self, event: Event, *, told: object) -> None:
        """Delivers what is news."""
        if self._told.get(type(event), False) != told:
            self._told[type(event)] = told
            self.deliver(event)

    def _stamp_now(self) -> str:
        try:
            return sources.stamp(self.config.data)
        except EdgeFLError:
            return ""


def inspector(
    config: DeviceConfig, device: Device, loader: ChildFeatureLoader
) -> Callable[[], Capability | None]:
    """Counts the data in a child and puts the counts into the device's capability; None when they cannot be read."""

    def inspect() -> Capability | None:
        found, can = loader.inspect(), device.state.capability
        if found.report is None:
            log.warning("%s: %s", config.id, found.trouble)
            return None
        counts = list(found.report.samples_per_class)
        return replace(
            can,
            samples=sum(counts),
            samples_per_class=counts,
            notes=[*can.notes[:1], *found.notes],
        )

    return inspect
