"""The accounts of a flashed board: the agent's, the Pi's user in its group, and root, each with real commands on real files."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edge_fl.cli import main
from edge_fl.files import shared
from edge_fl_devices.board.installation import LABEL_SERVICE, UNITS
from edge_fl_devices.config import DeviceBroker, DeviceConfig, remember
from edge_fl_devices.doctor import run_checks
from edge_fl_maker.upkeep.uninstalling import uninstall
from tests.accounts import ROOT, Account, account, interpreter, packages, reachable
from tests.devices.images import X, Y

POOL = """
import sys
from pathlib import Path
from edge_fl_maker.capture.pools import Pool
from edge_fl_devices.config import CaptureConfig
from edge_fl_maker.labelling.moves import Moves
do, folder, data, *rest = sys.argv[1:]
folder, data = Path(folder), Path(data)
pool = Pool(folder / "unlabelled", CaptureConfig())
if do == "capture":
    added = pool.add(Path(rest[0]).read_bytes(), rest[0])
    assert added.name, added
    print(added.name)
else:
    moves = Moves(pool, data, folder)
    if do == "class":
        moves.add_class(rest[0])
    else:
        print(moves.label(*rest))
"""


@dataclass(frozen=True)
class Board:
    """A device's folder with a served head, its pictures, a folder for new pictures, and the accounts."""

    home: Path
    folder: Path
    pictures: Path
    agent: Account
    user: Account

    def account(self, name: str) -> Account:
        return {"agent": self.agent, "user": self.user, "root": ROOT}[name]

    def picture(self, seed: int) -> Path:
        path = self.home / f"{seed}.png"
        blocks = np.random.default_rng(seed).integers(0, 255, (8, 8), np.uint8)
        Image.fromarray(blocks.repeat(8, 0).repeat(8, 1)).save(path)
        path.chmod(0o644)
        return path

    def not_the_agents(self) -> list[str]:
        """What the agent's account could not use in its own folder."""
        return [str(path) for path in self.folder.rglob("*") if path.lstat().st_uid != self.agent.uid]

    def doctor(self, who: Account) -> dict[str, Any]:
        code = (
            "import json, sys, dataclasses; from edge_fl_devices.config import DeviceConfig;"
            " from edge_fl_devices.doctor import run_checks;"
            " config = DeviceConfig('pi-1', f'folder:{sys.argv[2]}', folder=sys.argv[1]);"
            " print(json.dumps([dataclasses.asdict(r) for r in run_checks(config, only=['accounts'])]))"
        )
        found = who.python("-c", code, self.folder, self.pictures).stdout
        return {result["check"]: result for result in json.loads(found)}


@pytest.fixture
def board(folder: Path, tmp_path: Path) -> Iterator[Board]:
    with account() as agent, account(group=agent.name) as user:
        home = reachable(tmp_path)
        pictures, own = home / "images", home / "device"
        shutil.copytree(folder, own, symlinks=True)
        for label in ("a", "b"):
            (pictures / label).mkdir(parents=True)
        for number in range(8):
            Image.fromarray(X[number, 0]).save(pictures / "ab"[Y[number]] / f"{number}.png")
        remember(
            DeviceConfig(
                "pi-1", f"folder:{pictures}", folder=str(own), broker=DeviceBroker(port=1), watch_s=0
            )
        )
        subprocess.run(["chown", "-R", f"{agent.name}:", own], check=True)
        own.chmod(0o700)
        subprocess.run(["chown", "-R", f"{user.name}:", pictures], check=True)
        yield Board(home, own, pictures, agent, user)


