"""The last secure sum of each device."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "sums",
        sa.Column("fleet", sa.Text, nullable=False),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("opened", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("fleet", "device"),
    )
