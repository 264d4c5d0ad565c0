"""The tables of the first version: `Database.open` creates them in a new database, so this revision only names that version."""

from __future__ import annotations

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Nothing to change."""
