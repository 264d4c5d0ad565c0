"""Numbered migrations of the registry's tables, applied by Alembic when a registry is opened."""
