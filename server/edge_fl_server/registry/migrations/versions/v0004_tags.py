"""Tags of devices, and saved selectors."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add both tables."""
    for table, key, content in (
        ("tags", ("fleet", "device", "key"), "value"),
        ("groups", ("fleet", "name"), "selector"),
    ):
        columns = [sa.Column(name, sa.Text, nullable=False) for name in (*key, content)]
        op.create_table(table, *columns, sa.PrimaryKeyConstraint(*key))
