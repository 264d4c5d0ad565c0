"""What Alembic runs for every upgrade: the steps of `versions/`, on the connection that `Database.open` hands over."""

from __future__ import annotations

from alembic import context
from sqlalchemy import text

from server.registry.tables import metadata

LOCK = 0xEDFE  # of PostgreSQL: servers that start together upgrade one after the other

connection = context.config.attributes["connection"]
if connection.dialect.name == "postgresql":
    connection.execute(text(f"SELECT pg_advisory_xact_lock({LOCK})"))
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
