"""Every message, as a strict struct: JSON on the wire, readable with mosquitto_sub, refused when a field is wrong.

Which device speaks is told by the topic alone (the broker enforces it), never by a payload. `decode` is the only way in: it bounds
the size and the depth, refuses duplicate keys of meaning, NaN and Infinity, and raises one error type.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from edge_fl.config import TaskSpec
from edge_fl.errors import ProtocolError
from edge_fl.wire.blob import Blob

PROTOCOL = "1.0"
MAX_JSON_BYTES = 256 * 1024
MAX_JSON_DEPTH = 8

Id = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,64}$")]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,32}$")]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Text = Annotated[str, Meta(max_length=2000)]
TierName = Literal["head", "full"]
Mode = Literal["serve", "train", "evaluate", "personalise", "rest"]
Status = Literal["init", "ready", "sleeping", "disconnected", "lost", "alert"]
Activity = Literal["idle", "fetching", "installing", "fitting", "training", "evaluating", "reporting"]


class ServerState(Struct, frozen=True):
    """srv/state, retained, also the server's will (online=false). `boot` tells two servers apart, `epoch` counts restarts."""

    online: bool
    boot: Id
    epoch: Count = 0
    protocol: str = PROTOCOL


class Round(Struct, frozen=True):
    """round/TASK, retained: what the current round is, and the spec that rebuilds its method."""

    task: Name
    round: Count
    deadline_s: Annotated[float, Meta(gt=0, le=86400)]
    spec: TaskSpec


class Want(Struct, frozen=True):
    """dn/want, retained: the desired state of one device; only the latest (highest `version`) matters.

    mode "serve" names a `release` to run; "train", "personalise" and "evaluate" name task, round and the broadcast `down` to start
    from; "rest" asks for nothing.
    """

    version: Count
    mode: Mode
    task: Name = "none"
    round: Count = 0
    id: Id = "none"
    down: Blob | None = None
    release: Count = 0
    deadline_s: Annotated[float, Meta(gt=0, le=86400)] = 120.0


class Command(Struct, frozen=True):
    """dn/cmd, never retained, expires: do something once."""

    id: Id
    do: Literal["rebirth", "abort", "revoke-local-head", "log-level"]
    argument: Text = ""


class Ack(Struct, frozen=True):
    """dn/ack: what the server did with the report `id`."""

    id: Id
    status: Literal["accepted", "duplicate", "rejected"]
    reason: Text = ""


class DeviceState(Struct, frozen=True):
    """up/state, retained, also the device's will (status "lost", same `boot`). `sequence` counts a boot's messages."""

    status: Status
    boot: Id
    sequence: Count = 0
    activity: Activity = "idle"
    release: Count = 0
    why: Text = ""


class Capability(Struct, frozen=True):
    """up/meta, retained: what the device is and can do, as measured on it."""

    tier: TierName
    machine: Text
    python: Text
    onnxruntime: Text = ""
    max_opset: Count = 0
    memory_mb: Count = 0
    disk_free_mb: Count = 0
    samples: Count = 0
    samples_per_class: list[Count] = []
    head: Text = ""
    agent: Text = ""
    protocol: str = PROTOCOL
    notes: list[Text] = []


class Report(Struct, frozen=True):
    """up/rpt/TASK/ROUND: numbers, and for an update the descriptor of its blob.

    `kind` says what was done: "update" (a local update; `blob` holds the parts), "personal" (after personalise), "evaluation",
    or "head" (a personal head was fitted on `release`). Metrics use the names of `edge_fl.metrics`.
    """

    id: Id
    kind: Literal["update", "personal", "evaluation", "head"]
    boot: Id
    samples: Count
    metrics: dict[str, float] = {}
    blob: Blob | None = None
    release: Count = 0
    extractor: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$")] = ""
    head: Text = ""
    seconds: float = 0.0
    bytes_down: Count = 0
    bytes_up: Count = 0
    error: Text = ""


class Request(Struct, frozen=True):
    """up/req: a device asks for something it needs and cannot find retained."""

    id: Id
    ask: Literal["want", "chunks", "metadata"]
    sha256: str = ""
    missing: Annotated[list[Count], Meta(max_length=1024)] = []


class Log(Struct, frozen=True):
    """up/log, rate-limited: one line for whoever watches."""

    level: Literal["debug", "info", "warning", "error"]
    text: Text


MESSAGES: dict[str, type[Struct]] = {
    "server_state": ServerState,
    "round": Round,
    "want": Want,
    "cmd": Command,
    "ack": Ack,
    "state": DeviceState,
    "meta": Capability,
    "rpt": Report,
    "req": Request,
    "log": Log,
}
"""Message type by the `kind` of its topic's address (`edge_fl.wire.topics.Address`)."""

M = TypeVar("M", bound=Struct)


def encode(message: Struct) -> bytes:
    """Strict JSON. Raises ProtocolError for NaN or Infinity, which JSON cannot say."""
    _require_finite(msgspec.to_builtins(message), type(message).__name__)
    return msgspec.json.encode(message)


def decode(payload: bytes, kind: type[M]) -> M:
    """The message in `payload`. Raises ProtocolError, and nothing else, whatever the bytes are."""
    name = kind.__name__
    if len(payload) > MAX_JSON_BYTES:
        raise ProtocolError(f"{name}: {len(payload)} bytes, at most {MAX_JSON_BYTES}; ignored")
    if _depth(payload) > MAX_JSON_DEPTH:
        raise ProtocolError(f"{name}: nested deeper than {MAX_JSON_DEPTH}; ignored")
    try:
        message = msgspec.json.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{name}: {error}; ignored") from error
    _require_finite(msgspec.to_builtins(message), name)
    return message


def _depth(payload: bytes) -> int:
    """An upper bound on the nesting: brackets inside strings count too, which no message of ours needs."""
    depth = deepest = 0
    for byte in payload:
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


def _require_finite(value: Any, where: str) -> None:
    match value:
        case float() if not math.isfinite(value):
            raise ProtocolError(f"{where}: number {value}, expected a finite one; ignored")
        case dict():
            for key, item in value.items():
                _require_finite(item, f"{where}.{key}")
        case list() | tuple():
            for item in value:
                _require_finite(item, where)
