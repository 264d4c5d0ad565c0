"""The worker of a device that can do both: it trains while it is full, and fits heads while it is held to head-only."""

from __future__ import annotations

from collections.abc import Mapping

from devices.agent.effects import Job, Train
from devices.agent.events import Event
from devices.install.fetch import Sink
from devices.workers.worker import Worker
from edge_fl.wire.blob import Blob


class HeadAndFullWorker(Worker):
    """Training goes to one worker, releases and heads to the other; both keep their things in the same folder."""

    def __init__(self, full: Worker, head: Worker) -> None:
        super().__init__(full.device, full.store, full.limits)
        self._full, self._head = full, head

    def boot(self) -> int:
        self._full.boot()
        return self._head.boot()

    def sink(self, blob: Blob, *, keep: bool) -> Sink:
        return (self._head if keep else self._full).sink(blob, keep=keep)

    def perform(self, job: Job, material: Mapping[str, bytes] | bytes | None) -> Event:
        return (self._full if isinstance(job, Train) else self._head).perform(job, material)

    def revoke(self) -> None:
        self._full.revoke()
        self._head.revoke()
