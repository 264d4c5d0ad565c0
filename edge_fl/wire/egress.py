"""The egress manifest: a machine-readable list of everything that may leave a device, and its enforcement.

A device sends a few message types with a closed list of fields each, and reports may carry parts of a model, by name. The parts follow from
the method for a full device (`edge_fl.methods.contract.tiers`) and from the signed release for a head-only one. Images, labels, features
and personal parts are in no list. `require` is called where a report and its parts enter the outbox, the only way out for parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from edge_fl import metrics
from edge_fl.config import CompressionConfig, PrivacyConfig
from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.heads import auto
from edge_fl.wire import tensors
from edge_fl.wire.messages import MESSAGES, QUERY_ANSWERS, Report, TierName

SAID = ("state", "meta", "rpt", "req", "log", "echo", "sum_reply", "query_reply")
"""Messages that a device sends, by the kind of their topic; chunks of reports, masked vectors and answers to queries, and
certificate requests, are sent in addition."""

NUMBERS = (
    metrics.GLOBAL_TEST,
    metrics.GLOBAL_VALIDATION,
    metrics.PERSONAL_BEFORE,
    metrics.PERSONAL_AFTER,
    metrics.PERSONAL_LOCAL,
    metrics.FLEET,
    metrics.FLEET_LOST,
    metrics.FLEET_GAINED,
    metrics.PROMISE_LOST,
    metrics.PROMISE_GAINED,
    metrics.OWN_WEIGHT,
    metrics.PERSONAL_VALIDATION_BEFORE,
    metrics.PERSONAL_VALIDATION_AFTER,
    metrics.PERSONAL_VALIDATION_LOCAL,
    metrics.TEST_SAMPLES,
    metrics.TEST_EFFECTIVE,
    metrics.VALIDATION_SAMPLES,
    metrics.TEST_LOST,
    metrics.TEST_GAINED,
    metrics.VALIDATION_LOST,
    metrics.VALIDATION_GAINED,
    metrics.LATENCY_BEFORE,
    metrics.LATENCY_AFTER,
    metrics.EPSILON,
    metrics.USED_BYTES,
    metrics.USED_CPU,
    metrics.USED_ENERGY,
)
"""Numbers that a report may carry; of a full device also those that its method declares."""

HEAD_NUMBERS = (*NUMBERS, *auto.NUMBERS)
"""Numbers that the report of a fitted head may carry."""


STATISTICS = "statistics"
"""Subject of the sums of class statistics (`edge_fl.heads.class_statistics`)."""

SURVIVALS = "survivals"
"""Subject of the sums of how probable labels were to a device's heads (`edge_fl.heads.promise`)."""

SUMS = {
    SURVIVALS: ("two histograms of how probable its labels were to its heads, each of sum 1",),
    STATISTICS: (
        "counts of labels",
        "sums of centred features",
        "their second moment, projected",
        "the centre of the features",
    ),
}
"""Content of the vectors that a device may add to a sum over devices, by the sum's subject."""


def sharing(
    device: str = "this device", *, uploads: bool = True, minimum: int = 5, certified: bool = True
) -> tuple[str, str]:
    """What leaves a device for the sake of the others, as a title and a sentence, which also says how to change it.

    `uploads` and `minimum` are its owner's settings: whether it takes part in sums, and in those of how many devices at least. certified:
    whether the device has a certificate, without which only a recipe that says so collects sums.
    """
    if not uploads:
        said = "numbers about its own head alone; uploads = false in its settings keeps it out of all sums"
    elif certified:
        said = (
            f"class statistics, in masked sums over at least {minimum} devices, and in another one how probable its labels were to its"
            " heads; never a picture, or the features of one by themselves. uploads = false in its settings switches this off"
        )
    else:
        said = (
            "numbers about its own head alone, since it has no certificate; class statistics only where a recipe asks for them without"
            f' ([statistics] sums = "plain" or "masked"), in sums over at least {minimum} devices. uploads = false in its settings'
            " keeps it out of these, too"
        )
    return f"what leaves {device} for others", said


ANSWERS = {what: kind.__struct_fields__ for what, kind in QUERY_ANSWERS.items()}
"""Fields of the answers to an operator's queries, by `Query.what`; none are sent where the owner has switched `remote_logs` off."""

SETTINGS = tuple(
    """tier head seed test_fraction validation_fraction head_budget_s balanced keep policy watch_s
    refit_every_s guard threads uploads epsilon precision latency_ms remote_logs remote_settings bits
    cross_validate_below promise false_alarm broker.host broker.port broker.fleet sums.minimum
    sums.threshold sums.clip sums.noise_multiplier budget.megabytes budget.cpu_s budget.kilojoules
    budget.watts capture.every_s capture.max_pictures capture.max_mb""".split()
)
"""Settings of a device that a diagnostics bundle contains: no folders, class names, sources or addresses with passwords."""


class Egress(Struct, frozen=True, forbid_unknown_fields=True):
    """What may leave a device of one tier: fields by message, numbers in a report, parts by the kind of their report.

    Parts are sent with `compression`; under `privacy` they are noisy and the report counts the epsilon spent. `sums`: what vectors for sums
    over devices contain, by subject; with a certificate only masked ones are sent (docs/class-statistics.md). `answers`: fields of the
    answers to queries, by kind; `settings`: names of the settings in a diagnostics bundle.
    """

    tier: TierName
    parts: Mapping[str, list[str]]
    compression: CompressionConfig = CompressionConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    numbers: tuple[str, ...] = NUMBERS
    sums: Mapping[str, tuple[str, ...]] = {}
    answers: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: ANSWERS)
    settings: tuple[str, ...] = SETTINGS
    messages: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {kind: MESSAGES[kind].__struct_fields__ for kind in SAID}
    )

    def require(self, report: Report, blob: bytes | None) -> None:
        """Raise ArtefactError ("rejected") for a number or part that is not listed, or not in the required form."""
        self._require("number", report.metrics, self.numbers)
        if blob is None:
            return
        self._require("part", tensors.unpack(blob), self.parts.get(report.kind, ()))
        self._require("compression", [report.compression], [self.compression.kind])
        if self.privacy.noise_multiplier and metrics.EPSILON not in report.metrics:
            raise ArtefactError(
                f"egress: update without {metrics.EPSILON}, expected noise and its epsilon",
                Failure.REJECTED,
                consequence="nothing was sent",
            )

    def require_sum(self, subject: str) -> None:
        """Raise ArtefactError ("rejected") unless a device of this tier may add to sums of this subject."""
        self._require("sum of", [subject], self.sums)

    def _require(self, what: str, names: Iterable[str], allowed: Iterable[str]) -> None:
        if unlisted := sorted(set(names) - set(allowed)):
            raise ArtefactError(
                f"egress: {what} {unlisted[0]!r} may not leave this device, only {', '.join(allowed) or 'none'} may",
                Failure.REJECTED,
                consequence="nothing was sent",
            )


def of_head(uploads: Iterable[str]) -> Egress:
    """Egress of a head-only device under a release that requests these parts."""
    return Egress("head", {"head": sorted(uploads)}, numbers=HEAD_NUMBERS, sums=SUMS)
