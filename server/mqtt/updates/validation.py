"""Updates are judged before they count: parts, names, shapes, dtypes, finiteness and sample counts, against what the method declares.

What a method's shared parts look like is known from its network, so a tensor of another shape never reaches an aggregate. Statistics
(prototypes, sums) are held to the shapes that their kind has; other parts without a network are tried: an update alone must aggregate to
parts of the right shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec import Struct

from edge_fl.config import MethodSpec
from edge_fl.errors import EdgeFLError, ProtocolError
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Params, Parts, from_arrays, to_arrays
from edge_fl.methods.contract import steps, update_codec
from edge_fl.methods.contract.method import Method
from edge_fl.metrics import EPSILON
from edge_fl.wire import tensors
from edge_fl.wire.messages import Report
from edge_fl.wire.tensors import Signature

MAX_SAMPLES = 10**9
MAX_METRICS = 64
HEADER_BYTES = 1024 * 1024
STATISTICS_BYTES = 64 * 1024 * 1024


Shapes = Mapping[str, tuple[int, ...]]


def _class_means(params: Params, classes: int, dim: int) -> Shapes:
    owned = int((params["count"] > 0).sum()) if "count" in params else classes
    return {"mean": (owned, dim), "count": (classes,)}


STATISTICS: Mapping[str, Callable[[Params, int, int], Shapes]] = {
    "class_means": _class_means,
    "ridge_sums": lambda params, classes, dim: {"gram": (dim, dim), "moment": (dim, classes)},
    "spread": lambda params, classes, dim: {"V": (), "H": (classes, dim)},
}
"""What each tensor of a statistic must measure, by its kind (`edge_fl.heads.plan.Share`), of C classes and d features."""

KINDS = {"prototypes": "class_means", "sums": "ridge_sums", "spread": "spread"}
"""The parts of methods that are statistics."""

Flaw = Callable[[Parts, Report], str]
"""What is wrong with parts that have the right names, or nothing. May raise RefusedError for a reason of its own."""


@dataclass(frozen=True)
class Expected:
    """What an upload may hold: the tensors of parts that have a network, the names of those that have none, what must be there.

    `compression` is the one that was asked for; under privacy a report counts only if it says what its device's updates have told.
    """

    networks: Mapping[str, Signature]
    statistics: frozenset[str]
    required: frozenset[str]
    max_bytes: int
    compression: str = "none"
    private: bool = False


class Terms(Struct, frozen=True):
    """What else an update is judged by: no part may be `max_growth` times as long as was sent down (`lengths`), plus 1; 0: any length."""

    spec: MethodSpec
    lengths: dict[str, float]
    max_growth: float


class RefusedError(EdgeFLError):
    """An upload that does not count; `reason` is the word its device is told, the message says the rest."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def expected_of(method: Method, *, whole: bool) -> Expected:
    """What clients of a method may send; `whole` asks for every exported part, as after a local update."""
    down, up = update_codec.unlearnt(method)
    travels, _ = update_codec.sent(method, down, up, update_codec.own_at_start(method), seed=0)
    networks = {name: tensors.signature({name: array}) for name, array in to_arrays(travels).items()}
    statistics = frozenset(method.sent()) - networks.keys()
    size = sum(8 * math.prod(shape) for signature in networks.values() for _, shape in signature.values())
    return Expected(
        networks,
        statistics,
        frozenset(method.exports) & networks.keys() if whole else frozenset(),
        max_bytes=2 * size + HEADER_BYTES + (STATISTICS_BYTES if statistics else 0),
        compression=method.compression.kind,
        private=method.privacy.noise_multiplier > 0,
    )


