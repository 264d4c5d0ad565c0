"""Devices that were decommissioned or renamed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the column; no device of an earlier version was removed."""
    op.add_column("devices", sa.Column("removed", sa.Text, nullable=False, server_default=""))
