"""Validation of reports and updates: parts, names, shapes, dtypes, finiteness and sample counts, against the method's declaration.

The shapes of shared parts follow from the method's network, so a tensor of another shape never reaches an aggregate. Statistics
(prototypes, sums) must have the shapes of their kind, plausible values, and counts that sum to the report's samples. Other parts without
a network are aggregated on trial: an update alone must aggregate to parts of the right shapes.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from msgspec import Struct

from edge_fl.blob import MAX_BLOB_BYTES
from edge_fl.config import MethodSpec
from edge_fl.errors import EdgeFLError, ProtocolError
from edge_fl.failures import Failure
from edge_fl.fields import MAX_SAMPLES
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import BUFFER, Params, Parts, from_arrays, to_arrays
from edge_fl.methods.contract import steps, update_codec
from edge_fl.methods.contract.method import Method
from edge_fl.methods.contract.tiers import of_full
from edge_fl.metrics import EPSILON, is_plausible
from edge_fl.wire import tensors
from edge_fl.wire.egress import NUMBERS
from edge_fl.wire.messages import MAX_JSON_BYTES, Mode, Report
from edge_fl.wire.tensors import Signature
from edge_fl_server.mqtt.device_packets import one_line

HEADER_BYTES = 1024 * 1024
STATISTICS_BYTES = 64 * 1024 * 1024
MAX_DOWN_BYTES = (
    4 * MAX_BLOB_BYTES
)  # received for one report: a release, or two models of a round, and what came twice
MAX_STEPS = 10**6  # training steps of one update, which counters such as num_batches_tracked may grow by
VARIANCE = "running_var"
MAX_STATISTIC = (
    1e6  # largest magnitude of a class mean or spread, and of a sum per sample: features up to 1000
)


Shapes = Mapping[str, tuple[int, ...]]
STATISTIC_KINDS = {"prototypes": "class_means", "sums": "ridge_sums", "spread": "spread"}
"""Kinds of the methods' parts that are statistics."""
PartsCheck = Callable[[Parts, Report], None]
"""Check parts that have the right names. Raises RejectedError."""


def _class_means(params: Params, classes: int, dim: int) -> Shapes:
    owned = int((params["count"] > 0).sum()) if "count" in params else classes
    return {"mean": (owned, dim), "count": (classes,)}


STATISTICS: Mapping[str, Callable[[Params, int, int], Shapes]] = {
    "class_means": _class_means,
    "ridge_sums": lambda params, classes, dim: {"gram": (dim, dim), "moment": (dim, classes)},
    "spread": lambda params, classes, dim: {"V": (), "H": (classes, dim)},
}
"""The shapes of a statistic's tensors by its kind (`edge_fl.heads.plan.HeadUpdateKind`), for C classes and d features."""


@dataclass(frozen=True)
class Expected:
    """The permitted content of an update: tensors of parts with a network, names of parts without one, and required parts.

    `compression` is the requested one; a `private` report must contain the epsilon spent. `numbers` are the metrics
    that a report may carry.
    """

    networks: Mapping[str, Signature]
    statistics: frozenset[str]
    required: frozenset[str]
    max_bytes: int
    compression: str = "none"
    private: bool = False
    numbers: tuple[str, ...] = NUMBERS


class UpdateTerms(Struct, frozen=True):
    """Further terms of a round request: a part's norm may be at most `max_growth` * (1 + its norm in the broadcast); 0: any norm.

    `counters` are the lowest and the highest value of the broadcast's integer buffers (`counter_range`).
    """

    spec: MethodSpec
    norms: dict[str, float]
    max_growth: float
    counters: tuple[int, int] = (0, 0)


class RejectedError(EdgeFLError):
    """A rejected report or update; `reason` is the word in its acknowledgement, the message holds the details."""

    def __init__(self, reason: Failure, detail: str = "") -> None:
        super().__init__(one_line(f"{reason}: {detail}" if detail else reason))
        self.reason = reason


