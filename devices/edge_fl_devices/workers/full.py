"""The full tier: the method's local update on this device's data. The only module of `devices` that imports torch.

The method is rebuilt from the method spec; broadcast and personal parts are converted between bytes and tensors;
`edge_fl.methods.contract.client.Client` does the rest, exactly as in simulation: results are equal bit for bit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from edge_fl import metrics
from edge_fl.blob import describe
from edge_fl.config import MethodSpec, PrivacyConfig
from edge_fl.data.samples import Samples
from edge_fl.errors import EdgeFLError, PrivacyError, ProtocolError
from edge_fl.failures import Failure
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.batches import EVALUATION_BATCH, as_tensor
from edge_fl.learn.codec import differential_privacy
from edge_fl.learn.pictures import pixels
from edge_fl.learn.tree import Parts, from_arrays, to_arrays
from edge_fl.methods import build_method
from edge_fl.methods.contract import norm, steps, tiers, update_codec
from edge_fl.methods.contract.client import Client
from edge_fl.methods.contract.method import Method
from edge_fl.wire.egress import STATISTICS, of_head
from edge_fl.wire.messages import Assignment, Mode, Report, SumRequest
from edge_fl.wire.tensors import pack, unpack
from edge_fl_devices.agent.assignments import KINDS, MEASURES
from edge_fl_devices.agent.effects import Job, Train
from edge_fl_devices.agent.events import Event, Failed
from edge_fl_devices.data.load import LoadData, usable
from edge_fl_devices.storage.store import OWN_AFTER_PERSONALISING, OWN_AFTER_TRAINING, PRIVACY_FILE
from edge_fl_devices.workers.class_statistics import StatisticsOffers
from edge_fl_devices.workers.worker import Material, Worker

log = logging.getLogger(__name__)

STAGES: dict[Mode, int] = {
    "train": OWN_AFTER_TRAINING,
    "personalise": OWN_AFTER_PERSONALISING,
    "evaluate": OWN_AFTER_PERSONALISING + 1,
    "compare": OWN_AFTER_PERSONALISING,
}
"""Stage of a round by mode: a mode starts from the personal parts of an earlier round or an earlier stage."""

_thread = threading.local()


@dataclass(eq=False)
class FullWorker(Worker):
    """Trains, personalises and evaluates as client `device` on the device's data, with `threads` torch threads.

    `epsilon` is the owner's limit on the epsilon spent, in addition to the run's budget (0: none). `share`: whether it prepares and offers
    class statistics of what it trained on. `data_stamp`: as of `HeadWorker`.
    """

    load_data: LoadData
    _: KW_ONLY
    threads: int = 1
    epsilon: float = 0.0
    share: bool = True
    data_stamp: Callable[[], str] = str

    def __post_init__(self) -> None:
        self._offers = StatisticsOffers(self.store.folder)

    def offer(self, id: str, request: SumRequest) -> NDArray[np.float64] | None:
        if not self.share:
            return None
        of_head(()).require_sum(request.subject)
        if request.subject != STATISTICS:
            return None
        extractor, trained = request.extractor, request.trained
        return self._offers.give(
            id, request.release, request.length, self.data_stamp(), extractor=extractor, trained=trained
        )

    def commit(self, id: str, request: SumRequest, *, leaves: bool) -> None:
        self._offers.commit(id, request.clip, self.device, leaves=leaves)

    def settle(self, id: str, devices: Collection[str]) -> None:
        self._offers.settle(id, added=self.device in devices)

    def perform(self, job: Job, material: Material) -> Event:
        """Rebuild the method, run the assigned stage, store the personal parts, and report."""
        if not isinstance(job, Train):
            return Failed(Failure.UNSUPPORTED_TIER)
        started_s = time.monotonic()
        torch.set_num_threads(self.threads)
        assignment = job.assignment
        method = _build_method(job.spec).at(max(assignment.round, 1))
        if assignment.mode not in MEASURES:
            method = self._with_owner_limit(method)
        update, own = self._run_stage(job, method, _down(assignment, material))
        if own is not None:
            self._keep_own(assignment, own)
        if metrics.PERSONAL_AFTER in update.metrics:
            self.store.keep_measured(dict(update.metrics))
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
        return self.finish(assignment, report, blob, tiers.of_full(method))

    def _with_owner_limit(self, method: Method) -> Method:
        """Tighten the method's privacy budget to the owner's. Raises PrivacyError if it sends updates without noise."""
        if not self.epsilon:
            return method
        privacy = method.privacy
        if method.sent() and not privacy.noise_multiplier:
            raise PrivacyError(
                f"this device's limit is epsilon = {self.epsilon:g}, but the run takes updates without noise",
                consequence="nothing was trained",
            )
        budget = min(privacy.budget or self.epsilon, self.epsilon)
        delta = min(privacy.delta, PrivacyConfig().delta)
        return replace(method, privacy=msgspec.structs.replace(privacy, budget=budget, delta=delta))

    def _run_stage(self, job: Train, method: Method, down: Parts) -> tuple[Update, Parts | None]:
        """Return the update to send, and the new personal parts where the stage changes them."""
        assignment, spec, stamp = job.assignment, job.spec, self.data_stamp()
        data = self.load_data(tuple(spec.classes), spec.input)
        data = usable(data, spec.classes, spec.input, "", "the run")
        batch_size, classes = spec.method.batch_size, len(spec.classes)
        client = Client(self.device, data, classes, batch_size, spec.seed, noise=differential_privacy.secret)
        own = self._own(assignment, method)
        if assignment.mode == "train":
            return client.train(method, assignment.round, down, own)
        if assignment.mode == "personalise":
            done = client.personalise(method, assignment.round, down, own)
            self._prepare_statistics(assignment, method, down, data.train, stamp)
            return done
        measured = (client.compare if assignment.mode == "compare" else client.evaluate)(method, down, own)
        return Update(self.device, len(data.train), {}, measured), None

    def _prepare_statistics(
        self, assignment: Assignment, method: Method, down: Parts, data: Samples, stamp: str
    ) -> None:
        """Prepare what the device may add to a sum of class statistics on the final extractor.

        Nothing where updates have noise, which these do not have, nor where a part of the extractor stays on the device.
        """
        if not (self.share and method.exports) or method.privacy.noise_multiplier or self.epsilon:
            return
        if norm.kept(method, "extractor"):
            return
        with torch.inference_mode():
            batches = as_tensor(data.x).split(EVALUATION_BATCH)
            found = [steps.exported_features(method, down, pixels(batch)) for batch in batches]
        z, y = torch.cat(found).numpy(), np.asarray(data.y)
        trained = f"{assignment.run_id}/{assignment.round}"
        try:
            self._offers.prepare_trained(trained, z[y >= 0], y[y >= 0], method.net.classes, stamp)
        except EdgeFLError as error:
            log.warning("class statistics: %s", error)

    def _own(self, assignment: Assignment, method: Method) -> Parts:
        """Personal parts before this stage. The privacy spent counts over all runs and all attempts: every update was sent."""
        kept = self.store.own(assignment.run_id, assignment.round, STAGES[assignment.mode])
        own = _parts(kept) if kept else steps.start_own(method, self.device)
        spent = self.store.privacy_spent()
        return {**own, **_privacy_part(spent)} if spent is not None and update_codec.PRIVACY in own else own

    def _keep_own(self, assignment: Assignment, own: Parts) -> None:
        """Store the personal parts before anything is sent: a power cut may count an unsent update, but never miss one."""
        if update_codec.PRIVACY in own:
            spent = {update_codec.PRIVACY: own[update_codec.PRIVACY]}
            self.store.keep_privacy_spent(pack(to_arrays(spent)))
        payload = pack(to_arrays(own))
        self.store.keep_own(assignment.run_id, assignment.round, STAGES[assignment.mode], payload)


def _build_method(spec: MethodSpec) -> Method:
    """Build the method, once per thread: torch swaps parameters inside a network while it runs."""
    if getattr(_thread, "spec", None) != spec:
        _thread.spec, _thread.method = spec, build_method(spec)
    method: Method = _thread.method
    return method


def _privacy_part(payload: bytes) -> Parts:
    """Decode the privacy spent. Raises PrivacyError if it is unreadable: that does not mean zero."""
    try:
        spent = unpack(payload)[update_codec.PRIVACY][update_codec.SPENT]
        return from_arrays({update_codec.PRIVACY: {update_codec.SPENT: spent}})
    except (ProtocolError, KeyError) as error:
        reason = error.message if isinstance(error, ProtocolError) else f"no {error}"
        raise PrivacyError(
            f"{PRIVACY_FILE}: the epsilon spent by this device cannot be read ({reason})",
            consequence="nothing was trained",
        ) from error


def _down(assignment: Assignment, material: Material) -> Parts:
    """The broadcast of an assignment; of a comparison the current and the candidate parts."""
    current, candidate = (
        _parts(material[blob.sha256]) if blob and material else {}
        for blob in (assignment.before, assignment.down)
    )
    return steps.paired(current, candidate) if assignment.mode == "compare" else candidate


def _parts(payload: bytes) -> Parts:
    return from_arrays(unpack(payload))
