"""All messages as strict structs: JSON on the wire, readable with mosquitto_sub, rejected when a field is invalid.

The sender follows from the topic alone, which the broker enforces, never from a payload. `decode` is the only entry point: it bounds size
and depth, rejects duplicate keys, NaN and Infinity, and raises one error type.
"""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from edge_fl.blob import Blob, digest
from edge_fl.config import MAX_CLASSES, MethodSpec
from edge_fl.errors import ProtocolError, brief
from edge_fl.fields import (
    Count,
    DeviceSignature,
    Id,
    Name,
    Number,
    Samples,
    ServerSignature,
    ShortText,
    Text,
    Version,
)
from edge_fl.fleet.remote_settings import DesiredSettings, SettingsStatus
from edge_fl.release.agent import AgentUpdate, UpdateStatus
from edge_fl.untrusted import NOT_JSON, decoder

PROTOCOL = "1.0"

MAX_SUM_DEVICES, MAX_SUM_LENGTH = 100, 2**24
MAX_JSON_BYTES = 256 * 1024
MAX_JSON_DEPTH = 8
STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)

ClassCounts = Annotated[list[Samples], Meta(max_length=MAX_CLASSES)]
Metrics = Annotated[dict[Annotated[str, Meta(max_length=64)], float], Meta(max_length=64)]
TierName = Literal["head", "full"]
Mode = Literal["serve", "train", "evaluate", "personalise", "compare", "rest"]
Status = Literal["init", "ready", "sleeping", "disconnected", "lost", "alert"]
GONE: frozenset[Status] = frozenset({"lost", "disconnected", "sleeping"})
"""States of a device that is not connected."""
LogLevel = Literal["debug", "info", "warning", "error"]
BOARD_NOTES = 2
"""Number of a capability's first notes: the tier and the board's measurements. The others are remarks on the device's data."""
Activity = Literal["idle", "fetching", "installing", "fitting", "training", "evaluating", "reporting"]

MAX_LINES = 4096
SettingValue = bool | int | float | ShortText


class ServerState(Struct, frozen=True):
    """srv/state, retained, also the server's will (online=false). `boot` identifies a server process, `epoch` counts restarts.

    After an outage of the broker or the server devices reconnect at a random moment within `return_s`, so that they do not all reconnect at
    once. A server that `yields` has no run: the server of a run takes the fleet over. `registry` is the id of its registry.
    """

    online: bool
    boot: Id
    epoch: Count = 0
    protocol: Version = PROTOCOL
    return_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    yields: bool = False
    registry: Annotated[str, Meta(pattern=r"^[0-9a-f]{0,32}\Z")] = ""


class Beat(Struct, frozen=True):
    """srv/beat, never retained: the server `boot` is alive. The retained srv/state may be outdated after a crash of the broker."""

    boot: Id
    epoch: Count = 0


class Round(Struct, frozen=True):
    """round/RUN, retained: the current round and the spec that rebuilds its method."""

    run_id: Name
    round: Count
    deadline_s: Annotated[float, Meta(gt=0, le=86400)]
    spec: MethodSpec


class Assignment(Struct, frozen=True):
    """dn/assignment, retained: the desired state of one device; only the highest `version` counts.

    Mode "serve" names a `release` to install. "train", "personalise" and "evaluate" name run, round, the broadcast `down` to start from and
    the hash of the round's `spec` ("": any). "compare" compares `down`, a round's candidate, with `before`, the broadcast of the round.
    "rest" requests nothing; `why`: a failure word, as in `DeviceState.why`.
    """

    version: Count
    mode: Mode
    run_id: Name = "none"
    round: Count = 0
    id: Id = "none"
    down: Blob | None = None
    release: Count = 0
    deadline_s: Annotated[float, Meta(gt=0, le=86400)] = 120.0
    why: Text = ""
    spec: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    before: Blob | None = None
    signature: ServerSignature | None = None


class Command(Struct, frozen=True):
    """dn/cmd, never retained, expires: an action to perform once."""

    id: Id
    do: Literal["rebirth", "abort", "revoke-local-head", "log-level"]
    argument: Text = ""
    signature: ServerSignature | None = None


