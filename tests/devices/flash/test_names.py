"""File names that a bundle's target cannot hold are rejected before anything is removed or written."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from edge_fl.cli import main
from edge_fl.errors import ConfigError
from edge_fl_devices.flash.bundle import FOLDER, MANIFEST, File
from edge_fl_devices.flash.card_contents import require_names
from edge_fl_devices.flash.targets.folder import BootFolder
from edge_fl_devices.flash.targets.image import Image
from tests.devices.flash import cards
from tests.devices.flash.test_targets import MakeCard, MakeContents, card, flash

__all__ = ["card"]  # a fixture
NAMED = [
    ("cat/12:30.jpg", "contains :, which FAT cannot hold"),
    ('cat/the "best".jpg', 'contains ", which'),
    ("cat/a\\b.jpg", r"contains \\, which"),
    ("what?/1.jpg", r"'what\?' \(contains \?, which FAT cannot hold\)"),
    ("cat/\U0001f600.jpg", "contains \U0001f600, which"),
    ("cat/1.jpg.", "ends in a dot or space"),
    ("cat /1.jpg", "'cat ' .ends in a dot or space"),
    ("CON/1.jpg", "'CON' .reserved for a device"),
    ("cat/lpt1.jpg", "reserved for a device"),
    (f"cat/{'x' * 252}.jpg", "256 characters, FAT holds 255"),
    ("cat/line\nbreak.jpg", r"'cat/line\\nbreak.jpg' .control characters"),
    ("cat/\udcff.jpg", r"'cat/\\udcff.jpg' .control characters, or not UTF-8"),
]


@pytest.mark.parametrize(("path", "why"), NAMED)
def test_a_name_that_fat_cannot_hold_is_rejected(path: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        require_names(["cat/1.jpg", path], "mine", fat=True)
    assert str(caught.value).endswith("; nothing was written") and "cat/1.jpg'" not in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [("cat/1.jpg", "cat/1.JPG"), ("Dog/1.jpg", "dog/2.jpg"), ("KÖLN/1.jpg", "köln/2.jpg")],
)
def test_names_that_differ_only_in_case_are_rejected(first: str, second: str) -> None:
    with pytest.raises(ConfigError, match="FAT does not distinguish it from"):
        require_names([first, second], "mine", fat=True)
    require_names([first, second], "mine", fat=False)


def test_only_a_name_that_no_manifest_holds_is_rejected_for_other_targets() -> None:
    for path, why in NAMED:
        if "control" in why:
            with pytest.raises(ConfigError, match=why):
                require_names([path], "mine", fat=False)
        else:
            require_names([path], "mine", fat=False)


def test_many_names_are_summarised() -> None:
    with pytest.raises(
        ConfigError, match=r"'cat/4:' \(contains :, which FAT cannot hold\) and 3 more; expected other names"
    ):
        require_names([f"cat/{number}:" for number in range(8)], "mine", fat=True)


def with_pictures(contents: MakeContents, paths: list[str], picture: Path) -> MakeContents:
    images = tuple((path, picture) for path in paths)
    return lambda pythons: replace(contents(pythons), images=images)


def test_unusual_names_are_written_replaced_and_removed(
    card: MakeCard, contents: MakeContents, tmp_path: Path
) -> None:
    names = ["photo[1].jpg", "Foto (2) #1 {a}~&+,;=.jpg", "größer 日本.jpg", f"{'x' * 251}.jpg"]
    paths = [f"{folder}/{name}" for folder in ("Köln", "cat [old]") for name in names]
    target, picture = card(cards.BOOKWORM), tmp_path / "picture.jpg"
    for content in (b"a picture", b"another picture"):
        picture.write_bytes(content)
        written = flash(target, with_pictures(contents, paths, picture))
        assert {f"{FOLDER}/images/{path}" for path in paths} <= {*written}
        assert {target.read(f"{FOLDER}/images/{path}") for path in paths} == {content}
    similar = f"{FOLDER}/images/Köln/photo1.jpg"  # matches photo[1].jpg as a pattern
    target.write([File(similar, b"kept")])
    flash(target, contents)
    assert {target.read(f"{FOLDER}/images/{path}") for path in paths} == {None}
    assert target.read(similar) == b"kept"


@pytest.mark.skipif(not shutil.which("mformat"), reason="no mtools here")
def test_names_do_not_depend_on_the_locale(
    contents: MakeContents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture, image = tmp_path / "picture.jpg", cards.image(tmp_path / "sd.img", cards.BOOKWORM)
    picture.write_bytes(b"a picture")
    monkeypatch.setenv("LC_ALL", "C")
    flash(Image(image), with_pictures(contents, ["Köln/日本.jpg"], picture))
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert "::/edge-fl/images/Köln/日本.jpg" in cards.mtools(image, "mdir", "-b", "-/", "::/edge-fl").decode()


@pytest.mark.parametrize("kind", ["folder", "image"])
def test_a_card_with_a_bundle_keeps_it_when_a_new_name_is_rejected(
    kind: str, wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "image" and not shutil.which("mformat"):
        pytest.skip("no mtools here")
    card = cards.folder(tmp_path / "x", cards.BOOKWORM) if kind == "folder" else None
    card = card or cards.image(tmp_path / "x.img", cards.BOOKWORM)
    target = BootFolder(card) if kind == "folder" else Image(card)
    mine = tmp_path / "mine/cat"
    mine.mkdir(parents=True)
    (mine / "1.jpg").write_bytes(b"a picture")
    command = ["flash", "--id", "pi-07", "--insecure", "--host", "192.168.1.10", "--wheels", str(wheels)]
    command += ["--images", str(mine.parent)]
    assert main([*command, "--boot", str(card)]) == 0
    before = target.read(MANIFEST)
    (mine / "1.jpg").rename(mine / "1:2.jpg")
    capsys.readouterr()
    assert main([*command, "--boot", str(card)]) == 4
    said = capsys.readouterr().err
    assert "'cat/1:2.jpg' (contains :, which FAT cannot hold); expected other names; nothing was" in said
    assert target.read(MANIFEST) == before and target.read(f"{FOLDER}/images/cat/1.jpg") == b"a picture"
    assert main([*command, "--out", str(tmp_path / "out")]) == 0  # no FAT
    assert (tmp_path / "out" / FOLDER / "images/cat/1:2.jpg").exists()
