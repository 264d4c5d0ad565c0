"""Parts that head-only devices send back with their reports: judged like any update, kept until a round's aggregate takes them.

An update made of them holds only what the release asked for, so that its samples weigh in those parts' sums and never in the extractor's.
What comes too late for one aggregate joins the next; what comes for a release that is not the current one counts no longer. A refused
upload does not make its report a bad one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from edge_fl.config import CompressionConfig, PrivacyConfig
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Params, Parts, to_device
from edge_fl.methods.contract.method import Method
from edge_fl.release.manifest import Manifest
from edge_fl.wire.messages import Report
from server.mqtt.devices.roster import Roster
from server.mqtt.updates.round_request import Answer, RoundRequest, Verdict
from server.mqtt.updates.validation import STATISTICS, Expected, expected_of, misshapen

STALE = "upload_stale"
HEADER_BYTES = 64 * 1024


class HeadUpdates:
    """Those of the current release. Reports and chunks come from the receive thread, `take` is called by the round loop.

    `settled` hears each report whose upload has been judged, for or against.
    """

    def __init__(
        self, roster: Roster, settled: Callable[[str, Report], None], torch_device: str = "cpu"
    ) -> None:
        self._roster, self._settled, self._torch_device = roster, settled, torch_device
        self._round_request: RoundRequest | None = None
        self._waiting: dict[str, Update] = {}
        self._lock = threading.Lock()

    def open(self, id: str, manifest: Manifest, method: Method) -> None:
        """From now on uploads with the report `id`, on this release, are taken, and those on the one before no longer."""
        flaw, expected = partial(_flaw, manifest), expected_from(manifest, method)
        with self._lock:
            self._round_request = RoundRequest(
                id, manifest.run_id, manifest.round, "serve", (), expected, self._samples, flaw
            )

    def is_open(self, id: str) -> bool:
        """Whether chunks of the report `id` may come."""
        return self._round_request is not None and self._round_request.id == id

    @property
    def place(self) -> tuple[str, int]:
        """The run and the round of the release whose uploads are taken."""
        return (self._round_request.run_id, self._round_request.round) if self._round_request else ("", 0)

    def take_report(self, device: str, report: Report) -> Verdict | None:
        """The verdict on a report with a blob; None while chunks are missing."""
        with self._lock:
            if self._round_request is not None and self.is_open(report.id):
                return self._noted(self._round_request, self._round_request.take_report(device, report))
        self._settled(device, report)
        return Verdict(report.id, "accepted", STALE)

    def take_chunk(self, device: str, id: str, index: int, payload: bytes) -> Verdict | None:
        """The verdict, if this chunk completed an upload."""
        with self._lock:
            if self._round_request is None or not self.is_open(id) or self._roster.get(device) is None:
                return None
            return self._noted(self._round_request, self._round_request.take_chunk(device, index, payload))

    def take(self) -> list[Update]:
        """What has come since it was last asked, by ascending device; each counts once."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        return [waiting[device] for device in sorted(waiting)]

    def _noted(self, round_request: RoundRequest, verdict: Verdict | None) -> Verdict | None:
        while not round_request.answers.empty():
            self._keep(round_request.answers.get())
        if verdict and verdict.status == "rejected":
            return replace(verdict, status="accepted", reason=f"upload_{verdict.reason}")
        return verdict

    def _keep(self, answer: Answer) -> None:
        self._settled(answer.device, answer.report)
        if answer.counts and answer.parts:
            parts = to_device(answer.parts, self._torch_device)
            self._waiting[answer.device] = Update(answer.device, answer.report.samples, parts)

    def _samples(self, device: str) -> int:
        known = self._roster.get(device)
        return known.capability.samples if known and known.capability else 0


def expected_from(manifest: Manifest, method: Method) -> Expected:
    """What head-only devices may send under a release: the parts that it names, as full clients would send them."""
    plain = replace(method, compression=CompressionConfig(), privacy=PrivacyConfig())  # as these devices send
    expected, named = expected_of(plain, whole=False), manifest.heads.uploads.keys()
    networks = {name: signature for name, signature in expected.networks.items() if name in named}
    classes, dim = len(manifest.classes), manifest.feature_dim
    numbers = dim * dim + 3 * classes * (dim + 1)  # more than any share holds
    max_bytes = 8 * numbers + HEADER_BYTES
    return Expected(networks, frozenset(named - networks.keys()), frozenset(), max_bytes)


def _flaw(manifest: Manifest, parts: Parts, report: Report) -> str:
    """What is wrong with statistics whose shapes no network gives."""
    classes, dim = len(manifest.classes), manifest.feature_dim
    for part, share in manifest.heads.uploads.items():
        if part in parts and share in STATISTICS:
            if wrong := misshapen(parts[part], share, classes, dim):
                return f"{part}: {wrong}"
            if (counted := _counted(parts[part])) and counted != report.samples:
                return f"{part}: counts {counted:g} samples, the report {report.samples}"
    return ""


def _counted(params: Params) -> float:
    return float(params["count"].sum()) if "count" in params and bool((params["count"] >= 0).all()) else 0.0
