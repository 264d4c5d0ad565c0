"""Alerts with their deliveries and silences, and the agent processes of devices."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the tables."""

    def texts(*names: str) -> list[sa.Column[str]]:
        return [sa.Column(name, sa.Text, nullable=False) for name in names]

    def integers(*names: str) -> list[sa.Column[int]]:
        return [sa.Column(name, sa.BigInteger, nullable=False) for name in names]

    key = sa.PrimaryKeyConstraint
    op.create_table(
        "boots", *texts("fleet", "device", "boot"), *integers("at_s"), key("fleet", "device", "boot")
    )
    number = sa.Column("number", sa.Integer, primary_key=True, autoincrement=True)
    named = texts("fleet", "rule", "subject", "text")
    op.create_table("alerts", number, *named, *integers("raised_s", "resolved_s"), key("number"))
    op.create_index("alerts_once", "alerts", ["fleet", "rule", "subject", "resolved_s"], unique=True)
    sent = sa.Column("sent", sa.Boolean, nullable=False)
    op.create_table(
        "alert_deliveries",
        *integers("number"),
        *texts("channel", "event"),
        sent,
        *integers("at_s"),
        key("number", "channel", "event"),
    )
    op.create_table("silences", *texts("fleet", "name"), *integers("until_s"), key("fleet", "name"))
