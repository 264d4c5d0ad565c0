"""Monitor of one device while its agent runs: its data, the board's health, drift and budgets become events.

The board is measured in a child before the agent runs. A thread counts the data at its start, and then checks periodically; the agent
decides what follows. New samples count once they have been stable for one interval, so that no half-copied file is used. After a time
without any they lead to a fit at once; while more keep coming the pauses between fits double, from one interval to `refit_every_s`. A count
that fails is a state of the device, and is repeated with growing pauses.
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
from edge_fl.errors import ConfigError, EdgeFLError, KilledError
from edge_fl.failures import Failure
from edge_fl.fields import Tier
from edge_fl.wire.messages import BOARD_NOTES, Capability
from edge_fl_devices.agent.events import (
    BudgetChanged,
    DataChanged,
    Drifted,
    Event,
    Impaired,
    PromiseChecked,
    TierChanged,
)
from edge_fl_devices.board import capabilities, health, usage
from edge_fl_devices.board.health import Health, Readings
from edge_fl_devices.board.usage import Meter
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import first_guesses, record
from edge_fl_devices.data.current import CurrentData
from edge_fl_devices.data.location import Snapshot
from edge_fl_devices.data.record import DataReport
from edge_fl_devices.features import drift
from edge_fl_devices.features.child_loader import ChildFeatureLoader, Inspection
from edge_fl_devices.features.onnx_runtime import Runtime
from edge_fl_devices.remote.log_file import LOCAL
from edge_fl_devices.runtime.device import Device

log = logging.getLogger(__name__)

COUNT_S = 1.0
RETRY_S = 10.0
COUNTING = "counting samples"
"""Note of a capability before the first count: its samples are those of the last one."""

Inspect = Callable[[Snapshot], Capability]
"""Counts the data of a snapshot, and returns the capability with it; with the count before if the data cannot be read.

