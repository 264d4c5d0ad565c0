"""A file is the old one or the new one, never half of either."""

from pathlib import Path

import pytest

from edge_fl.files import atomic


def test_the_new_content_replaces_the_old(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    atomic.write(target, "old")
    atomic.write(target, b"new")
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_an_interrupted_write_leaves_the_old_file_and_no_leftover(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    atomic.write(target, "old")
    with pytest.raises(RuntimeError), atomic.writing(target) as file:
        file.write(b"half")
        raise RuntimeError("power cut")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_nothing_is_seen_under_the_name_before_the_end(tmp_path: Path) -> None:
    with atomic.writing(tmp_path / "a") as file:
        file.write(b"x")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_bytes() == b"x"


@pytest.mark.parametrize("shared", [True, False])
def test_a_file_is_put_at_a_second_place_also_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "place").write_bytes(b"old")
    if not shared:
        monkeypatch.setattr("os.link", refuse)
    atomic.link(tmp_path / "new", tmp_path / "place")
    assert (tmp_path / "place").read_bytes() == b"new"
    assert (tmp_path / "place").samefile(tmp_path / "new") == shared
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "place"]


def test_a_private_file_is_private_before_anything_is_in_it(tmp_path: Path) -> None:
    with atomic.writing(tmp_path / "key.pem", private=True):
        assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]
    assert (tmp_path / "key.pem").stat().st_mode & 0o777 == 0o600
