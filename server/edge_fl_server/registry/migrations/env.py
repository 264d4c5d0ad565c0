"""Alembic's entry point: apply the migrations in `versions/` on the connection that `Database.open` passes."""

from __future__ import annotations

from alembic import context
from sqlalchemy import text

from edge_fl_server.registry.tables import metadata

LOCK = 0xEDFE  # advisory lock of PostgreSQL: servers that start at the same time migrate one after the other

connection = context.config.attributes["connection"]
if connection.dialect.name == "postgresql":
    connection.execute(text(f"SELECT pg_advisory_xact_lock({LOCK})"))
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
