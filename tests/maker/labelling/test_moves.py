"""Pictures move between the pool and the folders of their classes; none is lost, whatever happens in between."""

import multiprocessing
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_fl.errors import ArtefactError, DataError
from edge_fl.files import atomic
from edge_fl_maker.capture.pools import Pool
from edge_fl_maker.labelling import moves as module
from edge_fl_maker.labelling.moves import Moves, shortened
from edge_fl_maker.labelling.session import FORGOTTEN_S, OFFER_S, Offers
from tests.maker.labelling.fruit import CAPTURE, fruit


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    pool = Pool(tmp_path / "pi" / "unlabelled", CAPTURE)
    for number in range(3):
        assert pool.add(fruit(number, 0), f"camera {number}").name
    return pool


@pytest.fixture
def moves(pool: Pool, tmp_path: Path) -> Moves:
    return Moves(pool, tmp_path / "images", tmp_path / "pi")


def everything(folder: Path) -> dict[str, list[str]]:
    """Folders of each picture by name."""
    found: dict[str, list[str]] = {}
    for path in folder.rglob("*.png"):
        found.setdefault(path.name, []).append(path.parent.name)
    return found


def test_a_label_moves_the_picture_and_undo_moves_it_back(moves: Moves, pool: Pool, tmp_path: Path) -> None:
    first = pool.names()[0]
    content = pool.path(first).read_bytes()
    path = moves.label(first, "apple")
    assert path == tmp_path / "images" / "apple" / first and path.read_bytes() == content
    assert first not in pool.names()
    moves.put_back(path)
    assert pool.path(first).read_bytes() == content and not path.exists()


def test_a_label_goes_into_the_folder_that_has_the_class_in_another_unicode_form(
    moves: Moves, pool: Pool, tmp_path: Path
) -> None:
    apart = unicodedata.normalize("NFD", "müll")
    (tmp_path / "images" / apart).mkdir(parents=True)
    first, second, _ = pool.names()
    assert moves.label(first, "müll").parent == tmp_path / "images" / apart
    assert moves.label(second, "glas").parent == tmp_path / "images" / "glas"


def test_a_label_goes_into_a_folder_on_another_disk(moves: Moves, pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "apple").symlink_to(tmp_path / "disk")
    first = pool.names()[0]
    assert moves.label(first, "apple").exists() and (tmp_path / "disk" / first).is_file()


