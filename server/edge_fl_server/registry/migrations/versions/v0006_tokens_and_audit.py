"""Personal tokens of the dashboard, and the audit log, to which rows can only be added."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from edge_fl_server.registry.tables import APPEND_ONLY

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add both tables."""
    op.create_table(
        "tokens",
        *_texts("fleet", "name", "roles", "sha256"),
        sa.Column("expires_s", sa.BigInteger, nullable=False),
        *_texts("created_at", "created_by", "revoked_at", "used_at"),
        sa.PrimaryKeyConstraint("fleet", "name"),
    )
    op.create_index("tokens_by_sha256", "tokens", ["sha256"])
    op.create_table(
        "audit",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        *_texts("at", "fleet", "who", "known_by", "action", "target", "result"),
    )
    op.create_index("audit_by_time", "audit", ["fleet", "at"])
    for statement in APPEND_ONLY[op.get_bind().dialect.name]:
        op.execute(statement)


def _texts(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, nullable=False) for name in names]
