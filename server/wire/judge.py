"""Updates are judged before they count: parts, names, shapes, dtypes, finiteness and sample counts, against what the method declares.

What a method's shared parts look like is known from its network, so a tensor of another shape never reaches an aggregate. Parts without a
network (prototypes and other statistics) are held to the limits of `edge_fl.wire.tensors` and to finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from edge_fl.errors import EdgeFLError, ProtocolError
from edge_fl.learn.tree import Parts, from_arrays, to_arrays
from edge_fl.methods import norm
from edge_fl.methods.method import Method
from edge_fl.wire import tensors
from edge_fl.wire.messages import Report
from edge_fl.wire.tensors import Signature

MAX_SAMPLES = 10**9
MAX_METRICS = 64
HEADER_BYTES = 1024 * 1024
STATISTICS_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Expected:
    """What an upload may hold: the tensors of parts that have a network, the names of those that have none, what must be there."""

    networks: Mapping[str, Signature]
    statistics: frozenset[str]
    required: frozenset[str]
    max_bytes: int


class RefusedError(EdgeFLError):
    """An upload that does not count; `reason` is the word its device is told, the message says the rest."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def expected_of(method: Method, *, whole: bool) -> Expected:
    """What clients of a method may send; `whole` asks for every exported part, as after a local update."""
    networks: dict[str, Signature] = {}
    start = method.init_shared()  # where some layers are personal, not the whole network
    for part in method.sent():
        if part in method.net.parts:
            travels, _ = norm.separated(method, {part: start.get(part, method.net.parts[part].init())})
            networks |= {name: tensors.signature({name: array}) for name, array in to_arrays(travels).items()}
    statistics = frozenset(method.sent()) - networks.keys()
    size = sum(8 * math.prod(shape) for signature in networks.values() for _, shape in signature.values())
    return Expected(
        networks,
        statistics,
        frozenset(method.exports) & networks.keys() if whole else frozenset(),
        max_bytes=2 * size + HEADER_BYTES + (STATISTICS_BYTES if statistics else 0),
    )


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
