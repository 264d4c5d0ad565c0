"""Commands that only read a registry never create an empty one."""

from pathlib import Path

import pytest
from sqlalchemy import text

from edge_fl.cli import main
from edge_fl.errors import ConfigError, RunError
from edge_fl_server.registry import Database


@pytest.mark.parametrize(
    "command",
    [
        ["fleet", "admit", "pi-07"],
        ["fleet", "list", "--host", "nowhere"],
        ["release", "list"],
        ["release", "rollback", "--host", "nowhere"],
    ],
)
def test_a_mistyped_registry_is_an_error_and_not_a_new_one(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "servre" / "registry.sqlite"
    assert main([*command, "--database", str(path)]) == 4
    error = capsys.readouterr().err
    assert f"registry {path}: not there; expected the one that" in error and error.count("\n") == 1
    assert not path.parent.exists()


def test_a_database_of_something_else_is_an_error(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    other.write_bytes(b"")
    with pytest.raises(ConfigError, match="not a registry of edge-fl"):
        Database.existing(other)
    other.write_bytes(b"no database at all" * 100)
    with pytest.raises(ConfigError, match="file is not a database"):
        Database.existing(other)


@pytest.mark.parametrize("folder", ["server", "a b"])
def test_an_existing_registry_opens_and_is_not_created_again(folder: str, tmp_path: Path) -> None:
    path = tmp_path / folder / "registry.sqlite"
    Database.open(path).close()
    db = Database.existing(path)
    path.unlink()
    db.close()
    with pytest.raises(RunError, match="unable to open"), db.reading() as connection:
        connection.execute(text("SELECT 1"))
    assert not path.exists()
