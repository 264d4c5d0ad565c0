"""The numbers of the last signed messages of each device."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Add the columns to the table of devices."""
    for name in ("signed_state", "signed_meta"):
        op.add_column("devices", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
