"""Alembic's entry point: apply the migrations in `versions/` on the connection that `Database.open` passes."""

from alembic import context

from edge_fl_server.registry.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
