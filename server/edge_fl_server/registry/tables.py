"""The registry's records (frozen structs) and its current tables, most of them with a column per field of a record.

Times are UTC text, for display only. `migrations/` creates the tables, and changes those of an earlier release; a test compares both.
"""

from typing import Any, Literal

from msgspec import Struct, inspect
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
)

from edge_fl.wire.messages import Mode
from edge_fl_server.recipes.recipe import Source

RunEnd = Literal["completed", "failed", "stopped", "budget_exhausted"]
RunState = Literal["running", "completed", "failed", "stopped", "budget_exhausted"]
RequestState = Literal["queued", "succeeded", "failed", "timed_out", "rejected", "cancelled"]
DesiredRolloutState = Literal["running", "paused", "aborted", "rolled_back"]
RolloutState = Literal["running", "paused", "completed", "aborted", "rolled_back", "replaced"]
Subject = Literal["extractor", "agent"]
BY_HAND, COMMAND_ENDED = "by hand", "its command ended"
"""Reasons of a roll-out that no gate stopped."""
metadata = MetaData()
TYPES = {
    inspect.StrType: Text,
    inspect.LiteralType: Text,
    inspect.IntType: BigInteger,
    inspect.FloatType: Float,
    inspect.BoolType: Boolean,
    inspect.DictType: JSON,
}
"""Type of a record's field -> type of its column."""


class DeviceRecord(Struct, frozen=True):
    """The last known state of a device. `quarantine` is why its reports do not count, "" if they do.

    `outlier_score` compares its newest update with the cohort's: 0 is typical, 1 and above an outlier. `dropped` counts its messages above
    the rate limit, `rejections` its rejected reports since it was last readmitted. `seen_sequence` orders the messages of all devices;
    `blocked_at` is when the last quarantine, revocation or removal began. `removed`: "decommissioned" or "renamed to NAME"; the server then
    clears the device's retained messages and ignores it, while its history stays. `signed_state` and
    `signed_meta` are the numbers of its last signed messages, 0 for a device that does not sign.
    """

    fleet: str
    device: str
    status: str = "unknown"
    activity: str = "idle"
    release: int = 0
    why: str = ""
    boot: str = ""
    capability: dict[str, Any] | None = None
    seen_sequence: int = 0
    seen_at: str = ""
    first_seen_at: str = ""
    quarantine: str = ""
    revoked: bool = False
    blocked_at: str = ""
    rejections: int = 0
    outlier_score: float = 0.0
    dropped: int = 0
    removed: str = ""
    signed_state: int = 0
    signed_meta: int = 0

    @property
    def blocked(self) -> str:
        """Why its reports do not count: "removed", "quarantined", "revoked", or "" if they do."""
        if self.removed:
            return "removed"
        return "revoked" if self.revoked else "quarantined" if self.quarantine else ""

    @property
    def blocked_why(self) -> str:
        """Why it is blocked, and what the operator can do; "" if it is not."""
        return why_blocked(self.device, self.blocked, self.removed or self.quarantine)


def why_blocked(device: str, standing: str, reason: str) -> str:
    """Why a device of this standing (removed, revoked or quarantined) is blocked, and what the operator can do; "" if it is not."""
    match standing:
        case "removed":
            return f"{reason}; to use the name again: edge-fl fleet enrol {device}, then edge-fl fleet admit {device}"
        case "revoked":
            return (
                "its certificate was revoked, so it cannot connect; to admit it again:"
                f" edge-fl fleet enrol {device}, and the new claim on the device"
            )
        case "quarantined":
            return f"{reason}; to count its reports again: edge-fl fleet admit {device}"
    return ""


class RunRecord(Struct, frozen=True):
    """One run on a fleet. `desired` "stopped" requests its server to stop after the current round.

    `sums_bytes`: what devices sent for a sum of class statistics, which no report counts.
    """

    run: str
    fleet: str
    method: str
    dataset: str
    source: Source
    rounds: int
    folder: str
    state: RunState = "running"
    reason: str = ""
    desired: Literal["running", "stopped"] = "running"
    created_at: str = ""
    ended_at: str = ""
    sums_bytes: int = 0


class RoundRecord(Struct, frozen=True):
    """One completed round. `metrics`: mean over the clients that measured it, by name; `clients`: how many did."""

    run: str
    round: int
    selected: int
    responded: int
    seconds: float
    metrics: dict[str, float | None] = {}
    clients: dict[str, int] = {}
    ended_at: str = ""


class RequestRecord(Struct, frozen=True):
    """A request to one device: "queued" until it ends in exactly one of the other states. `id` is that of its assignment and its report."""

    fleet: str
    device: str
    id: str
    run: str
    round: int
    mode: Mode
    state: RequestState = "queued"
    reason: str = ""
    requested_at: str = ""
    ended_at: str = ""


