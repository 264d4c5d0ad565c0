"""What a device does in a worker thread: a `Worker` carries out the jobs that an agent asks for and answers each with an event.

Whatever goes wrong in a job becomes a `Failed` with one of the failure words; nothing that a job raises ends the agent. The head-only
tier is `devices.workers.head`, the full tier `devices.workers.full`.
"""

from __future__ import annotations

import errno
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec.structs import replace

from devices.agent.assignments import parcel_for
from devices.agent.effects import Job
from devices.agent.events import Event, Failed, Finished
from devices.agent.outbox import Parcel
from devices.agent.state import LIMITS, AgentLimits
from devices.board import usage
from devices.data.load import LoadData
from devices.install.fetch import Sink
from devices.storage.store import Store
from edge_fl.errors import ArtefactError, DataError, DeadlineError, InputError, PrivacyError, RunError
from edge_fl.wire import messages
from edge_fl.wire.blob import Assembly, Blob
from edge_fl.wire.egress import Egress
from edge_fl.wire.messages import BUDGET_EXHAUSTED, Assignment, Report

log = logging.getLogger(__name__)

HOPELESS = frozenset({"canary_failed", "unsupported_opset", "refused", "unsupported_tier"})
"""Failure words of artefacts that trying again does not change."""


class MakeWorker(Protocol):
    """Makes the worker of a full device: `devices.workers.full.FullWorker`, handed down from the command line because torch comes with it."""

    def __call__(
        self,
        device: str,
        store: Store,
        load_data: LoadData,
        *,
        threads: int = 1,
        epsilon: float = 0.0,
        limits: AgentLimits = LIMITS,
    ) -> Worker: ...


class Worker(ABC):
    """Carries out the jobs of one agent. `perform` runs in any thread, one job at a time; all else runs in the runner's thread."""

    def __init__(self, device: str, store: Store, limits: AgentLimits = LIMITS) -> None:
        self.device, self.store, self.limits = device, store, limits

    def boot(self) -> int:
        """Once per process start: clears up; the release that is served, or 0."""
        self.store.tidy()
        return 0

    def sink(self, blob: Blob, *, keep: bool) -> Sink:
        """Where the chunks of a fetch go."""
        return Assembly(blob)

    @abstractmethod
    def perform(self, job: Job, material: Mapping[str, bytes] | bytes | None) -> Event:
        """Does it; `material` is what was fetched for it: metadata files by name, or a broadcast. May raise anything."""

    @abstractmethod
    def revoke(self) -> None:
        """The personal head is to be forgotten."""

    def finish(self, assignment: Assignment, report: Report, blob: bytes | None, egress: Egress) -> Finished:
        """Puts the report into the outbox on disk; what may not leave the device never gets there.

        What was used today, as the meter last wrote it down, and the report's own size are added.
        """
        if (used := usage.read(self.store.folder)).day == usage.today():
            report = replace(report, metrics={**report.metrics, **used.numbers})
        egress.require(report, blob)
        report = replace(report, bytes_up=len(messages.encode(report)) + (len(blob) if blob else 0))
        self.store.keep(self.parcel(assignment, report), blob)
        return Finished(report)

    def parcel(self, assignment: Assignment, report: Report) -> Parcel:
        """The report, addressed."""
        return parcel_for(assignment, report, self.limits)


def attempt(perform: Callable[[], Event]) -> Event:
    """What `perform` returns, or a Failed for what it raises."""
    try:
        return perform()
    except Exception as error:
        failed = _failure(error)
        log.log(
            logging.WARNING if failed.reason != "error" else logging.ERROR,
            "%s: %s",
            failed.reason,
            error,
            exc_info=failed.reason == "error",
        )
        return failed


def _failure(error: Exception) -> Failed:
    match error:
        case ArtefactError(why=why):
            return Failed(why or "artefact", final=why in HOPELESS, detail=str(error))
        case DeadlineError():
            return Failed("deadline", detail=str(error))
        case DataError():
            return Failed("no_data", final=True, detail=str(error))
        case OSError(errno=errno.ENOSPC):
            return Failed("enospc", detail=str(error))
        case MemoryError():
            return Failed("out_of_memory", detail=str(error))
        case PrivacyError():
            return Failed(BUDGET_EXHAUSTED, final=True, detail=str(error))
        case RunError():
            return Failed("diverged", final=True, detail=str(error))
        case InputError():  # of a task that this device cannot build: a newer server's, or spoilt on its way
            return Failed("bad_spec", detail=str(error))
    return Failed("error", detail=f"{type(error).__name__}: {error}")
