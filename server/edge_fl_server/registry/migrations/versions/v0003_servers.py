"""The servers of fleets; roll-outs that a newer one replaced are no longer "aborted"."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the table, and rename the state."""
    numbers = [sa.Column(name, sa.BigInteger, nullable=False) for name in ("sequence", "since_s", "beat_s")]
    op.create_table(
        "servers",
        sa.Column("fleet", sa.Text, primary_key=True),
        sa.Column("online", sa.Boolean, nullable=False),
        *numbers,
    )
    rollouts = sa.table("rollouts", sa.column("state"), sa.column("reason"))
    replaced = (rollouts.c.state == "aborted") & rollouts.c.reason.startswith("replaced by release")
    op.execute(sa.update(rollouts).where(replaced).values(state="replaced"))
