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

devices = Table(
    "devices",
    metadata,
    Column("fleet", Text),
    Column("device", Text),
    Column("status", Text, nullable=False),
    Column("activity", Text, nullable=False),
    Column("release", BigInteger, nullable=False),
    Column("why", Text, nullable=False),
    Column("boot", Text, nullable=False),
    Column("capability", JSON),
    Column("seen_sequence", BigInteger, nullable=False),  # order of the messages received
    Column("seen_at", Text, nullable=False),
    Column("first_seen_at", Text, nullable=False),
    Column("quarantine", Text, nullable=False, default=""),  # reason, or ""
    Column("revoked", Boolean, nullable=False, default=False),
    Column("rejections", Integer, nullable=False, default=0),  # rejected reports since it was last readmitted
    PrimaryKeyConstraint("fleet", "device"),
)

runs = Table(
    "runs",
    metadata,
    Column("run", Text, primary_key=True),
    Column("fleet", Text, nullable=False),
    Column("method", Text, nullable=False),
    Column("dataset", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("rounds", Integer, nullable=False),
    Column("folder", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("desired", Text, nullable=False),
    Column("created_at", Text, nullable=False),
    Column("ended_at", Text, nullable=False),
)

rounds = Table(
    "rounds",
    metadata,
    Column("run", Text),
    Column("round", Integer),
    Column("selected", Integer, nullable=False),
    Column("responded", Integer, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("bytes_down", BigInteger, nullable=False),
    Column("bytes_up", BigInteger, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("ended_at", Text, nullable=False),
    PrimaryKeyConstraint("run", "round"),
)

requests = Table(
    "requests",
    metadata,
    Column("fleet", Text),
    Column("device", Text),
    Column("id", Text),  # of the assignment and of its report
    Column("run", Text, nullable=False),
    Column("round", Integer, nullable=False),
    Column("mode", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("requested_at", Text, nullable=False),
    Column("ended_at", Text, nullable=False),
    PrimaryKeyConstraint("fleet", "device", "id"),
)
Index("requests_by_round", requests.c.run, requests.c.round)

reports = Table(
    "reports",
    metadata,
    Column("fleet", Text),
    Column("device", Text),
    Column("id", Text),  # idempotency key: a stored report is not counted again
    Column("run", Text, nullable=False),
    Column("round", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("samples", BigInteger, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("before", Float),
    Column("after", Float),
    Column("release", BigInteger, nullable=False),
    Column("head", Text, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("bytes_down", BigInteger, nullable=False),
    Column("bytes_up", BigInteger, nullable=False),
    Column("error", Text, nullable=False),
    Column("received_at", Text, nullable=False),
    PrimaryKeyConstraint("fleet", "device", "id"),
)
Index("reports_by_run", reports.c.run, reports.c.round)

rejections = Table(
    "rejections",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("fleet", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("run", Text, nullable=False),
    Column("round", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Column("received_at", Text, nullable=False),
)
Index("rejections_by_device", rejections.c.fleet, rejections.c.device)

releases = Table(
    "releases",
    metadata,
    Column("fleet", Text),
    Column("release", BigInteger),
    Column("run", Text, nullable=False),
    Column("round", Integer, nullable=False),
    Column("method", Text, nullable=False),
    Column("extractor", Text, nullable=False),  # sha256
    Column("bytes", BigInteger, nullable=False),
    Column("published_at", Text, nullable=False),
    PrimaryKeyConstraint("fleet", "release"),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("fleet", Text, nullable=False),
    Column("release", BigInteger, nullable=False),
    Column("previous", BigInteger, nullable=False),  # target of a rollback, 0: none
    Column("plan", JSON, nullable=False),
    Column("desired", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("stage", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("version", Integer, nullable=False),  # increases with every change, for compare-and-set
    Column("created_at", Text, nullable=False),
    Column("changed_at", Text, nullable=False),
)

round_requests = Table(
    "round_requests",
    metadata,
    Column("fleet", Text),
    Column("id", Text),
    Column("content", JSON, nullable=False),
    PrimaryKeyConstraint("fleet", "id"),
)

report_chunks = Table(
    "report_chunks",
    metadata,
    Column("fleet", Text),
    Column("device", Text),
    Column("id", Text),
    Column("index", Integer),
    Column("payload", LargeBinary, nullable=False),
    PrimaryKeyConstraint("fleet", "device", "id", "index"),
)

shared_reports = Table(
    "shared_reports",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("fleet", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("run", Text, nullable=False),
    Column("round", Integer, nullable=False),
    Column("report", JSON, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("payload", LargeBinary),
    UniqueConstraint("fleet", "device", "id", name="shared_report_once"),
)
