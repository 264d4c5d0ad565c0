"""The registry's current tables, most of them with a column per field of a record. Times are UTC text, for display only.

`migrations/` creates them, and changes those of an earlier release; a test compares both.
"""

from typing import Any

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


def _plain(name: str, key: str, *more: Column[Any], texts: str = "", integers: str = "") -> Table:
    """A table without a record: the names of its key's columns, of texts and of integers."""
    names = dict.fromkeys(f"{key} {texts} {integers}".split())
    columns = (
        Column(each, BigInteger if each in integers.split() else Text, nullable=False) for each in names
    )
    return Table(name, metadata, *columns, *more, PrimaryKeyConstraint(*key.split()))


devices = _table("devices", records.DeviceRecord, "fleet", "device")
runs = _table("runs", records.RunRecord, "run")
rounds = _table("rounds", records.RoundRecord, "run", "round")
requests = _table("requests", records.RequestRecord, "fleet", "device", "id")
reports = _table("reports", records.ReportRecord, "fleet", "device", "id")
rejections = _table("rejections", records.RejectionRecord, "number")
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

fleets = _plain("fleets", "fleet", texts="id")
groups = _plain("groups", "fleet name", texts="selector")
boots = _plain("boots", "fleet device boot", integers="at_s")  # by the clock of the server
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

alerts = _table("alerts", records.AlertRecord, "number")
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
