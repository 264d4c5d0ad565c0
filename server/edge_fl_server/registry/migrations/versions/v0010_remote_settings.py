"""The operator's settings of devices."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add the table."""
    columns = [sa.Column(name, sa.Text, nullable=False) for name in ("fleet", "device", "key", "value")]
    serial = sa.Column("serial", sa.BigInteger, nullable=False)
    op.create_table("settings", *columns, serial, sa.PrimaryKeyConstraint("fleet", "device", "key"))
    op.create_index("settings_by_serial", "settings", ["fleet", "serial"])
