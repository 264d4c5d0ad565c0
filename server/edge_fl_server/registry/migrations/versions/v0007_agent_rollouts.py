"""Roll-outs of agent releases, in the table of those of extractors."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the column to the table of roll-outs."""
    op.add_column("rollouts", sa.Column("subject", sa.Text, nullable=False, server_default="extractor"))
