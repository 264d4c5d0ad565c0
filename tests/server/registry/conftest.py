"""Registry tests run on SQLite in memory, SQLite in a file and, if Debian's package is installed, PostgreSQL."""

import pytest


@pytest.fixture(params=["memory", "file", "postgresql"])
def database_url(request, tmp_path):
    if request.param == "memory":
        return "sqlite://"
    if request.param == "file":
        return str(tmp_path / "registry.sqlite")
    return request.getfixturevalue("new_postgresql_database")()
