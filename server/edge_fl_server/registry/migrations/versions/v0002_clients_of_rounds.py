"""The number of clients behind each mean of a round; unknown for the rounds of before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column to the table of rounds."""
    op.add_column("rounds", sa.Column("clients", sa.JSON, nullable=False, server_default="{}"))