def test_a_link_among_the_pictures_of_the_pool_shows_nothing(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("not a picture")
    (pool.folder / "link.jpg").symlink_to(tmp_path / "secret")
    assert "link.jpg" not in pool.names() and len(pool.names()) == 3
    with pytest.raises(DataError, match="not among the files"):
        pool.path("link.jpg")


def test_a_discarded_picture_can_be_put_back_until_the_next_start(
    moves: Moves, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_DISCARDED", 1)
    first, second, third = pool.names()
    moves.put_back(moves.discard(first))
    assert first in pool.names()
    old, new = moves.discard(second), moves.discard(third)
    assert not old.exists() and new.exists()
    Moves(pool, tmp_path / "images", tmp_path / "pi")
    with pytest.raises(DataError, match=f"{third}: moved or deleted since"):
        moves.put_back(new)
    assert pool.names() == [first]


def test_a_picture_that_was_labelled_or_deleted_meanwhile_is_refused(moves: Moves, pool: Pool) -> None:
    first, second, _ = pool.names()
    moves.label(first, "apple")
    pool.remove(second)
    for name in (first, second, "../pi/lock", "nothing.png"):
        with pytest.raises(DataError, match="not among the files without labels"):
            moves.label(name, "banana")
    assert {path.name for path in moves.data.iterdir()} == {"apple"}


def label_in_child(folder: Path, name: str, class_name: str, start: Callable[[], object]) -> None:
    start()
    try:
        Moves(Pool(folder / "pi" / "unlabelled", CAPTURE), folder / "images", folder / "pi").label(
            name, class_name
        )
    except DataError:
        os._exit(3)
    os._exit(0)


def test_of_two_processes_that_label_a_picture_one_is_refused(pool: Pool, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for name in pool.names():
        barrier = context.Barrier(2)
        children = [
            context.Process(target=label_in_child, args=(tmp_path, name, class_name, barrier.wait))
            for class_name in ("apple", "banana")
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(20)
        assert sorted(child.exitcode or 0 for child in children) == [0, 3]
        assert len(everything(tmp_path)[name]) == 1


def test_on_a_full_disk_every_picture_stays_where_it_was(
    moves: Moves, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = pool.names()
    labelled = moves.label(first, "apple")
    before = everything(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "link", full)
    monkeypatch.setattr(atomic.shutil, "copyfile", full)
    monkeypatch.setattr(atomic.os, "fsync", full)
    for act in (
        lambda: moves.label(second, "apple"),
        lambda: moves.discard(second),
        lambda: moves.put_back(labelled),
    ):
        with pytest.raises(ArtefactError, match="enospc"):
            act()
    assert everything(tmp_path) == before


def test_a_picture_that_a_power_cut_left_in_both_places_counts_as_labelled(
    moves: Moves, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pool.names()[0]

    def cut(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "remove", cut)
    with pytest.raises(KeyboardInterrupt):
        moves.label(first, "apple")
    assert sorted(everything(tmp_path)[first]) == ["apple", "unlabelled"]
    monkeypatch.undo()
    moves.settle()
    assert everything(tmp_path)[first] == ["apple"] and len(pool.names()) == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "is empty"),
        ("a/b", "cannot be the name"),
        (".hidden", "cannot be the name"),
        ("apple", "'apple' is already there"),
        ("Apple", "'apple' is already there"),
        ("A\N{COMBINING ACUTE ACCENT}PFEL", "'\xe1pfel' is already there"),
    ],
)
def test_an_unusable_class_name_is_refused(moves: Moves, name: str, reason: str) -> None:
    moves.add_class("apple")
    with pytest.raises(DataError, match=reason):
        moves.add_class(name, ["\xe1pfel"])
    assert [path.name for path in moves.data.iterdir()] == ["apple"]


def test_a_long_name_of_a_class_is_cut_with_a_remark() -> None:
    assert shortened(" Mu\N{COMBINING DIAERESIS}ll ") == ("M\xfcll", "")
    assert shortened("x" * 101) == ("x" * 100, "cut at 100 characters, of 101")
    tomato = "\N{TOMATO}" * 90
    kept, remark = shortened(tomato)  # the name of a folder has at most 255 bytes
    assert len(kept.encode()) == 252 and remark == "cut at 63 characters, of 90"


def test_two_people_see_different_pictures_and_a_screen_stays_as_it_is() -> None:
    offers, order = Offers(), ["a", "b", "c"]
    assert offers.next("me", order, 0) == ["a"] and offers.next("you", order, 0) == ["b"]
    assert offers.next("me", ["c", "b", "a"], 1, 2) == ["a", "c"]
    assert offers.next("you", ["c", "a"], 2) == ["c"]
    assert offers.next("you", ["a"], 3) == []
    assert offers.on_screen("me") == "a" and offers.on_screen("you") == ""
    assert offers.next("you", ["a"], 3 + OFFER_S) == ["a"]
    assert offers.on_screen("me") == "" and offers.on_screen("you") == "a"


def test_a_page_that_was_away_keeps_its_picture_unless_another_one_was_given_it() -> None:
    offers, order = Offers(), ["a", "b"]
    offers.next("me", order, 0)
    offers.next("you", order, 2 * OFFER_S)
    assert offers.on_screen("me") == "" and offers.on_screen("you") == "a"
    assert offers.next("me", order, 2 * OFFER_S) == ["b"]
    offers.show("me", "a", 2 * OFFER_S)  # an undo: it stays where it is
    assert offers.on_screen("me") == "b" and offers.on_screen("you") == "a"
    assert offers.next("me", ["a", "b"], 4 * OFFER_S) == ["b"]  # as before, although its time was over
    offers.next("new", [], 4 * OFFER_S + FORGOTTEN_S + OFFER_S)
    assert offers.on_screen("me") == ""


def test_skipped_pictures_come_last_and_come_back() -> None:
    offers, order = Offers(), ["a", "b"]
    assert offers.next("me", order, 0) == ["a"]
    offers.skip("a")
    assert offers.next("me", order, 0, 2) == ["b", "a"]
    offers.skip("b")
    assert offers.next("me", order, 0, 2) == ["a", "b"]
    offers.restore("b")
    assert offers.next("me", order, 0) == ["b"]
