"""Monitor of one device while its agent runs: new images, the board's health, drift and budgets become events.

A thread checks periodically; the agent decides what follows. New images count once they have been stable for one interval, so that no
half-copied picture is read, and lead to a refit at most every `refit_every_s`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from edge_fl.config import MAX_CLASSES
from edge_fl.errors import EdgeFLError
from edge_fl.wire.messages import Capability
from edge_fl_devices.agent.events import BudgetChanged, DataChanged, Drifted, Event, TierChanged
from edge_fl_devices.board import health, usage
from edge_fl_devices.board.health import Health, Readings
from edge_fl_devices.board.usage import Meter
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import location, record
from edge_fl_devices.features import drift
from edge_fl_devices.features.child_loader import ChildFeatureLoader
from edge_fl_devices.remote.log_file import LOCAL
from edge_fl_devices.runtime.device import Device

log = logging.getLogger(__name__)

COUNT_S = 1.0
MEASURED = 2  # notes of a capability that are not about its data: the tier, and the board's measurements


@dataclass
class DeviceMonitor:
    """Checks one device: `check` once, `run` for the life of the process. `inspect` measures the data again; None: unreadable."""

    config: DeviceConfig
    device: Device
    deliver: Callable[[Event], None]
    meter: Meter
    clock: Callable[[], float] = time.monotonic
    readings: Callable[[], Readings] = health.read
    inspect: Callable[[], Capability | None] = lambda: None
    _last_stamp: str = ""
    _used_stamp: str = ""
    _refit_at_s: float = 0.0
    _counted: Capability | None = None
    _health: Health = field(default_factory=Health)
    _delivered: dict[type, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._last_stamp = self._used_stamp = self._stamp()
        if self.device.state.data_problem:
            self._used_stamp = ""  # count again

    def run(self, stopped: threading.Event) -> None:
        """Check every `watch_s` until `stopped`; the count of the images every COUNT_S."""
        next_s = self.clock() + self.config.watch_s
        while not stopped.wait(min(self.config.watch_s, COUNT_S)):
            try:
                self.check_count()
                if self.clock() >= next_s:
                    next_s = self.clock() + self.config.watch_s
                    self.check()
            except (EdgeFLError, OSError, MemoryError) as error:
                log.warning("%s: monitoring: %s", self.config.id, error)

    def check(self) -> None:
        """Check everything once and deliver an event for each change."""
        self._check_images()
        self._check_health()
        score = drift.measured(Path(self.config.folder))
        self._deliver_change(Drifted(score), bool(score))
        why = usage.exceeded(self.meter.update(), self.config.budget)
        self._deliver_change(BudgetChanged(why), bool(why))

    def check_count(self) -> None:
        """Deliver how the last fit counted the images, if not as before: a new release brings its class list."""
        known, capability = record.read(Path(self.config.folder)), self.device.state.capability
        counts = list(known.samples.values())[:MAX_CLASSES]
        notes = [*capability.notes[:MEASURED], *known.report.notes]
        found = replace(capability, samples=sum(counts), samples_per_class=counts, notes=notes)
        if counts and not known.why and found not in (capability, self._counted):
            self._counted = found
            self.deliver(DataChanged(found, refit=False))
            for line in known.report.local_notes:
                log.warning("%s: %s", self.config.id, line, extra=LOCAL)

    def _check_images(self) -> None:
        stamp, now_s = self._stamp(), self.clock()
        stable, self._last_stamp = stamp == self._last_stamp, stamp
        if stamp == self._used_stamp or not stable or now_s < self._refit_at_s:
            return
        self._used_stamp, self._refit_at_s = stamp, now_s + self.config.refit_every_s
        try:
            if capability := self.inspect():
                self.deliver(DataChanged(replace(capability, tier=self.device.state.capability.tier)))
        except MemoryError as error:
            log.warning("%s: %s", self.config.id, error)
            self._used_stamp = ""  # count again after `refit_every_s`
            self.deliver(DataChanged(self.device.state.capability, "out_of_memory"))

    def _check_health(self) -> None:
        capability = self.device.state.capability
        out_of_memory = self.device.state.why == "out_of_memory"
        if capability.tier == "head" and not self._health.why:
            return  # head-only from the start: no demotion possible
        problem = health.problem(self.readings(), out_of_memory=out_of_memory)
        before, self._health = self._health, health.update(self._health, problem, self.clock())
        if before.why != self._health.why:
            why = self._health.why
            tier, note = ("head", f"head: {why}") if why else ("full", "full: recovered")
            notes = [note, *capability.notes[1:]]
            self.deliver(TierChanged(replace(capability, tier=tier, notes=notes), why))

    def _deliver_change(self, event: Event, value: object) -> None:
        """Deliver the event if `value` differs from the last one of its type."""
        if self._delivered.get(type(event), False) != value:
            self._delivered[type(event)] = value
            self.deliver(event)

    def _stamp(self) -> str:
        try:
            return location.stamp(self.config.data)
        except EdgeFLError:
            return ""


def inspector(
    config: DeviceConfig, device: Device, loader: ChildFeatureLoader
) -> Callable[[], Capability | None]:
    """Return a function that counts the data in a child and updates the capability; None if they cannot be read.

    The function raises MemoryError if the child runs out of memory.
    """

    def inspect() -> Capability | None:
        inspection, capability = loader.inspect(), device.state.capability
        if inspection.out_of_memory:
            raise MemoryError(inspection.trouble)
        if inspection.report is None:
            log.warning("%s: %s", config.id, inspection.trouble, extra=LOCAL)
            return None
        counts = list(inspection.report.samples_per_class)
        notes = [*capability.notes[:1], *inspection.notes]
        return replace(capability, samples=sum(counts), samples_per_class=counts[:MAX_CLASSES], notes=notes)

    return inspect
