"""The registry's current tables, most of them with a column per field of a record. Times are UTC text, for display only.

`migrations/` creates them, and changes those of an earlier release; a test compares both.
"""

from __future__ import annotations

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

from edge_fl_server.registry import records

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


def _texts(*names: str) -> list[Column[str]]:
    return [Column(name, Text, nullable=False) for name in names]


def _integers(*names: str) -> list[Column[int]]:
    return [Column(name, BigInteger, nullable=False) for name in names]


devices = _table("devices", records.DeviceRecord, "fleet", "device")
runs = _table("runs", records.RunRecord, "run")
rounds = _table("rounds", records.RoundRecord, "run", "round")
requests = _table("requests", records.RequestRecord, "fleet", "device", "id")
reports = _table("reports", records.ReportRecord, "fleet", "device", "id")
rejections = _table("rejections", records.Rejection, "number")
releases = _table("releases", records.ReleaseRecord, "fleet", "release")
rollouts = _table("rollouts", records.RolloutRecord, "number")
servers = _table("servers", records.ServerRecord, "fleet")
tokens = _table("tokens", records.TokenRecord, "fleet", "name")
audit = _table("audit", records.AuditRecord, "number")
Index("tokens_by_sha256", tokens.c.sha256)
Index("audit_by_time", audit.c.fleet, audit.c.at)
Index("requests_by_round", requests.c.run, requests.c.round)
Index("reports_by_run", reports.c.run, reports.c.round)
Index("rejections_by_device", rejections.c.fleet, rejections.c.device)

fleets = Table("fleets", metadata, *_texts("fleet", "id"), PrimaryKeyConstraint("fleet"))

rejection_counts = Table(
    "rejection_counts",
    metadata,
    *_texts("fleet", "reason"),
    *_integers("count"),  # all rejections, also those that are no longer kept
    PrimaryKeyConstraint("fleet", "reason"),
)

verdict_counts = Table(
    "verdict_counts",
    metadata,
    *_texts("fleet", "outcome"),
    *_integers("rounds", "named"),  # rounds of this outcome of the round gate, and devices that these named
    PrimaryKeyConstraint("fleet", "outcome"),
)

tags = Table(
    "tags",
    metadata,
    *_texts(
        "fleet", "device", "key", "value"
    ),  # "": removed by the operator, so that an enrolment does not bring it back
    PrimaryKeyConstraint("fleet", "device", "key"),
)

settings = Table(
    "settings",
    metadata,
    *_texts("fleet", "device", "key", "value"),  # JSON; "": the device's own again
    *_integers("serial"),  # of the last change; it rises with each
    PrimaryKeyConstraint("fleet", "device", "key"),
)
Index("settings_by_serial", settings.c.fleet, settings.c.serial)

sums = Table(
    "sums",
    metadata,
    *_texts("fleet", "device"),
    *_integers("opened"),  # number of the signature that opened the last sum for which a vector arrived
    PrimaryKeyConstraint("fleet", "device"),
)

groups = Table(
    "groups",
    metadata,
    *_texts("fleet", "name", "selector"),
    PrimaryKeyConstraint("fleet", "name"),
)

boots = Table(
    "boots",
    metadata,
    *_texts("fleet", "device", "boot"),
    *_integers("at_s"),  # by the clock of the server
    PrimaryKeyConstraint("fleet", "device", "boot"),
)

alerts = _table("alerts", records.AlertRecord, "number")
Index("alerts_once", alerts.c.fleet, alerts.c.rule, alerts.c.subject, alerts.c.resolved_s, unique=True)

alert_deliveries = Table(
    "alert_deliveries",
    metadata,
    *_integers("number"),
    *_texts("channel", "event"),
    Column("sent", Boolean, nullable=False),
    *_integers("at_s"),
    PrimaryKeyConstraint("number", "channel", "event"),
)

silences = Table(
    "silences",
    metadata,
    *_texts("fleet", "name"),
    *_integers("until_s"),
    PrimaryKeyConstraint("fleet", "name"),
)

round_requests = Table(
    "round_requests",
    metadata,
    *_texts("fleet", "id"),
    Column("content", JSON, nullable=False),
    PrimaryKeyConstraint("fleet", "id"),
)

report_chunks = Table(
    "report_chunks",
    metadata,
    *_texts("fleet", "device", "id"),
    *_integers("index"),
    Column("payload", LargeBinary, nullable=False),
    PrimaryKeyConstraint("fleet", "device", "id", "index"),
)

shared_reports = Table(
    "shared_reports",
    metadata,
    _number(),
    *_texts("fleet", "device", "id", "run", "state", "reason"),
    *_integers("round"),
    Column("report", JSON, nullable=False),
    Column("payload", LargeBinary),
    UniqueConstraint("fleet", "device", "id", name="shared_report_once"),
)