class Ack(Struct, frozen=True):
    """dn/ack: the server's verdict on the report `id`."""

    id: Id
    status: Literal["accepted", "duplicate", "rejected"]
    reason: Text = ""


class Echo(Struct, frozen=True):
    """dn/echo, never retained: a message from a device to itself. Messages keep their order, so all retained messages arrived before it."""

    id: Id


class DeviceState(Struct, frozen=True):
    """up/state, retained, also the device's will (status "lost", same `boot`). `sequence` counts the messages of a boot."""

    status: Status
    boot: Id
    sequence: Count = 0
    activity: Activity = "idle"
    release: Count = 0
    why: Text = ""
    signature: DeviceSignature | None = None


class Capability(Struct, frozen=True):
    """up/meta, retained: the measured capability of a device.

    `drift` is the mean shift of its features since its head was fitted, in standard deviations of the fit; 0 if there is no drift.
    `missed`: the share of its newest labels that were outside their prediction sets, if its promise is broken; otherwise 0.
    `update`: how its agent is updated; None if it cannot be. `settings`: those in effect; None before a simulated device receives any.
    `certificate_until` is when its certificate ends, in seconds since 1970; 0 without one.
    """

    tier: TierName
    machine: ShortText
    python: ShortText
    onnxruntime: ShortText = ""
    max_opset: Count = 0
    memory_mb: Count = 0
    disk_free_mb: Count = 0
    samples: Samples = 0
    samples_per_class: ClassCounts = []
    head: Text = ""
    agent: ShortText = ""
    protocol: Version = PROTOCOL
    notes: Annotated[list[Text], Meta(max_length=64)] = []
    drift: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    missed: Annotated[float, Meta(ge=0, le=1)] = 0.0
    update: UpdateStatus | None = None
    settings: SettingsStatus | None = None
    certificate_until: Count = 0
    signature: DeviceSignature | None = None


class Report(Struct, frozen=True):
    """up/rpt/RUN/ROUND: metrics, and for an update the descriptor of its blob.

    `kind` is "update" (a local update; `blob` holds the parts), "personal" (after personalisation), "evaluation", or "head" (a personal
    head was fitted on `release`). Metrics use the names of `edge_fl.metrics`. `compression` is that of the blob.
    """

    id: Id
    kind: Literal["update", "personal", "evaluation", "head"]
    boot: Id
    samples: Count
    metrics: Metrics = {}
    blob: Blob | None = None
    release: Count = 0
    extractor: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    head: Text = ""
    seconds: Annotated[float, Meta(ge=0, le=1e7)] = 0.0
    bytes_down: Count = 0
    bytes_up: Count = 0
    error: Text = ""
    compression: Name = "none"
    signature: DeviceSignature | None = None


class Request(Struct, frozen=True):
    """up/req: a device requests something that it needs and that is not retained."""

    id: Id
    kind: Literal["assignment", "chunks", "metadata"]
    sha256: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    missing: Annotated[list[Count], Meta(max_length=1024)] = []


class Log(Struct, frozen=True):
    """up/log, rate-limited: one log line."""

    level: LogLevel
    text: Text


class CertificateRequest(Struct, frozen=True):
    """enroll/NAME/req: a claim requests its device's certificate with its `secret`, or a device its next one (PEM, PKCS #10)."""

    id: Id
    request: Text
    secret: Text = ""


class CertificateAnswer(Struct, frozen=True):
    """enroll/NAME/rsp: the certificate (PEM), or the reason for its denial."""

    id: Id
    certificate: Text = ""
    reason: Text = ""


class SumRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Terms of a secure sum: what is added up, how many numbers, and the protection.

    Every device signs them with its keys, so all devices have received the same. `threshold`: share of the cohort that must remain.
    `extractor`: sha256 of that of the release. `trained`: RUN/ROUND whose final broadcast was this extractor ("": none), for full devices,
    which have no release.
    """

    subject: Name
    release: Count
    length: Annotated[int, Meta(ge=1, le=MAX_SUM_LENGTH)]
    minimum: Annotated[int, Meta(ge=3, le=MAX_SUM_DEVICES)] = 5
    threshold: Annotated[float, Meta(gt=0.5, le=1)] = 2 / 3
    masked: bool = True
    clip: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    noise_multiplier: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    extractor: Annotated[str, Meta(max_length=64)] = ""
    trained: Annotated[str, Meta(max_length=128)] = ""


Key32 = Annotated[bytes, Meta(max_length=32)]
SumValues = Annotated[dict[Name, Annotated[bytes, Meta(max_length=256)]], Meta(max_length=MAX_SUM_DEVICES)]


class SumKeys(Struct, frozen=True, forbid_unknown_fields=True):
    """A device's public keys for one secure sum (X25519), signed with the key of its certificate (DER).

    `commitment` is a hash of the seed of its self mask. All are empty where the sum is not masked.
    """

    certificate: Annotated[bytes, Meta(max_length=4096)] = b""
    channel: Key32 = b""
    mask: Key32 = b""
    commitment: Key32 = b""
    signature: Annotated[bytes, Meta(max_length=128)] = b""


class SumStep(Struct, frozen=True):
    """dn/sum, never retained: the next stage of the secure sum `id`, which `edge_fl.secure` specifies.

    "open" has the request, and in `last` the number of the signature that opened the last sum for which the server received a vector of
    this device (0: none); "peers" the keys of the cohort; "shares" the encrypted shares for this device, by sender; "survivors" the
    `devices` whose vectors arrived; "signatures" what they signed about it; "result" the `devices` in the sum, none if it failed.
    """

    id: Id
    stage: Literal["open", "peers", "shares", "survivors", "signatures", "result"]
    request: SumRequest | None = None
    keys: Annotated[dict[Name, SumKeys], Meta(max_length=MAX_SUM_DEVICES)] = {}
    values: SumValues = {}
    devices: Annotated[list[Name], Meta(max_length=MAX_SUM_DEVICES)] = []
    last: Number = 0
    signature: ServerSignature | None = None


class SumReply(Struct, frozen=True):
    """up/sum: a device's answer to a stage.

    "keys"; "shares", encrypted, by recipient; "vector", masked, as a blob; "signature" of the survivors, under its own name; "reveal", one
    share of each member of the cohort; or "declined" with a reason, at any stage.
    """

    id: Id
    stage: Literal["keys", "shares", "vector", "signature", "reveal", "declined"]
    keys: SumKeys | None = None
    values: SumValues = {}
    blob: Blob | None = None
    reason: Annotated[str, Meta(max_length=64)] = ""


Age = Annotated[float, Meta(ge=0, le=1e9)]
MAX_ANSWER_BYTES = 256 * 1024


class Query(Struct, frozen=True):
    """dn/query, never retained, expires: a request for lines of the device's log or for a diagnostics bundle.

    Log lines of at least `level` that are between `until_s` and `since_s` seconds old by the device's clock (0: no limit), the newest of
    them up to `max_bytes`.
    """

    id: Id
    what: Literal["logs", "diagnostics"]
    level: LogLevel = "info"
    since_s: Age = 0.0
    until_s: Age = 0.0
    max_bytes: Annotated[int, Meta(ge=1024, le=MAX_ANSWER_BYTES)] = MAX_ANSWER_BYTES


class QueryReply(Struct, frozen=True):
    """up/query: the descriptor of the answer to a query, whose chunks follow, or the reason why there is none.

    `certificate` (DER) and `signature` are empty on a device without a certificate.
    """

    id: Id
    blob: Blob | None = None
    certificate: Annotated[bytes, Meta(max_length=4096)] = b""
    signature: Annotated[bytes, Meta(max_length=128)] = b""
    reason: Annotated[str, Meta(max_length=64)] = ""


MESSAGES: dict[str, type[Struct]] = {
    "server_state": ServerState,
    "beat": Beat,
    "round": Round,
    "assignment": Assignment,
    "cmd": Command,
    "ack": Ack,
    "agent": AgentUpdate,
    "settings": DesiredSettings,
    "echo": Echo,
    "state": DeviceState,
    "meta": Capability,
    "rpt": Report,
    "req": Request,
    "log": Log,
    "sum": SumStep,
    "sum_reply": SumReply,
    "query": Query,
    "query_reply": QueryReply,
    "enrol_req": CertificateRequest,
    "enrol_rsp": CertificateAnswer,
}
"""Message type by the `kind` of its topic's address (`edge_fl.wire.topics.Address`)."""

M = TypeVar("M", bound=Struct)


