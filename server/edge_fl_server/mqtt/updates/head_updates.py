"""Head updates: parts that head-only devices send with their reports, validated like other updates and kept until the next aggregation.

A head update contains only the parts that the release requests, so that its samples weigh in those parts' sums and never in the
extractor's. Head updates that are late for one aggregation join the next; those on an earlier release are dropped. A rejected head update
does not reject its report.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from edge_fl.config import CompressionConfig, PrivacyConfig
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts, to_device
from edge_fl.methods.contract.method import Method
from edge_fl.release.manifests import Manifest
from edge_fl.wire.egress import HEAD_NUMBERS
from edge_fl.wire.messages import Report
from edge_fl_server.mqtt.devices.roster import Roster
from edge_fl_server.mqtt.updates.round_request import Response, RoundRequest, UpdateVerdict
from edge_fl_server.mqtt.updates.validation import (
    STATISTICS,
    Expected,
    Validator,
    expected_of,
    require_statistic,
)

STALE = "upload_stale"
HEADER_BYTES = 64 * 1024


class HeadUpdates:
    """Head updates on the current release. Reports and chunks arrive on the receive thread, `take` is called by the round loop.

    `on_report` receives each report whose head update has been validated, accepted or not.
    """

    def __init__(
        self, roster: Roster, on_report: Callable[[str, Report], None], torch_device: str = "cpu"
    ) -> None:
        self._roster, self._on_report, self._torch_device = roster, on_report, torch_device
        self._round_request: RoundRequest | None = None
        self._waiting: dict[str, Update] = {}
        self._lock = threading.Lock()

    def open(self, id: str, manifest: Manifest, method: Method) -> None:
        """Take head updates with the report `id` on this release from now on, and no longer those on earlier ones."""
        validator = Validator(
            expected_head_update(manifest, method), partial(_check_statistics, manifest), self._roster.samples
        )
        with self._lock:
            self._round_request = RoundRequest(
                id, manifest.run_id, manifest.round, "serve", cohort=(), validator=validator
            )

    def is_open(self, id: str) -> bool:
        """Whether chunks of the report `id` are taken."""
        return self._round_request is not None and self._round_request.id == id

    @property
    def run_and_round(self) -> tuple[str, int]:
        """The run and round of the current release."""
        return (self._round_request.run_id, self._round_request.round) if self._round_request else ("", 0)

    def take_report(self, device: str, report: Report) -> UpdateVerdict | None:
        """Take a report with a blob -> the verdict; None while chunks are missing."""
        with self._lock:
            if self._round_request is not None and self.is_open(report.id):
                return self._conclude(self._round_request, self._round_request.take_report(device, report))
        self._on_report(device, report)
        return UpdateVerdict(report.id, "accepted", STALE)

    def take_chunk(self, device: str, id: str, index: int, payload: bytes) -> UpdateVerdict | None:
        """Take a chunk -> the verdict if it completed a head update."""
        with self._lock:
            if self._round_request is None or not self.is_open(id) or self._roster.get(device) is None:
                return None
            return self._conclude(self._round_request, self._round_request.take_chunk(device, index, payload))

    def take(self) -> list[Update]:
        """The head updates since the last call, by ascending device; each counts once."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        return [waiting[device] for device in sorted(waiting)]

    def _conclude(self, round_request: RoundRequest, verdict: UpdateVerdict | None) -> UpdateVerdict | None:
        while not round_request.responses.empty():
            self._keep(round_request.responses.get())
        if verdict and verdict.status == "rejected":
            return replace(verdict, status="accepted", reason=f"upload_{verdict.reason}")
        return verdict

    def _keep(self, response: Response) -> None:
        self._on_report(response.device, response.report)
        if response.counts and response.parts:
            parts = to_device(response.parts, self._torch_device)
            self._waiting[response.device] = Update(response.device, response.report.samples, parts)


def expected_head_update(manifest: Manifest, method: Method) -> Expected:
    """The permitted head updates on a release: the parts that it names, as full clients would send them."""
    plain = replace(
        method, compression=CompressionConfig(), privacy=PrivacyConfig()
    )  # unused by head-only devices
    expected, named = expected_of(plain, whole=False), manifest.heads.uploads.keys()
    networks = {name: signature for name, signature in expected.networks.items() if name in named}
    classes, dim = len(manifest.classes), manifest.feature_dim
    numbers = dim * dim + 3 * classes * (dim + 1)  # more than any statistic has
    max_bytes = 8 * numbers + HEADER_BYTES
    return Expected(
        networks, frozenset(named - networks.keys()), frozenset(), max_bytes, numbers=HEAD_NUMBERS
    )


def _check_statistics(manifest: Manifest, parts: Parts, report: Report) -> None:
    """Check shapes, values and sample counts of statistics. Raises RejectedError."""
    size = len(manifest.classes), manifest.feature_dim
    for part, kind in manifest.heads.uploads.items():
        if part in parts and kind in STATISTICS:
            require_statistic(part, parts[part], kind, size, report.samples)
