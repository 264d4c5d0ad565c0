"""The registry is tested on SQLite, in memory and in a file, and on a real PostgreSQL where Debian's package is installed."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["memory", "file", "postgresql"])
def database_url(request, tmp_path):
    if request.param == "memory":
        return "sqlite://"
    if request.param == "file":
        return str(tmp_path / "registry.sqlite")
    return request.getfixturevalue("new_postgresql_database")()
