"""The worker of a full device: it trains, and while demoted to head-only it installs releases and fits heads."""

from __future__ import annotations

from edge_fl.wire.blob import Blob
from edge_fl_devices.agent.effects import Job, Train
from edge_fl_devices.agent.events import Event
from edge_fl_devices.install.fetch import Sink
from edge_fl_devices.workers.worker import Material, Worker


class HeadAndFullWorker(Worker):
    """Delegates training to `full`, releases and heads to `head`; both use the same folder."""

    def __init__(self, full: Worker, head: Worker) -> None:
        super().__init__(full.device, full.store, limits=full.limits)
        self._full, self._head = full, head

    def boot(self) -> int:
        self._full.boot()
        return self._head.boot()

    def sink(self, blob: Blob, *, keep: bool) -> Sink:
        return (self._head if keep else self._full).sink(blob, keep=keep)

    def perform(self, job: Job, material: Material) -> Event:
        return (self._full if isinstance(job, Train) else self._head).perform(job, material)
