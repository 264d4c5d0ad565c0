"""The registry's current tables; `migrations/` creates and upgrades them. Times are UTC text, for display only."""

from __future__ import annotations

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

metadata = MetaData()


def _texts(*names: str) -> list[Column[str]]:
    return [Column(name, Text, nullable=False) for name in names]


def _integers(*names: str) -> list[Column[int]]:
    return [Column(name, Integer, nullable=False) for name in names]


def _big_integers(*names: str) -> list[Column[int]]:
    return [Column(name, BigInteger, nullable=False) for name in names]


def _number() -> Column[int]:
    return Column("number", Integer, primary_key=True, autoincrement=True)


devices = Table(
    "devices",
    metadata,
    *_texts("fleet", "device", "status", "activity", "why", "boot", "seen_at", "first_seen_at"),
    *_texts("quarantine", "blocked_at"),  # reason, or ""; when the last quarantine or revocation began
    *_big_integers("release", "seen_sequence"),  # sequence: order of the messages received
    *_big_integers("dropped"),  # messages above the rate limit
    *_integers("rejections"),  # rejected reports since the device was last readmitted
    Column("outlier_score", Float, nullable=False),  # of its newest screened update; 1 and above: outlier
    Column("revoked", Boolean, nullable=False),
    Column("capability", JSON),
    PrimaryKeyConstraint("fleet", "device"),
)

runs = Table(
    "runs",
    metadata,
    *_texts("run", "fleet", "method", "dataset", "source", "folder", "state", "reason", "desired"),
    *_texts("created_at", "ended_at"),
    *_integers("rounds"),
    PrimaryKeyConstraint("run"),
)

rounds = Table(
    "rounds",
    metadata,
    *_texts("run", "ended_at"),
    *_integers("round", "selected", "responded"),
    *_big_integers("bytes_down", "bytes_up"),
    Column("seconds", Float, nullable=False),
    Column("metrics", JSON, nullable=False),
    PrimaryKeyConstraint("run", "round"),
)

requests = Table(
    "requests",
    metadata,
    *_texts("fleet", "device", "id"),  # id of the assignment and of its report
    *_texts("run", "mode", "state", "reason", "requested_at", "ended_at"),
    *_integers("round"),
    PrimaryKeyConstraint("fleet", "device", "id"),
)
Index("requests_by_round", requests.c.run, requests.c.round)

reports = Table(
    "reports",
    metadata,
    *_texts("fleet", "device", "id"),  # idempotency key: a stored report is not counted again
    *_texts("run", "kind", "head", "error", "received_at"),
    *_integers("round"),
    *_big_integers("samples", "release", "bytes_down", "bytes_up"),
    Column("seconds", Float, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("before", Float),
    Column("after", Float),
    PrimaryKeyConstraint("fleet", "device", "id"),
)
Index("reports_by_run", reports.c.run, reports.c.round)

rejections = Table(
    "rejections",
    metadata,
    _number(),
    *_texts("fleet", "device", "id", "run", "reason", "detail", "received_at"),
    *_integers("round"),
)
Index("rejections_by_device", rejections.c.fleet, rejections.c.device)

rejection_counts = Table(
    "rejection_counts",
    metadata,
    *_texts("fleet", "reason"),
    *_big_integers("count"),  # all rejections, also those that are no longer kept
    PrimaryKeyConstraint("fleet", "reason"),
)

releases = Table(
    "releases",
    metadata,
    *_texts("fleet", "run", "method", "extractor", "published_at"),  # extractor: sha256
    *_integers("round"),
    *_big_integers("release", "bytes"),
    PrimaryKeyConstraint("fleet", "release"),
)

rollouts = Table(
    "rollouts",
    metadata,
    _number(),
    *_texts("fleet", "desired", "state", "reason", "created_at", "changed_at"),
    *_integers("stage", "version"),  # version: increases with every change, for compare-and-set
    *_big_integers("release", "previous"),  # previous: target of a rollback, 0: none
    Column("plan", JSON, nullable=False),
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
