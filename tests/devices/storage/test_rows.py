"""A file of rows: what is damaged ends it, and the next step takes its place."""

from pathlib import Path

import pytest

from edge_fl_devices.storage.rows import RowFile

ROWS = [b"one", b"", b"three" * 100]


def test_rows_are_read_as_they_were_appended_and_replaced(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "new" / "a.rows")
    assert [*file.read()] == []
    file.append(ROWS[:1])
    file.append(ROWS[1:])
    assert [*RowFile(file.path).read()] == ROWS and file.path.stat().st_mode & 0o777 == 0o600
    file.replace(ROWS[2:])
    file.append(ROWS[:1])
    assert [*RowFile(file.path).read()] == [ROWS[2], ROWS[0]]


@pytest.mark.parametrize("damage", ["cut", "a bit of a row", "a length"])
def test_the_first_damaged_row_ends_the_file_and_is_overwritten(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.rows"
    RowFile(path).replace(ROWS)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        del content[-1]
    else:
        content[-1 if damage == "a bit of a row" else -len(ROWS[2]) - 8] ^= 1
    path.write_bytes(content)
    file = RowFile(path)
    assert [*file.read()] == ROWS[:2]
    file.append([b"next"])
    assert [*RowFile(path).read()] == [*ROWS[:2], b"next"]


def test_a_row_at_which_the_reader_stops_is_overwritten(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "a.rows")
    file.replace(ROWS)
    for row in file.read():
        if not row:
            break
    file.append([b"next"])
    assert [*RowFile(file.path).read()] == [b"one", b"next"]