class ReportRecord(Struct, frozen=True):
    """One accepted report. `before` and `after`: personal accuracy before and after a fit, None if not measured.

    `fleet`, `device` and `id` are the key, so that a stored report is not counted again.
    """

    fleet: str
    device: str
    id: str
    run: str
    round: int
    kind: str
    samples: int
    metrics: dict[str, float] = {}
    before: float | None = None
    after: float | None = None
    release: int = 0
    head: str = ""
    seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    error: str = ""
    received_at: str = ""


class RejectionRecord(Struct, frozen=True):
    """One rejected report and its reason."""

    fleet: str
    device: str
    id: str
    run: str
    round: int
    reason: str
    detail: str = ""
    received_at: str = ""
    number: int = 0


class ReleaseRecord(Struct, frozen=True):
    """One release: the run and round it came from, and the sha256 of its extractor, and the bytes that a device downloads."""

    fleet: str
    release: int
    run: str
    round: int
    method: str
    extractor: str
    bytes: int
    published_at: str = ""


class TokenRecord(Struct, frozen=True):
    """A personal token for the dashboard: roles separated by commas, the SHA-256 of its secret, its end in seconds since 1970."""

    fleet: str
    name: str
    roles: str
    sha256: str
    expires_s: int
    created_at: str = ""
    created_by: str = ""
    revoked_at: str = ""
    used_at: str = ""


class AuditRecord(Struct, frozen=True):
    """What a person did, or tried to do. `known_by` says how the name is known, `result` is "done" or the error."""

    number: int
    at: str
    fleet: str
    who: str
    known_by: str
    action: str
    target: str
    result: str


class AlertRecord(Struct, frozen=True):
    """One alert: a rule's condition that holds, or held, for a subject: a device, "server", "fleet" or a release.

    Times are seconds since 1970; `resolved_s` is 0 while the condition holds.
    """

    number: int
    fleet: str
    rule: str
    subject: str
    text: str
    raised_s: int
    resolved_s: int = 0


class RolloutRecord(Struct, frozen=True):
    """The roll-out of one release of an extractor or, by its `subject`, of the agent's own software.

    Any process may write `desired`; only the running server writes `state`, `stage` and `reason`.

    State "replaced": that of a newer release began before its end. `previous` is the release to go back to (0: none), `plan` holds stages
    and thresholds. `version` increases with every change, for compare-and-set.
    """

    number: int
    fleet: str
    release: int
    previous: int = 0
    plan: dict[str, Any] = {}
    desired: DesiredRolloutState = "running"
    state: RolloutState = "running"
    stage: int = 0
    reason: str = ""
    version: int = 1
    created_at: str = ""
    changed_at: str = ""
    subject: Subject = "extractor"

    @property
    def name(self) -> str:
        """Its release with its subject."""
        return f"{'agent ' if self.subject == 'agent' else ''}release {self.release}"

    @property
    def shares(self) -> list[float]:
        """Cumulative shares of the fleet, one per stage."""
        shares: list[float] = self.plan.get("stages", [1.0])
        return shares

    @property
    def where(self) -> str:
        """The selector of its devices; "" for all."""
        where: str = self.plan.get("where", "")
        return where

    @property
    def by_gate(self) -> bool:
        """Whether a gate aborted or paused it, not a person or the end of its command."""
        return self.state in ("aborted", "paused") and self.reason not in ("", BY_HAND, COMMAND_ENDED)

    @property
    def withdrawal(self) -> str:
        """Who took its release back, when and why, for a roll-out that was aborted, rolled back or is a roll-back."""
        at = f"on {self.changed_at[:16].replace('T', ' ')} UTC"
        if self.state != "aborted":
            to = self.previous if self.state == "rolled_back" else self.release
            return f"rolled back to release {to} {at}"
        stage = f"in stage {self.stage + 1} of {len(self.shares)}"
        return f"aborted by {'a gate' if self.by_gate else 'hand'} {at} {stage}{f': {self.reason}' * self.by_gate}"

    @property
    def leaves(self) -> int:
        """The release from which it takes devices back to an older one (0: it is no roll-back)."""
        if self.state == "rolled_back":
            return self.release
        return self.previous if self.release < self.previous else 0

    @property
    def back(self) -> str:
        """From which release to which one it rolls back; "" if it is no roll-back."""
        if not self.leaves:
            return ""
        to = self.previous if self.state == "rolled_back" else self.release
        done = self.state in ("completed", "rolled_back")
        return f"{'rolled back' if done else 'roll-back'} from release {self.leaves} to {to}"

    @property
    def explanation(self) -> str:
        """Its `back` and `reason`."""
        return "; ".join(filter(None, (self.back, self.reason)))


class HistoryRecord(Struct, frozen=True):
    """A fleet at one time, in seconds since 1970: its devices, those connected, and the release in service (0: none).

    `served` is the mean accuracy of the `served_n` head-only devices that serve this release, `fleets_head` that of the fleet's head on the
    same images of `fleets_head_n` of them, and `full` that of the newest models of `full_n` full devices.
    """

    fleet: str
    at_s: int
    devices: int
    online: int
    release: int = 0
    served: float | None = None
    served_n: int = 0
    fleets_head: float | None = None
    fleets_head_n: int = 0
    full: float | None = None
    full_n: int = 0