def encode(message: Struct) -> bytes:
    """Encode as JSON. Raises ProtocolError for NaN or Infinity, and above the size that `decode` accepts."""
    name = type(message).__name__
    _require_finite(msgspec.to_builtins(message), name, "not sent")
    payload = msgspec.json.encode(message)
    if len(payload) > MAX_JSON_BYTES:
        raise ProtocolError(f"{name}: {len(payload)} bytes, at most {MAX_JSON_BYTES}", consequence="not sent")
    return payload


def decode(payload: bytes, kind: type[M]) -> M:
    """Decode the message in `payload`. Raises only ProtocolError, whatever the bytes."""
    name = kind.__name__
    if len(payload) > MAX_JSON_BYTES:
        raise ProtocolError(f"{name}: {len(payload)} bytes, at most {MAX_JSON_BYTES}")
    if _depth(payload) > MAX_JSON_DEPTH:
        raise ProtocolError(f"{name}: nested deeper than {MAX_JSON_DEPTH}")
    try:
        message = decoder(kind).decode(payload)
        # msgspec skips unknown fields and keeps the last of two equal keys, so check every key again
        json.loads(payload.decode(), object_pairs_hook=unique_keys, parse_int=str, parse_float=str)
    except (ValueError, *NOT_JSON) as error:
        raise ProtocolError(f"{name}: {brief(error)}") from error
    _require_finite(msgspec.to_builtins(message), name, "ignored")
    return message


def spec_digest(spec: MethodSpec) -> str:
    """The hash of a round's specification in its assignments: the announcement itself is not signed."""
    return digest(encode(spec))


def _depth(payload: bytes) -> int:
    """Nesting depth of arrays and objects, in one pass; brackets inside strings do not count."""
    depth = deepest = 0
    for token in STRING_OR_BRACKET.finditer(payload):
        if token[0] in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif token[0] in (b"]", b"}"):
            depth -= 1
    return deepest


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of `json.loads` (`object_pairs_hook`). Raises ValueError for a duplicate key."""
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("duplicate key")
    return tree


def _require_finite(value: Any, where: str, consequence: str) -> None:
    match value:
        case float() if not math.isfinite(value):
            raise ProtocolError(f"{where}: {value}, expected a finite number", consequence)
        case dict():
            for key, item in value.items():
                _require_finite(item, f"{where}.{key}", consequence)
        case list() | tuple():
            for item in value:
                _require_finite(item, where, consequence)


class LogLine(Struct, frozen=True):
    """One line of a device's log; `at` is UTC by the device's clock."""

    at: Annotated[str, Meta(max_length=40)]
    level: LogLevel
    text: Text


class Logs(Struct, frozen=True):
    """Lines of the log, the oldest first; `left_out` older ones that were requested did not fit."""

    lines: Annotated[list[LogLine], Meta(max_length=MAX_LINES)]
    left_out: int = 0


class DoctorCheck(Struct, frozen=True):
    """One result of the device's doctor."""

    check: ShortText
    state: Literal["ok", "warning", "failed", "skipped"]
    found: Text
    remedy: Text = ""


class Diagnostics(Struct, frozen=True):
    """A diagnostics bundle. `settings` and `blocked` (releases that failed here) by name, `errors`: the newest warnings and errors."""

    at: Annotated[str, Meta(max_length=40)]
    status: ShortText
    activity: ShortText
    release: int
    why: Text
    capability: Capability
    versions: dict[ShortText, ShortText]
    settings: dict[ShortText, SettingValue]
    checks: list[DoctorCheck]
    errors: list[LogLine]
    blocked: dict[ShortText, Text] = {}
    uptime_s: float = 0.0
    running_s: float = 0.0


QUERY_ANSWERS: dict[str, type[Logs] | type[Diagnostics]] = {"logs": Logs, "diagnostics": Diagnostics}
"""Type of the answer by `Query.what`, one JSON object of closed fields. A device with a certificate signs `answer_content`, so that neither
the broker nor another device can forge the answer, nor replay it to another query."""


def answer_content(fleet: str, device: str, id: str, sha256: str) -> dict[str, str]:
    """What a device signs of an answer."""
    return {"fleet": fleet, "device": device, "query": id, "sha256": sha256}
