"""Selections from a registry run on the same databases as the registry's own tests."""

from tests.server.registry.conftest import database_url  # noqa: F401