def test_every_account_labels_reads_and_deletes_what_every_other_one_has_made(board: Board) -> None:
    shared.share(board.pictures, board.agent.name)
    ways = product(("agent", "root"), ("agent", "root"), ("agent", "user", "root"))
    for seed, (capturer, labeller, creator) in enumerate(ways):
        class_name = f"class-{seed}"
        if creator == "user":  # the agent's own folder is not for the user
            board.user.run("mkdir", str(board.pictures / class_name))
        else:
            made = ("class", board.folder, board.pictures, class_name)
            board.account(creator).python("-c", POOL, *made)
        add = ("capture", board.folder, board.pictures, board.picture(seed))
        name = board.account(capturer).python("-c", POOL, *add, umask=0o077).stdout.strip()
        label = ("label", board.folder, board.pictures, name, class_name)
        path = board.account(labeller).python("-c", POOL, *label, umask=0o077).stdout.strip()
        for reader in ("agent", "user", "root"):
            board.account(reader).run("sh", "-c", f"cat {path} >/dev/null")
        board.account(("agent", "user", "root")[seed % 3]).run("rm", path)
        board.account(("user", "root", "agent")[seed % 3]).run("rmdir", str(board.pictures / class_name))
    assert board.not_the_agents() == []
    assert board.user.run("ls", str(board.folder), check=False).returncode, "the agent's folder is private"


@pytest.mark.parametrize("who", ["root", "agent"])
def test_doctor_really_tries_as_the_agent_and_its_remedy_works(board: Board, who: str) -> None:
    found = board.doctor(board.account(who))["data folder"]
    assert found["state"] == "failed" and board.agent.name in found["found"]
    assert "cannot write (Permission denied)" in found["found"]
    assert main(["device", "share", "--dir", str(board.folder), "--group", board.agent.name]) == 0
    assert board.doctor(board.account(who))["data folder"]["state"] == "ok"
    hidden = board.pictures / "a" / "hidden.png"
    hidden.write_bytes(b"x")
    hidden.chmod(0o600)
    found = board.doctor(board.account(who))["data folder"]
    assert f"{hidden}: cannot read" in found["found"]
    assert not list(board.pictures.rglob(".edge-fl-*")), "nothing is left behind"


def test_doctor_names_the_folder_that_the_agent_may_not_enter(board: Board) -> None:
    board.home.chmod(0o711)
    above = board.pictures.parent
    shared.share(board.pictures, board.agent.name)
    os.chown(board.pictures, board.user.uid, board.user.gid)
    board.pictures.chmod(0o700)
    found = board.doctor(ROOT)["data folder"]
    assert found["state"] == "failed" and "Permission denied" in found["found"]
    locked = above / "locked"
    locked.mkdir(mode=0o700)
    board.pictures.rename(locked / "images")
    found = Board(board.home, board.folder, locked / "images", board.agent, board.user).doctor(ROOT)[
        "data folder"
    ]
    assert f"may not enter {locked}" in found["remedy"] and "/srv/images" in found["remedy"]


def test_doctor_names_what_root_left_and_its_remedy_works(board: Board) -> None:
    (board.folder / "left").write_text("x")
    found = board.doctor(ROOT)["own folder"]
    assert found["state"] == "failed" and f"{board.folder / 'left'} (root)" in found["found"]
    subprocess.run(found["remedy"].removeprefix("sudo ").split(), check=True)
    assert board.doctor(ROOT)["own folder"]["state"] == "ok"


def test_the_pis_user_is_told_to_use_sudo(board: Board) -> None:
    found = board.doctor(board.user)["account"]
    assert found["state"] == "failed" and found["remedy"] == "sudo edge-fl device doctor"
    for command in (["status"], ["predict", "x"], ["serve"], ["backup", "x"], ["share"]):
        device = ("-m", "edge_fl", "device", *command, "--dir", board.folder)
        done = board.user.python(*device, check=False)
        assert done.returncode == 4, done.stderr
        assert "may not" in done.stderr and f"expected the account {board.agent.name}" in done.stderr


def test_commands_of_root_leave_nothing_that_the_agent_cannot_use(board: Board, tmp_path: Path) -> None:
    option = ["--dir", str(board.folder)]
    for command in (
        ["status", *option],
        ["predict", str(board.pictures), *option],
        ["backup", str(tmp_path / "backup"), *option],
        ["reset", "--yes", *option],
        ["restore", str(tmp_path / "backup"), "--yes", *option],
    ):
        (board.folder / "lock").unlink(missing_ok=True)
        assert main(["device", *command]) in (0, 1), command
        assert board.not_the_agents() == [], command
    run_checks(
        DeviceConfig("pi-1", f"folder:{board.pictures}", folder=str(board.folder)), only=["data", "model"]
    )
    assert board.not_the_agents() == []
    board.agent.python("-m", "edge_fl", "device", "status", *option)