def flaw_of(method: Method, terms: Terms) -> Flaw:
    """What names and finiteness do not tell: shapes of statistics, and lengths beyond what the terms allow."""
    classes, dim = method.net.classes, method.net.feature_dim
    tried = frozenset(method.sent()) - method.net.parts.keys() - KINDS.keys()
    coded = method.compression.kind != "none"
    down = update_codec.unlearnt(method)[0] if coded else {}  # stands for what was sent down

    def flaw(parts: Parts, report: Report) -> str:
        try:
            parts = update_codec.received(method, down, parts)
        except ProtocolError as error:
            raise RefusedError("tensors", str(error)) from error
        for name, params in parts.items():
            if (kind := KINDS.get(name)) and (wrong := misshapen(params, kind, classes, dim)):
                return f"{name}: {wrong}"
            limit = terms.max_growth * (terms.lengths.get(name, 0.0) + 1.0)
            if terms.max_growth and name in method.net.parts and (found := length(params)) > limit:
                raise RefusedError("norm", f"{name}: length {found:.3g}, at most {limit:.3g}")
        return _does_not_aggregate(method, parts, report) if tried & parts.keys() else ""

    return flaw


def misshapen(params: Params, kind: str, classes: int, dim: int) -> str:
    """What is wrong with the shapes of one statistic, or nothing."""
    found = {name: tuple(tensor.shape) for name, tensor in params.items()}
    wanted = STATISTICS[kind](params, classes, dim)
    return "" if found == wanted else f"{found}, expected {dict(wanted)}"


def length(params: Params) -> float:
    """The L2 norm of a part's numbers, integer buffers apart."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in params.values() if t.is_floating_point()))


def _does_not_aggregate(method: Method, parts: Parts, report: Report) -> str:
    start = steps.start(method)
    try:
        found = steps.aggregate(method, start, iter([Update("alone", report.samples, parts)]))
    except (EdgeFLError, RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
        return f"cannot be aggregated ({type(error).__name__}: {str(error)[:200]})"
    for name, params in start.items():
        after = found.get(name, {})
        for key, tensor in params.items():
            if key not in after or after[key].shape != tensor.shape:
                return f"{name}.{key}: not as it was after aggregating it alone"
    return ""


def check_report(report: Report, kind: str, expected: Expected, samples: int) -> None:
    """Raises RefusedError for a report that cannot count, whatever its blob holds; `samples`: what its device has (0: unknown)."""
    if report.kind != kind:
        raise RefusedError("wrong_kind", f"{report.kind!r}, expected {kind!r}")
    if report.error:
        return
    if not 0 < report.samples <= (samples or MAX_SAMPLES):
        raise RefusedError("samples", f"{report.samples}, expected 1 to {samples or MAX_SAMPLES}")
    if len(report.metrics) > MAX_METRICS:
        raise RefusedError("metrics", f"{len(report.metrics)} of them, at most {MAX_METRICS}")
    if report.blob and report.blob.bytes > expected.max_bytes:
        raise RefusedError("too_large", f"{report.blob.bytes} bytes, at most {expected.max_bytes}")
    if report.blob and report.compression != expected.compression:
        raise RefusedError("compression", f"{report.compression!r}, asked for {expected.compression!r}")
    if report.blob and expected.private and EPSILON not in report.metrics:
        raise RefusedError("privacy", f"an update without {EPSILON}")
    if report.blob is None and expected.required:
        raise RefusedError("no_parts", f"expected {', '.join(sorted(expected.required))}")


def parts_of(payload: bytes, expected: Expected) -> Parts:
    """The parts in an upload. Raises RefusedError."""
    try:
        arrays = tensors.unpack(payload)
        for name, part in arrays.items():
            if name in expected.networks:
                tensors.check_like({name: part}, expected.networks[name])
            elif name not in expected.statistics:
                raise RefusedError(
                    "parts", f"{name!r} is no shared part, expected {', '.join(_names(expected)) or 'none'}"
                )
        if missing := expected.required - arrays.keys():
            raise RefusedError("parts", f"{', '.join(sorted(missing))} missing")
        tensors.require_finite(arrays)
    except ProtocolError as error:
        raise RefusedError("tensors", str(error)) from error
    return from_arrays(arrays)


def _names(expected: Expected) -> list[str]:
    return sorted(expected.networks.keys() | expected.statistics)
