"""A folder's files are listed with links to folders followed once, without what operating systems leave in it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import edge_fl
from edge_fl.files.folder import ABOVE, BROKEN_LINK, CIRCLE, READ_ALREADY, SYSTEM_FILES, SYSTEM_FOLDERS, walk

SYSTEM = (
    "@eaDir/1.jpg/SYNOPHOTO_THUMB.jpg", "__MACOSX/._1.jpg", "$RECYCLE.BIN/1.jpg", "System Volume Information/x", "lost+found/1.jpg",
    ".Trash-1000/files/1.jpg", "#recycle/1.jpg", "@Recycle/1.jpg", "#snapshot/1.jpg", ".Spotlight-V100/store", "Thumbs.db", "._1.jpg",
    "desktop.ini", ".DS_Store",
)  # fmt: skip


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def names(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in walk(root).files]


def reasons(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): reason for path, reason in walk(root).skipped}


def test_what_operating_systems_leave_is_ignored_at_every_depth_and_counted(tmp_path: Path) -> None:
    for name in SYSTEM:
        touch(tmp_path / name)
        touch(tmp_path / "cat" / "deep" / name)
    touch(tmp_path / "cat" / "1.jpg")
    touch(tmp_path / "recycle" / "2.jpg")  # somebody's own word
    found = walk(tmp_path)
    assert names(tmp_path) == ["cat/1.jpg", "recycle/2.jpg"] and found.folders == ["cat", "recycle"]
    assert found.skipped == [] and found.system.total() == 2 * len(SYSTEM)
    assert found.system["@eaDir"] == found.system["._*"] == found.system[".trash-*"] == 2


def test_the_documentation_lists_every_name_of_a_system() -> None:
    page = (Path(edge_fl.__file__).parents[1] / "docs" / "devices.md").read_text("utf-8")
    listed = page.partition("**System folders**")[2].partition("\n\n")[0].lower()
    found = set(re.findall(r"`([^`]+)`", listed))
    assert found == {name.strip() for name in (*SYSTEM_FOLDERS, *SYSTEM_FILES)}


@pytest.mark.parametrize("name", ["@EADIR", "Lost+Found", "thumbs.DB"])
def test_names_of_systems_are_known_in_any_case(name: str, tmp_path: Path) -> None:
    if name.endswith("DB"):
        touch(tmp_path / name)
    else:
        (tmp_path / name).mkdir()
    assert walk(tmp_path).system == {name: 1}


def test_links_to_folders_are_followed_also_to_other_places(tmp_path: Path) -> None:
    touch(tmp_path / "disk" / "birds" / "1.jpg")
    touch(tmp_path / "disk" / "birds" / "more" / "2.jpg")
    touch(tmp_path / "data" / "cat" / "3.jpg")
    (tmp_path / "data" / "bird").symlink_to(tmp_path / "disk" / "birds")
    (tmp_path / "link").symlink_to("data")
    for root in (tmp_path / "data", tmp_path / "link"):
        assert names(root) == ["bird/1.jpg", "bird/more/2.jpg", "cat/3.jpg"]
        assert walk(root).folders == ["bird", "cat"] and not walk(root).skipped


def test_every_folder_is_read_once_and_nothing_around_the_root(tmp_path: Path) -> None:
    root = tmp_path / "data"
    touch(root / "cat" / "1.jpg")
    touch(tmp_path / "disk" / "a" / "b" / "2.jpg")
    (root / "again").symlink_to(root / "cat")
    (root / "cat" / "up").symlink_to("..")
    (root / "around").symlink_to(tmp_path)
    (root / "inner").symlink_to(tmp_path / "disk" / "a" / "b")
    (root / "outer").symlink_to(tmp_path / "disk" / "a")
    assert names(root) == ["cat/1.jpg", "inner/2.jpg"] and walk(root).folders == ["cat", "inner", "outer"]
    assert reasons(root) == {
        "again": READ_ALREADY,
        "cat/up": READ_ALREADY,
        "around": ABOVE,
        "outer/b": READ_ALREADY,
    }


def test_links_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    (tmp_path / "gone.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "a.jpg").symlink_to("b.jpg")
    (tmp_path / "b.jpg").symlink_to("a.jpg")
    (tmp_path / "folder").symlink_to("nowhere/folder")
    assert reasons(tmp_path) == {
        "gone.jpg": BROKEN_LINK,
        "a.jpg": CIRCLE,
        "b.jpg": CIRCLE,
        "folder": BROKEN_LINK,
    }
    assert walk(tmp_path / "nowhere").skipped == [(tmp_path / "nowhere", "unreadable folder")]
    assert walk(tmp_path / "a.jpg").files == []


def test_names_that_are_not_utf8_are_listed(tmp_path: Path) -> None:
    for name in (b"caf\xe9.jpg", b"a\nb.jpg", b"x" * 255):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).touch()
    assert [os.fsencode(path.name) for path in walk(tmp_path).files] == [
        b"a\nb.jpg",
        b"caf\xe9.jpg",
        b"x" * 255,
    ]


def test_a_folder_is_listed_in_any_locale(tmp_path: Path) -> None:
    (tmp_path / "müll").mkdir()
    touch(tmp_path / "müll" / os.fsdecode(b"caf\xe9.jpg"))
    code = (
        "import sys; from pathlib import Path; from edge_fl.files import folder, paths\n"
        "print(*(paths.text(path) for path in folder.walk(Path(sys.argv[1])).files))"
    )
    environment = {**os.environ, "LC_ALL": "POSIX", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, env=environment)
    assert done.stdout.decode().strip() == f"{tmp_path}/müll/caf\\xe9.jpg", done.stderr