@dataclass(frozen=True)
class Validator:
    """All checks of the reports on one round request. `samples`: the announced samples of a device (0: unknown)."""

    expected: Expected
    check_parts: PartsCheck = lambda parts, report: None
    samples: Callable[[str], int] = lambda device: 0

    @classmethod
    def of(cls, method: Method, mode: Mode, terms: UpdateTerms, samples: Callable[[str], int]) -> "Validator":
        """The checks of a round request to train with a method, or to measure."""
        return cls(expected_of(method, whole=mode == "train"), parts_check(method, terms), samples)

    def check_report(self, report: Report, kind: str, device: str) -> None:
        """Check all of a report but its blob. Raises RejectedError."""
        expected, max_samples = self.expected, self.samples(device) or MAX_SAMPLES
        if report.kind != kind:
            raise RejectedError(Failure.WRONG_KIND, f"{report.kind!r}, expected {kind!r}")
        require_numbers(report, expected.numbers)
        if report.error:
            return
        if not 0 < report.samples <= max_samples:
            raise RejectedError(Failure.SAMPLES, f"{report.samples}, expected 1 to {max_samples}")
        if report.blob is None:
            if expected.required:
                raise RejectedError(Failure.NO_PARTS, f"expected {', '.join(sorted(expected.required))}")
            return
        if report.blob.bytes > expected.max_bytes:
            raise RejectedError(Failure.TOO_LARGE, f"{report.blob.bytes} bytes, at most {expected.max_bytes}")
        if report.compression != expected.compression:
            raise RejectedError(
                Failure.COMPRESSION, f"{report.compression!r}, requested {expected.compression!r}"
            )
        if expected.private and EPSILON not in report.metrics:
            raise RejectedError(Failure.PRIVACY, f"an update without {EPSILON}")

    def parts(self, payload: bytes, report: Report) -> Parts:
        """Unpack and check the parts of an update. Raises RejectedError."""
        parts = parts_of(payload, self.expected)
        self.check_parts(parts, report)
        return parts


def require_numbers(report: Report, allowed: Iterable[str]) -> None:
    """Raise RejectedError for a metric that is not declared or not plausible (`edge_fl.metrics.is_plausible`), or of work that failed.

    So too for more bytes than a report can have, or than a device receives for one, because they are summed over the fleet. Counts are
    not compared with those that the device announced: it may have added or deleted pictures since.
    """
    if report.error and report.metrics:
        raise RejectedError(Failure.METRICS, f"{min(report.metrics)!r} of work that failed ({report.error})")
    if undeclared := sorted(report.metrics.keys() - set(allowed)):
        raise RejectedError(Failure.METRICS, f"{undeclared[0]!r} is not declared")
    for name, value in report.metrics.items():
        if not is_plausible(name, value):
            raise RejectedError(Failure.METRICS, f"{name}: {value:g} is out of range")
    if report.samples > MAX_SAMPLES:
        raise RejectedError(Failure.SAMPLES, f"{report.samples}, expected at most {MAX_SAMPLES}")
    own = MAX_JSON_BYTES + (report.blob.bytes if report.blob else 0)
    for name, size, most in (
        ("bytes_up", report.bytes_up, own),
        ("bytes_down", report.bytes_down, MAX_DOWN_BYTES),
    ):
        if size > most:
            raise RejectedError(Failure.METRICS, f"{name}: {size}, expected at most {most}")


def expected_of(method: Method, *, whole: bool) -> Expected:
    """The permitted updates of a method's clients; `whole` requires every exported part, as after a local update."""
    down, up = update_codec.untrained(method)
    sent, _ = update_codec.sent(method, down, up, update_codec.own_at_start(method), seed=0)
    networks = {name: tensors.signature({name: array}) for name, array in to_arrays(sent).items()}
    statistics = frozenset(method.sent()) - networks.keys()
    size = sum(8 * math.prod(shape) for signature in networks.values() for _, shape in signature.values())
    return Expected(
        networks,
        statistics,
        frozenset(method.exports) & networks.keys() if whole else frozenset(),
        max_bytes=2 * size + HEADER_BYTES + (STATISTICS_BYTES if statistics else 0),
        compression=method.compression.kind,
        private=method.privacy.noise_multiplier > 0,
        numbers=of_full(method).numbers,
    )


def parts_check(method: Method, terms: UpdateTerms) -> PartsCheck:
    """A check of the shapes of statistics, of norms and buffers beyond the terms, and of parts that do not aggregate."""
    classes, dim = method.net.classes, method.net.feature_dim
    on_trial = frozenset(method.sent()) - method.net.parts.keys() - STATISTIC_KINDS.keys()
    coded = method.compression.kind != "none"
    down = update_codec.untrained(method)[0] if coded else {}  # in place of the broadcast

    def check(parts: Parts, report: Report) -> None:
        try:
            parts = update_codec.received(method, down, parts)
        except ProtocolError as error:
            raise RejectedError(Failure.TENSORS, error.message) from error
        for name, params in parts.items():
            if kind := STATISTIC_KINDS.get(name):
                require_statistic(name, params, kind, (classes, dim), report.samples)
            limit = terms.max_growth * (terms.norms.get(name, 0.0) + 1.0)
            if terms.max_growth and name in method.net.parts and (value := norm(params)) > limit:
                raise RejectedError(Failure.NORM, f"{name}: norm {value:.3g}, at most {limit:.3g}")
            require_buffers(name, params, terms.counters, whole=name in method.net.parts)
        if on_trial & parts.keys():
            _require_aggregation(method, parts, report)

    return check


