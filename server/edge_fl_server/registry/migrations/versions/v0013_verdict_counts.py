"""How many rounds had each outcome of the round gate."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "verdict_counts",
        sa.Column("fleet", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("rounds", sa.BigInteger, nullable=False),
        sa.Column("named", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("fleet", "outcome"),
    )
