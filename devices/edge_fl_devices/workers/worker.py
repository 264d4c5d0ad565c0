"""Base of the workers, which carry out an agent's jobs in a thread and answer each with an event.

An exception in a job becomes a `Failed` event with a failure word; none ends the agent. The head-only tier is `head`, the full tier `full`,
which `Trainer` loads, with torch, once the board can train.
"""

from __future__ import annotations

import errno
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from edge_fl.blob import Blob
from edge_fl.errors import (
    ArtefactError,
    ChildError,
    DataError,
    DeadlineError,
    InputError,
    KilledError,
    PrivacyError,
    RunError,
)
from edge_fl.failures import Failure
from edge_fl.fields import Tier
from edge_fl.process_limits import return_freed_blocks
from edge_fl.wire import messages
from edge_fl.wire.egress import Egress
from edge_fl.wire.messages import Assignment, Report, SumRequest
from edge_fl_devices.agent.assignments import parcel_for
from edge_fl_devices.agent.effects import Job, Train
from edge_fl_devices.agent.events import Event, Failed, Finished
from edge_fl_devices.agent.state import LIMITS, AgentLimits
from edge_fl_devices.board import usage
from edge_fl_devices.install.fetch import Sink
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store

log = logging.getLogger(__name__)

Material = Mapping[str, bytes] | None
"""What was fetched for a job: metadata files by name, or broadcasts by hash."""


@dataclass(eq=False)
class Worker(ABC):
    """Carries out the jobs of one agent. `perform` runs in any thread, one job at a time; the rest in the runner's thread.

    verifies: the trusted metadata that verify the server's signatures; None: they are not verified.
    """

    device: str
    store: Store
    limits: AgentLimits = field(default=LIMITS, kw_only=True)
    verifies: Trust | None = field(default=None, kw_only=True)

    def boot(self) -> int:
        """Clean up once per process start; return the release that is served, or 0."""
        self.store.tidy()
        return 0

    def installed(self) -> int:
        """Return the release that a head would be fitted on, or 0."""
        current = Slots(self.store.folder / "release").current()
        return current.manifest.release if current else 0

    def unblock(self) -> None:
        """Forget which releases failed here. Raises ArtefactError if the disk fails."""
        Slots(self.store.folder / "release").unblock()

    def sink(self, blob: Blob) -> Sink:
        """Return the destination of the chunks of a release's blob."""
        raise NotImplementedError(f"{type(self).__name__} keeps no releases")

    def offer(self, id: str, request: SumRequest) -> NDArray[np.float64] | None:
        """Return the vector for the secure sum `id`, or None to take no part: then no other sum has it. In any thread, as the next two."""
        return None

    def commit(self, id: str, request: SumRequest, *, leaves: bool) -> None:
        """Record that nothing of the vector offered for this sum may be offered again. Raises if it is not recorded.

        `leaves`: it is about to leave the device; otherwise it may have left in an earlier life of this folder.
        """
        raise NotImplementedError(f"{type(self).__name__} offers nothing")

    def settle(self, id: str, devices: Collection[str]) -> None:
        """Note which devices are in the sum `id`; none if it failed."""
        return

    @abstractmethod
    def perform(self, job: Job, material: Material) -> Event:
        """Carry out a job. May raise anything."""

    def finish(self, assignment: Assignment, report: Report, blob: bytes | None, egress: Egress) -> Finished:
        """Check report and blob against the egress rules and put them into the stored outbox.

        Adds the day's usage as last measured, and the size of report and blob.
        """
        if (used := usage.read(self.store.folder)).day == usage.today():
            report = replace(report, metrics={**report.metrics, **used.numbers})
        egress.require(report, blob)
        report = replace(report, bytes_up=len(messages.encode(report)) + (len(blob) if blob else 0))
        self.store.keep(parcel_for(assignment, report, self.limits), blob)
        return Finished(report)


MakeWorker = Callable[..., Worker]
"""Constructor of `edge_fl_devices.workers.full.FullWorker`, passed as an argument because importing it loads torch."""


def attempt(perform: Callable[[], Event]) -> Event:
    """Return the event of `perform`, or Failed for an exception."""
    try:
        return perform()
    except Exception as error:
        failed = _failed(error)
        if failed.reason == Failure.ERROR and not isinstance(error, ChildError):
            log.exception("unexpected error in a job")
        else:
            log.warning("%s: %s", failed.reason, error)
        return failed


def _failed(error: Exception) -> Failed:
    match error:
        case ArtefactError(why=why):
            return Failed(why or Failure.ARTEFACT, detail=str(error))
        case DeadlineError():
            return Failed(Failure.DEADLINE, detail=str(error))
        case KilledError(signal=signal):
            return Failed(Failure.KILLED, detail=str(error), signal=signal)
        case ChildError():
            return Failed(Failure.ERROR, detail=str(error))
        case DataError():
            return Failed(Failure.NO_DATA, detail=str(error))
        case OSError(errno=errno.ENOSPC):
            return Failed(Failure.ENOSPC, detail=str(error))
        case MemoryError():
            return Failed(Failure.OUT_OF_MEMORY, detail=str(error))
        case PrivacyError():
            return Failed(Failure.BUDGET_EXHAUSTED, detail=str(error))
        case RunError():
            return Failed(Failure.DIVERGED, detail=str(error))
        case InputError():  # a method spec that this version cannot build, or a corrupt one
            return Failed(Failure.BAD_SPEC, detail=str(error))
    return Failed(Failure.ERROR, detail=f"{type(error).__name__}: {error}")


class Trainer:
    """Trains with the worker of `make`, once the board is of the full tier."""

    def __init__(self, make: Callable[[], Worker]) -> None:
        self._make = make
        self._worker: Worker | None = None

    def use_tier(self, tier: str) -> None:
        """Get ready for what a board of this tier does."""
        if tier != Tier.FULL:
            return_freed_blocks()  # torch would allocate more slowly
        elif self._worker is None:
            self._worker = self._make()

    def perform(self, job: Train, material: Material) -> Event:
        """Train, or fail on a board that cannot."""
        return self._worker.perform(job, material) if self._worker else Failed(Failure.UNSUPPORTED_TIER)