def _table(name: str, record: type[Struct], *key: str) -> Table:
    """A table with a column per field of a record; the database assigns the key `number`."""
    info = inspect.type_info(record)
    assert isinstance(info, inspect.StructType)
    columns = [_number() if field.name == "number" else _column(field) for field in info.fields]
    return Table(name, metadata, *columns, PrimaryKeyConstraint(*key))


def _column(field: inspect.Field) -> Column[object]:
    """The column of a field; one that may be None is nullable."""
    types = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
    (kind,) = (type(one) for one in types if not isinstance(one, inspect.NoneType))
    return Column(field.name, TYPES[kind], nullable=len(types) > 1)


def _number() -> Column[int]:
    return Column("number", Integer, primary_key=True, autoincrement=True)


def _plain(name: str, key: str, *more: Column[Any], texts: str = "", integers: str = "") -> Table:
    """A table without a record: the names of its key's columns, of texts and of integers."""
    names = dict.fromkeys(f"{key} {texts} {integers}".split())
    columns = (
        Column(each, BigInteger if each in integers.split() else Text, nullable=False) for each in names
    )
    return Table(name, metadata, *columns, *more, PrimaryKeyConstraint(*key.split()))


devices = _table("devices", DeviceRecord, "fleet", "device")
runs = _table("runs", RunRecord, "run")
rounds = _table("rounds", RoundRecord, "run", "round")
requests = _table("requests", RequestRecord, "fleet", "device", "id")
reports = _table("reports", ReportRecord, "fleet", "device", "id")
rejections = _table("rejections", RejectionRecord, "number")
releases = _table("releases", ReleaseRecord, "fleet", "release")
rollouts = _table("rollouts", RolloutRecord, "number")
tokens = _table("tokens", TokenRecord, "fleet", "name")
history = _table("history", HistoryRecord, "fleet", "at_s")
audit = _table("audit", AuditRecord, "number")
Index("tokens_by_sha256", tokens.c.sha256)
Index("audit_by_time", audit.c.fleet, audit.c.at)
Index("requests_by_round", requests.c.run, requests.c.round)
Index("reports_by_run", reports.c.run, reports.c.round)
Index("rejections_by_device", rejections.c.fleet, rejections.c.device)

fleets = _plain("fleets", "fleet", texts="id")
servers = _plain(
    "servers", "fleet", Column("online", Boolean, nullable=False), integers="sequence since_s beat_s"
)
"""The last server of a fleet, by its first sequence number, since when it is online or not, and its last sign of life.

Times are seconds since 1970 by the database's clock, which all processes share.
"""
groups = _plain("groups", "fleet name", texts="selector")
boots = _plain("boots", "fleet device boot", integers="at_s")
"""Unplanned restarts of agents: the boot id of the new process, and when it was seen by the clock of the server."""
tags = _plain("tags", "fleet device key", texts="value")
"""Value "": removed by the operator, so that an enrolment does not bring it back."""
settings = _plain("settings", "fleet device key", texts="value", integers="serial")
"""`value` is JSON, "": the device's own again; `serial` is that of the last change, and rises with each."""
Index("settings_by_serial", settings.c.fleet, settings.c.serial)
sums = _plain("sums", "fleet device", integers="opened")
"""Number of the signature that opened the last sum for which a vector arrived."""
rejection_counts = _plain("rejection_counts", "fleet reason", integers="count")
"""All rejections, also those that are no longer kept."""
verdict_counts = _plain("verdict_counts", "fleet outcome", integers="rounds named")
"""Rounds of an outcome of the round gate, and devices that these named."""

alerts = _table("alerts", AlertRecord, "number")
Index("alerts_once", alerts.c.fleet, alerts.c.rule, alerts.c.subject, alerts.c.resolved_s, unique=True)
alert_deliveries = _plain(
    "alert_deliveries",
    "number channel event",
    Column("sent", Boolean, nullable=False),
    integers="number at_s",
)
silences = _plain("silences", "fleet name", integers="until_s")

round_requests = _plain("round_requests", "fleet id", Column("content", JSON, nullable=False))
report_chunks = _plain(
    "report_chunks", "fleet device id index", Column("payload", LargeBinary, nullable=False), integers="index"
)
shared_reports = Table(
    "shared_reports",
    metadata,
    _number(),
    *(Column(name, Text, nullable=False) for name in ("fleet", "device", "id", "run", "state", "reason")),
    Column("round", BigInteger, nullable=False),
    Column("report", JSON, nullable=False),
    Column("payload", LargeBinary),
    UniqueConstraint("fleet", "device", "id", name="shared_report_once"),
)