Raises MemoryError or an EdgeFLError if the counting itself failed.
"""
UNKNOWN_OPSET = 99  # of a board that is not measured: the canary tells what it runs


@dataclass
class DeviceMonitor:
    """Checks one device: `check` once, `run` for the life of the process. `current` gets what it accepts."""

    config: DeviceConfig
    device: Device
    deliver: Callable[[Event], None]
    meter: Meter
    inspect: Inspect
    current: CurrentData
    clock: Callable[[], float] = time.monotonic
    readings: Callable[[], Readings] = health.read
    _last: Snapshot | None = None
    _counted: Snapshot | None = None
    _count_at_s: float = 0.0
    _pause_s: float = 0.0
    _quiet_at_s: float = 0.0
    _failures: int = 0
    _given_up: tuple[Snapshot, int] | None = None
    _impaired: dict[str, str] = field(default_factory=dict)
    _recorded: Capability | None = None
    _health: Health = field(default_factory=Health)
    _delivered: dict[type, object] = field(default_factory=dict)
    _guessed: tuple[int, int] = (0, 0)

    def run(self, stopped: threading.Event) -> None:
        """Count the data at once; then check every `watch_s` until `stopped`, and the count of the samples every COUNT_S.

        With `watch_s` 0 the data are only counted once.
        """
        next_s = self.clock()
        while not stopped.is_set():
            if not self.config.watch_s:
                self._attempt(self._check_images)
                if self._counted is not None:
                    return
            elif self.clock() >= next_s:
                next_s = self.clock() + self.config.watch_s
                self.check()
            else:
                self._attempt(self.check_count)
            stopped.wait(min(self.config.watch_s or COUNT_S, COUNT_S))

    def check(self) -> None:
        """Check everything once and deliver an event for each change; a check that fails is a state, and hinders no other one."""
        for part in (
            self._check_images,
            self._check_health,
            self._check_drift,
            self._check_promise,
            self._check_budget,
        ):
            self._attempt(part)

    def _attempt(self, part: Callable[[], None]) -> None:
        name = part.__name__
        try:
            part()
        except Exception as error:  # whatever it is, the monitor continues
            text = f"{type(error).__name__}: {error}"
            if self._impaired.get(name) != text:
                self._log(f"monitoring: {text}; trying again", error)
            self._impaired[name] = text
        else:
            self._impaired.pop(name, None)
        self._deliver_change(Impaired(Failure.ERROR if self._impaired else ""), bool(self._impaired))

    def check_count(self) -> None:
        """Deliver how the last fit counted the samples, if not as before: a new release brings its class list."""
        known, capability = record.read(Path(self.config.folder)), self.device.state.capability
        if not known.report.samples or known.why or self.device.state.data_problem or self._counted is None:
            return
        found = counted(capability, known.report)
        if found not in (capability, self._recorded):
            self._recorded = found
            self.deliver(DataChanged(found, refit=False))
            for line in known.report.local_notes:
                log.warning("%s: %s", self.config.id, line, extra=LOCAL)

    def _log(self, text: str, error: Exception) -> None:
        """Log a failure; an unexpected one with its traceback."""
        unexpected = not isinstance(error, EdgeFLError | OSError | MemoryError)
        log.warning("%s: %s", self.config.id, text, exc_info=unexpected, extra=LOCAL)

    def _check_images(self) -> None:
        """Count the data if they are others than at the last count; accept them for all workers once they are stable."""
        found = self.current.found()
        stable, self._last = found == self._last, found
        if found == self._counted and stable:
            self.current.accept(found)
            if self.clock() >= self._quiet_at_s:
                self._pause_s = 0.0
        if found == self._counted or self.clock() < self._count_at_s:
            return
        if self._given_up == (found, self.device.state.release):
            return
        if stable or self._counted is None:
            self._count(found)

    def _count(self, found: Snapshot) -> None:
        first, state = self._counted is None, self.device.state
        try:
            capability = self.inspect(found)
        except Exception as error:
            self._fail(error, found)
            return
        self._failures, self._counted, self._given_up = 0, found, None
        if not first:
            self._pause()
        fitted = self.device.worker.store.fitted_data()
        unfitted = state.installed and not state.release and not state.work and capability.samples
        refit = not first or (fitted != found.stamp if fitted else bool(unfitted))
        tier = self.device.state.capability.tier if state.capability.max_opset else capability.tier
        if not first and tier == "head":  # the fit that follows is on these samples
            self.current.accept(found)
        self.deliver(DataChanged(replace(capability, tier=tier), refit=refit))
        if not first:  # the server knows the count before it gets an update on the data
            self.current.accept(found)

    def _pause(self) -> None:
        """Set the pause before the next count of new samples: twice the last one, at most `refit_every_s`; none after a time of that length
        without new samples.
        """
        longest_s, now_s = self.config.refit_every_s, self.clock()
        self._pause_s = min(max(2 * self._pause_s, self.config.watch_s), longest_s)
        self._count_at_s, self._quiet_at_s = now_s + self._pause_s, now_s + longest_s

    def _fail(self, error: Exception, found: Snapshot) -> None:
        """Make the failure of a count the state of the device, and repeat it later: at once it would fail again.

        A child that signals ended as often as work is begun again waits for other data, another release or a restart.
        """
        why, pause_s = record.failure_word(error), RETRY_S * 2.0**self._failures
        if isinstance(error, MemoryError):
            pause_s = self.config.refit_every_s
        self._failures += 1
        self._count_at_s = self.clock() + min(pause_s, max(self.config.refit_every_s, RETRY_S))
        state, then = self.device.state, "trying again"
        if isinstance(error, KilledError) and self._failures >= state.limits.max_kills:
            self._given_up, self._failures = (found, state.release), 0
            then = "not tried again until new data, another release or a restart"
        self._log(f"the data were not counted: {error}; {then}", error)
        if state.data_problem != why:
            notes = state.capability.notes[:BOARD_NOTES]
            self.deliver(DataChanged(replace(state.capability, notes=notes), why))

    def _check_drift(self) -> None:
        score = drift.measured(Path(self.config.folder))
        self._deliver_change(Drifted(score), bool(score))

    def _check_promise(self) -> None:
        """Test the promise again if there are new labels."""
        folder = Path(self.config.folder)
        if (stamp := first_guesses.stamp(folder)) == self._guessed:
            return
        missed = first_guesses.promise_record(first_guesses.read(folder).values()).missed
        self._deliver_change(PromiseChecked(missed), bool(missed))
        self._guessed = stamp

    def _check_budget(self) -> None:
        why = usage.exceeded(self.meter.update(), self.config.budget)
        self._deliver_change(BudgetChanged(why), bool(why))

    def _check_health(self) -> None:
        capability = self.device.state.capability
        out_of_memory = self.device.state.why == Failure.OUT_OF_MEMORY
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


def counted(capability: Capability, report: DataReport) -> Capability:
    """Return the capability with the count of this report."""
    counts = list(report.samples_per_class)[:MAX_CLASSES]
    notes = [*capability.notes[:BOARD_NOTES], *report.notes]
    return replace(capability, samples=report.samples, samples_per_class=counts, notes=notes)


def inspect_board(config: DeviceConfig, loader: ChildFeatureLoader) -> tuple[Inspection | None, str]:
    """Measure the board in a child, without its data: what takes longer with every sample would delay the start.

    Returns None and a failure word if the child failed; the monitor tries again.
    """
    try:
        return loader.inspect_board(), ""
    except (EdgeFLError, MemoryError) as error:
        log.warning("%s: the board was not measured: %s; head-only until it is", config.id, error)
        return None, record.failure_word(error)


def measured(config: DeviceConfig, board: Inspection | None) -> Capability:
    """Return what this machine can do; a board that could not be measured is head-only until then.

    Raises ConfigError if its owner demands more than it can do.
    """
    limit = None if config.tier == "auto" else Tier(config.tier)
    if board is None:
        found = capabilities.measure(folder=Path(config.folder), head=config.head, limit=Tier.HEAD)
        return replace(found, notes=["head: the board is not measured yet", "not measured"])
    capability = capabilities.measure(
        folder=Path(config.folder),
        head=config.head,
        limit=limit,
        onnxruntime=board.runtime.version,
        max_opset=board.runtime.max_opset,
        gflops=board.speed.gflops,
        torch_s=board.speed.torch_s,
    )
    if config.tier == "full" and capability.tier != "full":
        raise ConfigError(
            f"tier full: not on this machine ({capability.notes[0]}); expected torch and enough memory"
        )
    return replace(capability, notes=[*capability.notes, board.measured])


def as_counted_last(config: DeviceConfig, capability: Capability) -> Capability:
    """Add the last count of the data; the monitor counts them once the agent runs."""
    known = counted(capability, record.read(Path(config.folder)).report)
    return replace(known, notes=[*capability.notes, COUNTING])


class Board:
    """The board of a device and its data, as measured last: at the start as `found`, or with the first count of the data.

    use_tier: gets ready for what the board's tier does. show: takes one line about the first count.
    """

    def __init__(
        self,
        config: DeviceConfig,
        found: Inspection | None,
        loader: ChildFeatureLoader,
        use_tier: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        self._config, self._loader, self._use_tier, self._show = config, loader, use_tier, show
        self._first = True
        self.capability = measured(config, found)
        self._runtime = Runtime(self.capability.onnxruntime, self.capability.max_opset or UNKNOWN_OPSET)
        use_tier(self.capability.tier)

    def runtime(self) -> Runtime:
        """Return the board's onnxruntime."""
        return self._runtime

    def inspect(self, capability: Capability, snapshot: Snapshot) -> Capability:
        """Return the agent's `capability` with the count of these data. Raises as `Inspect`."""
        inspection = self._loader.inspect(snapshot)
        if not capability.max_opset:
            found, self._runtime = measured(self._config, inspection), inspection.runtime
            self._use_tier(found.tier)
            capability = replace(
                capability,
                tier=found.tier,
                onnxruntime=found.onnxruntime,
                max_opset=found.max_opset,
                notes=found.notes,
            )
        notes = [capability.notes[0], inspection.measured, *capability.notes[BOARD_NOTES:]]
        capability = replace(capability, notes=notes)
        if inspection.report is None:
            log.warning("%s: %s", self._config.id, inspection.trouble, extra=LOCAL)
            capability = replace(capability, notes=notes[:BOARD_NOTES])
        else:
            for line in inspection.report.local_notes:
                log.warning("%s: %s", self._config.id, line, extra=LOCAL)
            capability = counted(capability, inspection.report)
        if self._first:
            self._show(f"{self._config.id}: {capability.samples} samples to train on")
            self._first = False
        return capability