def test_the_label_service_of_root_leaves_nothing_that_the_agent_cannot_use(board: Board) -> None:
    serve = [*interpreter(), "-m", "edge_fl", "device", "serve", "--listen", "0.0.0.0", "--port", "0"]
    with _started([*serve, "--dir", str(board.folder)]) as child:
        assert child.stderr
        for line in child.stderr:
            if "/label" in line:
                break
        time.sleep(0.5)
    assert (board.folder / "token").stat().st_mode & 0o777 == 0o600
    assert board.not_the_agents() == []


def test_an_agent_that_root_starts_runs_as_the_owner_of_its_folder(board: Board) -> None:
    command = [*interpreter(), "-m", "edge_fl", "device", "run", "--id", "pi-1", "--port", "1"]
    command += ["--data", str(board.pictures), "--dir", str(board.folder)]
    with _started(command) as child:
        assert child.stderr
        assert f"running as {board.agent.name}" in child.stderr.readline()
        status = Path(f"/proc/{child.pid}/status").read_text()
        (uids,) = (line.split()[1:] for line in status.splitlines() if line.startswith("Uid:"))
        assert set(uids) == {str(board.agent.uid)}
    assert board.not_the_agents() == []


@contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A program of root that gets SIGTERM at the end of the block."""
    environment = {"PATH": os.environ["PATH"], **packages()}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/", env=environment) as child:
        try:
            yield child
        finally:
            child.send_signal(signal.SIGTERM)
            child.communicate(timeout=60)


def test_label_switches_the_service_and_prints_the_address_with_its_token(board: Board) -> None:
    """With a systemctl that keeps a note, and a folder of units of this process's own."""
    if not shutil.which("unshare"):
        pytest.skip("no unshare")
    bin_folder = board.home / "bin"
    bin_folder.mkdir()
    systemctl = bin_folder / "systemctl"
    systemctl.write_text(
        f'#!/bin/sh\necho "$@" >>{board.home}/called\ncase "$1" in\nenable) touch {board.home}/on ;;\n'
        f"disable) rm {board.home}/on ;;\nis-active) test -e {board.home}/on ;;\nesac\n"
    )
    systemctl.chmod(0o755)
    units = f"mount -t tmpfs none {UNITS} && touch {UNITS}/{LABEL_SERVICE} && exec "
    label = f"{interpreter()[0]} -m edge_fl device label --dir {board.folder} "

    def run(switch: str) -> subprocess.CompletedProcess[str]:
        path = f"{bin_folder}:{os.environ['PATH']}"
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", units + label + switch],
            env={"PATH": path, **packages()},
            capture_output=True,
            text=True,
            check=False,
        )
        if "mount:" in done.stderr:
            pytest.skip("no mounts here")
        return done

    assert "is off" in run("").stderr
    done = run("on")
    assert done.returncode == 0, done.stderr
    token = (board.folder / "token").read_text().strip()
    assert f".local:8000/label#token={token}" in done.stdout
    assert board.not_the_agents() == []
    assert run("").stdout == done.stdout
    assert "is off" in run("off").stderr
    called = (board.home / "called").read_text()
    assert f"enable --now {LABEL_SERVICE}" in called and f"disable --now {LABEL_SERVICE}" in called


def test_after_an_uninstall_the_pictures_belong_to_their_owner_alone(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edge_fl_maker.upkeep import uninstalling

    monkeypatch.setattr(uninstalling, "ACCOUNT", board.agent.name)
    shared.share(board.pictures, board.agent.name)
    board.agent.run("sh", "-c", f"mkdir {board.pictures}/new && touch {board.pictures}/new/a.png")
    (tmp_path / "etc/edge-fl").mkdir(parents=True)
    (tmp_path / "etc/edge-fl/config.toml").write_text(f'data = "folder:{board.pictures}"\n')
    uninstall([tmp_path / "etc/edge-fl"], tmp_path)
    for path in (board.pictures, *board.pictures.rglob("*")):
        assert (path.stat().st_uid, path.stat().st_gid) == (board.user.uid, board.user.gid), path
        assert not path.stat().st_mode & 0o2000
