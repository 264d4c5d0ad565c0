"""Create the first tables: devices, runs, rounds, requests, reports, rejections, releases, roll-outs and shared reports."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create all tables in an empty database."""
    op.create_table(
        "devices",
        *_texts("fleet", "device", "status", "activity", "why", "boot", "seen_at", "first_seen_at"),
        *_texts("quarantine", "blocked_at"),
        *_big_integers("release", "seen_sequence", "dropped"),
        *_integers("rejections"),
        sa.Column("outlier_score", sa.Float(), nullable=False),
        sa.Column("revoked", sa.Boolean(), nullable=False),
        sa.Column("capability", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("fleet", "device"),
    )
    op.create_table(
        "runs",
        *_texts("run", "fleet", "method", "dataset", "source", "folder", "state", "reason", "desired"),
        *_texts("created_at", "ended_at"),
        *_integers("rounds"),
        sa.PrimaryKeyConstraint("run"),
    )
    op.create_table(
        "rounds",
        *_texts("run", "ended_at"),
        *_integers("round", "selected", "responded"),
        *_big_integers("bytes_down", "bytes_up"),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run", "round"),
    )
    op.create_table(
        "requests",
        *_texts("fleet", "device", "id", "run", "mode", "state", "reason", "requested_at", "ended_at"),
        *_integers("round"),
        sa.PrimaryKeyConstraint("fleet", "device", "id"),
    )
    op.create_index("requests_by_round", "requests", ["run", "round"])
    op.create_table(
        "reports",
        *_texts("fleet", "device", "id", "run", "kind", "head", "error", "received_at"),
        *_integers("round"),
        *_big_integers("samples", "release", "bytes_down", "bytes_up"),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("before", sa.Float(), nullable=True),
        sa.Column("after", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("fleet", "device", "id"),
    )
    op.create_index("reports_by_run", "reports", ["run", "round"])
    op.create_table(
        "rejections",
        _number(),
        *_texts("fleet", "device", "id", "run", "reason", "detail", "received_at"),
        *_integers("round"),
    )
    op.create_index("rejections_by_device", "rejections", ["fleet", "device"])
    op.create_table(
        "rejection_counts",
        *_texts("fleet", "reason"),
        *_big_integers("count"),
        sa.PrimaryKeyConstraint("fleet", "reason"),
    )
    op.create_table(
        "releases",
        *_texts("fleet", "run", "method", "extractor", "published_at"),
        *_integers("round"),
        *_big_integers("release", "bytes"),
        sa.PrimaryKeyConstraint("fleet", "release"),
    )
    op.create_table(
        "rollouts",
        _number(),
        *_texts("fleet", "desired", "state", "reason", "created_at", "changed_at"),
        *_integers("stage", "version"),
        *_big_integers("release", "previous"),
        sa.Column("plan", sa.JSON(), nullable=False),
    )
    op.create_table(
        "round_requests",
        *_texts("fleet", "id"),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("fleet", "id"),
    )
    op.create_table(
        "report_chunks",
        *_texts("fleet", "device", "id"),
        *_integers("index"),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("fleet", "device", "id", "index"),
    )
    op.create_table(
        "shared_reports",
        _number(),
        *_texts("fleet", "device", "id", "run", "state", "reason"),
        *_integers("round"),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=True),
        sa.UniqueConstraint("fleet", "device", "id", name="shared_report_once"),
    )


def _number() -> sa.Column[int]:
    return sa.Column("number", sa.Integer(), primary_key=True, autoincrement=True)


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text(), nullable=False) for name in names]


def _integers(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.Integer(), nullable=False) for name in names]


def _big_integers(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger(), nullable=False) for name in names]
