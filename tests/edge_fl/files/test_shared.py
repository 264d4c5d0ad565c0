"""What root, the agent's account and the Pi's user make in a shared folder: each can use what the others made, whatever the umask."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import pytest

from edge_fl.files import atomic, shared
from tests.accounts import ROOT, Account, account, reachable

MAKE = """
import os, sys
from pathlib import Path
from edge_fl.files import atomic, shared
folder, name = Path(sys.argv[1]), sys.argv[2]
shared.make_folder(folder / name)
atomic.write(folder / name / "written", "x")
private = folder.parent / f"{name}-private"
if os.access(folder.parent, os.W_OK):
    atomic.write(private, "x", private=True)
else:
    private = folder / f".{name}-private"
    atomic.write(private, "x", private=True)
atomic.link(private, folder / name / "linked")
"""
USE = """
import sys
from pathlib import Path
from edge_fl.files import atomic, shared
folder, name = Path(sys.argv[1]), sys.argv[2]
for file in ("written", "linked"):
    assert (folder / name / file).read_text() == "x"
    atomic.write(folder / name / file, "y")
    (folder / name / file).unlink()
shared.make_folder(folder / name / "more")
(folder / name / "more").rmdir()
(folder / name).rmdir()
"""


@dataclass(frozen=True)
class Board:
    """The pictures of a board, its accounts, and an account that is neither."""

    pictures: Path
    agent: Account
    user: Account
    stranger: Account

    @property
    def accounts(self) -> dict[str, Account]:
        return {"agent": self.agent, "user": self.user, "root": ROOT}


@pytest.fixture(scope="module")
def board() -> Iterator[Board]:
    with (
        account() as agent,
        account(group=agent.name) as user,
        account() as stranger,
    ):
        pictures = reachable(Path("srv")) / "images"
        pictures.mkdir()
        os.chown(pictures, user.uid, user.gid)
        shared.share(pictures, agent.name)
        yield Board(pictures, agent, user, stranger)


@pytest.fixture
def open_path(tmp_path: Path) -> Path:
    return reachable(tmp_path)


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
@pytest.mark.parametrize(("maker", "other"), [*permutations(("agent", "user", "root"), 2)])
def test_what_one_account_makes_every_other_one_reads_replaces_and_deletes(
    board: Board, maker: str, other: str, umask: int
) -> None:
    name = f"{maker}-{other}-{umask}"
    board.accounts[maker].python("-c", MAKE, board.pictures, name, umask=umask)
    folder = board.pictures / name
    assert (folder.stat().st_gid, stat.S_IMODE(folder.stat().st_mode)) == (board.agent.gid, 0o2775)
    for file in ("written", "linked"):
        found = (folder / file).stat()
        assert (found.st_gid, stat.S_IMODE(found.st_mode)) == (board.agent.gid, 0o664), file
        assert found.st_uid == (board.user.uid if maker == "root" else board.accounts[maker].uid)
    board.accounts[other].python("-c", USE, board.pictures, name, umask=umask)
    assert not folder.exists()


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_what_other_programs_make_is_shared_as_well(board: Board, umask: int) -> None:
    """By the default access list: mkdir and cp know nothing of the sharing."""
    probe = board.pictures / "probe"
    other = board.pictures.parent / f"acl-{umask}"
    other.mkdir()
    try:
        os.setxattr(other, shared.DEFAULT_ACL, shared._access_list(0o775))
    except OSError:
        pytest.skip("no access lists on this file system")
    board.user.run("sh", "-c", f"mkdir {probe} && touch {probe}/a.jpg", umask=umask)
    board.agent.run("sh", "-c", f"cat {probe}/a.jpg && echo x > {probe}/a.jpg && rm {probe}/a.jpg")
    board.agent.run("sh", "-c", f"touch {probe}/b.jpg", umask=umask)
    board.user.run("rm", "-r", str(probe))


def test_a_stranger_reads_and_changes_nothing(board: Board) -> None:
    board.agent.python("-c", MAKE, board.pictures, "kept")
    for command in (f"rm {board.pictures}/kept/written", f"mkdir {board.pictures}/x"):
        assert board.stranger.run("sh", "-c", command, check=False).returncode
    board.user.python("-c", USE, board.pictures, "kept")


def test_sharing_covers_what_is_there_and_follows_no_link(board: Board, open_path: Path) -> None:
    outside, pictures = open_path / "outside", open_path / "pictures"
    outside.write_text("secret")
    outside.chmod(0o600)
    (pictures / "cat" / "deep").mkdir(parents=True)
    (pictures / "cat" / "a.jpg").write_text("x")
    (pictures / "cat" / "a.jpg").chmod(0o600)
    (pictures / "cat" / "link").symlink_to(outside)
    (pictures / "cat" / "hard").hardlink_to(outside)
    (pictures / "dogs").symlink_to(open_path)
    os.mkfifo(pictures / "fifo")
    shared.share(pictures, board.agent.name)
    board.agent.run("sh", "-c", f"cat {pictures}/cat/a.jpg && mv {pictures}/cat/a.jpg {pictures}/cat/deep/")
    found = outside.stat()
    assert (found.st_gid, stat.S_IMODE(found.st_mode)) == (0, 0o600)
    shared.unshare(pictures, board.agent.uid, board.agent.gid)
    for path in (pictures, pictures / "cat", pictures / "cat" / "deep" / "a.jpg"):
        assert (path.stat().st_uid, path.stat().st_gid) == (0, 0)
        assert not path.stat().st_mode & stat.S_ISGID


def test_a_folder_of_another_group_is_left_to_it(board: Board, tmp_path: Path) -> None:
    for group, foreign in ((0, False), (board.agent.gid, False), (board.stranger.gid, True)):
        os.chown(tmp_path, 0, group)
        assert shared.is_foreign(tmp_path, board.agent.name) is foreign
    assert shared.main(board.agent.name, str(tmp_path)) == 1
    assert tmp_path.stat().st_gid == board.stranger.gid


def test_what_root_makes_belongs_to_the_owner_of_a_private_folder(board: Board, open_path: Path) -> None:
    home = open_path / "home"
    home.mkdir(mode=0o700)
    os.chown(home, board.agent.uid, board.agent.gid)
    atomic.write(home / "a", "x")
    atomic.write(home / "b", "x", private=True)
    shared.make_folder(home / "c" / "d", 0o700)
    os.close(shared.open_private(home / "lock", os.O_WRONLY))
    board.agent.run("sh", "-c", f"cd {home} && cat a b lock && rm a b lock && rmdir c/d c")


def test_without_a_shared_folder_the_umask_decides(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atomic.write(tmp_path / "a", "x")
        shared.make_folder(tmp_path / "b")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o750
