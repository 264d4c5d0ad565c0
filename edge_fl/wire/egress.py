"""The egress manifest: what may leave a device, as data that a machine can read, and the check that nothing else does.

A device says a handful of messages, each with a closed list of fields, and with a report may go parts of a model, by name. Which parts
follows from the method for a device that trains (`edge_fl.methods.contract.egress`), and from the signed release for a head-only one. Images,
labels, features and personal parts are in no list. `require` is called where a report and its parts are put into the outbox, and nowhere
else can parts get out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from edge_fl import metrics
from edge_fl.config import CompressionConfig, PrivacyConfig
from edge_fl.errors import ArtefactError
from edge_fl.heads import auto
from edge_fl.wire import tensors
from edge_fl.wire.messages import MESSAGES, Report, TierName

SAID = ("state", "meta", "rpt", "req", "log", "echo")
"""What a device says, by the kind of its topic; a report's chunks and a claim's request for a certificate come beside them."""

NUMBERS = (
    metrics.GLOBAL_TEST,
    metrics.GLOBAL_VALIDATION,
    metrics.PERSONAL_BEFORE,
    metrics.PERSONAL_AFTER,
    metrics.PERSONAL_VALIDATION_BEFORE,
    metrics.PERSONAL_VALIDATION_AFTER,
    metrics.TEST_SAMPLES,
    metrics.VALIDATION_SAMPLES,
    metrics.TEST_LOST,
    metrics.TEST_GAINED,
    metrics.LATENCY_BEFORE,
    metrics.LATENCY_AFTER,
    metrics.EPSILON,
    metrics.USED_BYTES,
    metrics.USED_CPU,
    metrics.USED_ENERGY,
)
"""The numbers that a report may carry."""


class Egress(Struct, frozen=True, forbid_unknown_fields=True):
    """What may leave a device of one tier: fields by message, numbers in a report, parts by the kind of the report they go with.

    The parts travel under `compression`, and under `privacy` with noise on every number and a count of what they have told.
    """

    tier: TierName
    parts: Mapping[str, list[str]]
    compression: CompressionConfig = CompressionConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    numbers: tuple[str, ...] = NUMBERS
    messages: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {kind: MESSAGES[kind].__struct_fields__ for kind in SAID}
    )

    def require(self, report: Report, blob: bytes | None) -> None:
        """Raises ArtefactError ("refused") for a number or a part that is in no list, or not in its form: then nothing leaves."""
        self._require("number", report.metrics, self.numbers)
        if blob is None:
            return
        self._require("part", tensors.unpack(blob), self.parts.get(report.kind, ()))
        self._require("compression", [report.compression], [self.compression.kind])
        if self.privacy.noise_multiplier and metrics.EPSILON not in report.metrics:
            raise ArtefactError(
                f"egress: an update without {metrics.EPSILON}, expected noise on it, and that counted",
                "refused",
                consequence="nothing was sent",
            )

    def _require(self, what: str, found: Iterable[str], allowed: Iterable[str]) -> None:
        if strange := sorted(set(found) - set(allowed)):
            raise ArtefactError(
                f"egress: {what} {strange[0]!r} may not leave this device, only {', '.join(allowed) or 'none'} may",
                "refused",
                consequence="nothing was sent",
            )


def of_head(uploads: Iterable[str]) -> Egress:
    """What may leave a head-only device under a release that asks for these parts."""
    return Egress("head", {"head": sorted(uploads)}, numbers=(*NUMBERS, *auto.NUMBERS))