def require_statistic(name: str, params: Params, kind: str, size: tuple[int, int], samples: int) -> None:
    """Raise RejectedError for a statistic of C classes and d features (`size`) with other shapes than those of its kind, with values that
    no correct device computes, or with counts that do not sum to `samples`.
    """
    shapes = {key: tuple(tensor.shape) for key, tensor in params.items()}
    if shapes != (expected := STATISTICS[kind](params, *size)):
        raise RejectedError(Failure.PARTS, f"{name}: {shapes}, expected {dict(expected)}")
    if "count" in params:
        counted, least = float(params["count"].sum()), float(params["count"].min())
        if counted != samples or least < 0:
            raise RejectedError(Failure.PARTS, f"{name}: {counted:g} samples, the report {samples}")
    limit = MAX_STATISTIC * (samples if kind == "ridge_sums" else 1)
    for key, tensor in params.items():
        largest = float(tensor.abs().max()) if key != "count" and tensor.numel() else 0.0
        if largest > limit:
            raise RejectedError(Failure.NORM, f"{name}.{key}: {largest:.3g}, at most {limit:.3g}")


def counter_range(parts: Parts) -> tuple[int, int]:
    """The lowest and the highest value of all integer buffers, not above and not below 0."""
    found = [t for part in parts.values() for t in part.values() if not t.is_floating_point() and t.numel()]
    return min([0, *(int(t.min()) for t in found)]), max([0, *(int(t.max()) for t in found)])


def require_buffers(part: str, params: Params, counters: tuple[int, int], *, whole: bool) -> None:
    """Raise RejectedError for integer buffers far above those of the broadcast, and in a `whole` network for negative variances.

    Integer buffers are aggregated by maximum, so one excessive value would stay for ever.
    """
    low, high = counters[0], counters[1] + MAX_STEPS
    for name, tensor in params.items():
        if BUFFER not in name or not tensor.numel():
            continue
        if not tensor.is_floating_point():
            lowest, highest = int(tensor.min()), int(tensor.max())
            if lowest < low or highest > high:
                raise RejectedError(
                    Failure.BUFFERS, f"{part}.{name}: {lowest} to {highest}, expected {low} to {high}"
                )
        elif whole and name.endswith(VARIANCE) and float(tensor.min()) < 0:
            raise RejectedError(
                Failure.BUFFERS, f"{part}.{name}: variance {float(tensor.min()):.3g}, expected at least 0"
            )


def norm(params: Params) -> float:
    """The L2 norm of a part, without integer buffers."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in params.values() if t.is_floating_point()))


def _require_aggregation(method: Method, parts: Parts, report: Report) -> None:
    start = steps.start(method)
    try:
        aggregate = steps.aggregate(method, start, iter([Update("alone", report.samples, parts)]))
    except (EdgeFLError, RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
        cause = f"{type(error).__name__}: {str(error)[:200]}"
        raise RejectedError(Failure.PARTS, f"cannot be aggregated ({cause})") from error
    for name, params in start.items():
        after = aggregate.get(name, {})
        for key, tensor in params.items():
            if key not in after or after[key].shape != tensor.shape:
                raise RejectedError(
                    Failure.PARTS, f"{name}.{key}: another shape after aggregating this update alone"
                )


def parts_of(payload: bytes, expected: Expected) -> Parts:
    """Unpack and check the parts of an update. Raises RejectedError."""
    try:
        arrays = tensors.unpack(payload)
        for name, part in arrays.items():
            if name in expected.networks:
                tensors.check_like({name: part}, expected.networks[name])
            elif name not in expected.statistics:
                shared = ", ".join(sorted(expected.networks.keys() | expected.statistics)) or "none"
                raise RejectedError(Failure.PARTS, f"{name!r} is not a shared part, expected {shared}")
        if missing := expected.required - arrays.keys():
            raise RejectedError(Failure.PARTS, f"{', '.join(sorted(missing))} missing")
        tensors.require_finite(arrays)
    except ProtocolError as error:
        raise RejectedError(Failure.TENSORS, error.message) from error
    return from_arrays(arrays)
