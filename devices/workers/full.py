"""The full tier: the method's own local update on this device's data, in torch. The only module of the devices that imports it.

The method is rebuilt from the task's spec, the broadcast and the personal parts are turned from bytes into parts and back, and
`edge_fl.methods.contract.client.Client` does the rest, exactly as in the server's simulation: the results are equal to the bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import torch

from devices.agent.assignments import KINDS
from devices.agent.effects import Job, Train
from devices.agent.events import Event, Failed
from devices.agent.state import LIMITS, AgentLimits
from devices.data.load import LoadData
from devices.storage.store import OWN_AFTER_PERSONALISING, OWN_AFTER_TRAINING, Store
from devices.workers.worker import Worker
from edge_fl.config import MethodSpec, PrivacyConfig
from edge_fl.data.samples import Samples
from edge_fl.errors import DataError, PrivacyError, ProtocolError
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.codec import privacy as private
from edge_fl.learn.tree import Parts, from_arrays, to_arrays
from edge_fl.methods import build_method
from edge_fl.methods.contract import egress, steps, update_codec
from edge_fl.methods.contract.client import Client
from edge_fl.methods.contract.method import Method
from edge_fl.wire.blob import describe
from edge_fl.wire.messages import Assignment, Mode, Report
from edge_fl.wire.tensors import pack, unpack

STAGES: dict[Mode, int] = {
    "train": OWN_AFTER_TRAINING,
    "personalise": OWN_AFTER_PERSONALISING,
    "evaluate": OWN_AFTER_PERSONALISING + 1,
}
"""Which personal parts a mode starts from: those left by an earlier round, or an earlier stage of this one."""

_thread = threading.local()


class FullWorker(Worker):
    """Trains, personalises and evaluates as client `device` on the device's data. Torch uses `threads` threads.

    `epsilon` is the most that its owner lets updates tell, whatever a task's budget is (0: no limit of the owner's).
    """

    def __init__(
        self,
        device: str,
        store: Store,
        load_data: LoadData,
        *,
        threads: int = 1,
        epsilon: float = 0.0,
        limits: AgentLimits = LIMITS,
    ) -> None:
        super().__init__(device, store, limits)
        self._load_data, self._threads, self._epsilon = load_data, threads, epsilon

    def perform(self, job: Job, material: Mapping[str, bytes] | bytes | None) -> Event:
        if not isinstance(job, Train) or isinstance(material, Mapping):
            return Failed("unsupported_tier", final=True)
        started_s = time.monotonic()
        torch.set_num_threads(self._threads)
        assignment = job.assignment
        method = _method(job.spec).at(max(assignment.round, 1))
        if assignment.mode != "evaluate":
            method = self._held_to_limit(method)
        update, own = self._run(job, method, _parts(material))
        if own is not None:
            self._keep(assignment, own)
        blob = pack(to_arrays(update.parts)) if update.parts else None
        report = Report(
            assignment.id,
            KINDS[assignment.mode],
            job.boot,
            update.samples,
            dict(update.metrics),
            blob=describe(blob) if blob else None,
            compression=method.compression.kind if blob else "none",
            seconds=time.monotonic() - started_s,
            bytes_down=job.bytes_down,
        )
        return self.finish(assignment, report, blob, egress.of_full(method))

    def revoke(self) -> None:
        """A full device has no head of its own."""

    def _held_to_limit(self, method: Method) -> Method:
        """The method under the owner's limit too. Raises PrivacyError for one that sends updates without noise."""
        if not self._epsilon:
            return method
        privacy = method.privacy
        if method.sent() and not privacy.noise_multiplier:
            raise PrivacyError(
                f"epsilon = {self._epsilon:g} is this device's limit, the task takes updates without noise; nothing was trained"
            )
        budget = min(privacy.budget or self._epsilon, self._epsilon)
        delta = min(privacy.delta, PrivacyConfig().delta)
        return replace(method, privacy=msgspec.structs.replace(privacy, budget=budget, delta=delta))

    def _run(self, job: Train, method: Method, down: Parts) -> tuple[Update, Parts | None]:
        """What goes up, and the new personal parts where there are any."""
        assignment, spec = job.assignment, job.spec
        data = self._load_data(tuple(spec.classes), spec.input)
        _require_usable(data.train, spec)
        batch_size, classes = spec.method.batch_size, len(spec.classes)
        client = Client(self.device, data, classes, batch_size, spec.seed, noise=private.secret)
        own = self._own(assignment, method)
        if assignment.mode == "train":
            return client.train(method, assignment.round, down, own)
        if assignment.mode == "personalise":
            return client.personalise(method, assignment.round, down, own)
        return Update(self.device, len(data.train), {}, client.evaluate(method, down, own)), None

    def _own(self, assignment: Assignment, method: Method) -> Parts:
        """The personal parts as they enter a step. What updates have told counts over all tasks, and attempts at one round: all left."""
        kept = self.store.own(assignment.run_id, assignment.round, STAGES[assignment.mode])
        own = _parts(kept) if kept else steps.start_own(method, self.device)
        return {**own, **_ledger(self.store.ledger())} if update_codec.LEDGER in own else own

    def _keep(self, assignment: Assignment, own: Parts) -> None:
        """Before anything leaves: an update that a power cut stops has been counted, never the other way round."""
        if update_codec.LEDGER in own:
            self.store.keep_ledger(pack(to_arrays({update_codec.LEDGER: own[update_codec.LEDGER]})))
        self.store.keep_own(
            assignment.run_id, assignment.round, STAGES[assignment.mode], pack(to_arrays(own))
        )


def _require_usable(train: Samples, spec: MethodSpec) -> None:
    if not len(train):
        raise DataError("no training samples on this device")
    if train.shape != spec.input.shape or int(train.y.max()) >= len(spec.classes):
        raise DataError(
            f"images {list(train.shape)} with labels up to {train.y.max()}, the task takes {list(spec.input.shape)}"
            f" and {len(spec.classes)} classes"
        )


def _method(spec: MethodSpec) -> Method:
    """The method of a task, built once per thread: torch swaps parameters inside a network while it runs."""
    if getattr(_thread, "spec", None) != spec:
        _thread.spec, _thread.method = spec, build_method(spec)
    method: Method = _thread.method
    return method


def _ledger(payload: bytes | None) -> Parts:
    """What updates have told. Raises PrivacyError where that cannot be read: it is not nothing."""
    if payload is None:
        return {}
    try:
        ledger = unpack(payload)[update_codec.LEDGER][update_codec.SPENT]
        return from_arrays({update_codec.LEDGER: {update_codec.SPENT: ledger}})
    except (ProtocolError, KeyError) as error:
        raise PrivacyError(
            f"privacy.safetensors: what this device's updates have told cannot be read ({error}); nothing is trained"
        ) from error


def _parts(payload: bytes | None) -> Parts:
    return from_arrays(unpack(payload)) if payload else {}
