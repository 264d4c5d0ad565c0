"""The ids of the registry for its fleets."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Add the table; the next server of a fleet draws its id."""
    op.create_table(
        "fleets", sa.Column("fleet", sa.Text, primary_key=True), sa.Column("id", sa.Text, nullable=False)
    )
