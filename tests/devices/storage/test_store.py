"""Stored files are whole after a power cut, and unfinished steps repeat with the same result."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from edge_fl import heads
from edge_fl.blob import describe
from edge_fl.errors import InputError
from edge_fl.heads import Head
from edge_fl.heads.probability_calibration import UNCALIBRATED, Calibration
from edge_fl.heads.unknowns import KnownClasses
from edge_fl.wire.messages import Report
from edge_fl_devices.agent.effects import Memory
from edge_fl_devices.agent.outbox import Parcel
from edge_fl_devices.storage.store import OWN_AFTER_PERSONALISING, OWN_AFTER_TRAINING, Store, StoredHead
from tests.accounts import ROOT, account, reachable

SHA = "a" * 64


def parcel(id: str, **changes: object) -> Parcel:
    return Parcel("t", 3, Report(id, "update", "boot-1", 7, **changes), 60.0)  # type: ignore[arg-type]


def head(sha256: str = SHA) -> Head:
    z = np.eye(4, dtype=np.float32)
    return heads.fit("nearest", z, np.array([0, 1, 2, 2]), 5, unit_norm=True, extractor=sha256)


def test_a_new_folder_is_empty(tmp_path: Path) -> None:
    store = Store(tmp_path / "new")
    assert (store.memory(), store.outbox(), store.own("t", 1), store.heads()) == (Memory(), [], None, [])
    assert not (tmp_path / "new").exists()


def test_the_memory_survives_a_restart(tmp_path: Path) -> None:
    memory = Memory(("t-1-0",), ("rel-2",), 7, "server-1")
    Store(tmp_path).remember(memory)
    assert Store(tmp_path).memory() == memory


def test_a_report_and_its_blob_wait_until_they_are_forgotten(tmp_path: Path) -> None:
    store, kept = Store(tmp_path), parcel("t-3-0", blob=describe(b"update"))
    store.keep(kept, b"update")
    store.keep(parcel("t-4-0"))
    assert Store(tmp_path).outbox() == [kept, parcel("t-4-0")] and store.blob("t-3-0") == b"update"
    store.forget("t-3-0")
    assert store.outbox() == [parcel("t-4-0")] and store.blob("t-3-0") is None


def test_a_blob_without_its_report_is_a_leftover(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.keep(parcel("t-3-0"), b"update")
    (tmp_path / "outbox" / "t-3-0.json").unlink()
    (tmp_path / "outbox" / ".t-9-0.json.ab12.part").write_bytes(b"half")
    store.tidy()
    assert list((tmp_path / "outbox").iterdir()) == []


def test_personal_parts_enter_a_round_as_they_left_the_one_before(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.keep_own("t", 3, OWN_AFTER_TRAINING, b"after 3")
    store.keep_own("t", 5, OWN_AFTER_TRAINING, b"after 5")
    assert store.own("t", 5) == b"after 3"  # a second attempt at round 5
    assert store.own("t", 6) == b"after 5"
    assert store.own("t", 3) is None
    assert store.own("t", 5, OWN_AFTER_PERSONALISING) == b"after 5"
    store.keep_own("t", 5, OWN_AFTER_PERSONALISING, b"personal")
    assert store.own("t", 5, OWN_AFTER_PERSONALISING + 1) == b"personal"
    assert store.own("t", 5) == b"after 3"


def test_only_the_last_generations_and_runs_stay(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for round in range(12):
        store.keep_own("t", round, OWN_AFTER_TRAINING, b"x")
    assert len(list((tmp_path / "own" / "t").iterdir())) == 3
    for number in range(9):
        store.keep_own(f"run-{number}", 1, OWN_AFTER_TRAINING, b"x")
        os.utime(tmp_path / "own" / f"run-{number}", (number, number))
    assert len(list((tmp_path / "own").iterdir())) == 4


def test_a_head_comes_back_with_its_release_and_its_report(tmp_path: Path) -> None:
    store, z = Store(tmp_path), np.eye(4, dtype=np.float32)
    store.keep_head(StoredHead(head(), 3, parcel("rel-3")))
    found = Store(tmp_path).head(SHA)
    assert found and (found.release, found.parcel, found.head.extractor) == (3, parcel("rel-3"), SHA)
    assert np.array_equal(found.head.logits(z), head().logits(z)) and store.head("b" * 64) is None
    store.revoke()
    assert store.heads() == []


def test_a_head_comes_back_with_its_calibration_and_an_older_file_has_temperature_1(tmp_path: Path) -> None:
    store, old = Store(tmp_path), Store(tmp_path / "old")
    right = np.arange(30) % 4 > 0
    shares = np.linspace(0.5, 1, 30, dtype=np.float32)
    known = KnownClasses(np.arange(3), np.eye(3, 4, dtype=np.float32), np.ones(4, np.float32))
    calibrated = Calibration(1.5, shares, right, known, shares)
    store.keep_head(StoredHead(head(), 3, parcel("rel-3"), calibration=calibrated))
    found = store.head(SHA)
    assert found and found.calibration.temperature == 1.5 and found.calibration.accuracy == right.mean()
    assert np.array_equal(found.calibration.distances, shares)
    assert np.array_equal(found.calibration.known.apart, known.apart)
    old.keep_head(StoredHead(head(), 3, parcel("rel-3")))
    with safe_open(tmp_path / "old" / "heads" / f"{SHA}.safetensors", "numpy") as file:
        assert not [name for name in file.keys() if "." in name]  # noqa: SIM118
    older = old.head(SHA)
    assert older and older.calibration is UNCALIBRATED


def test_only_the_heads_of_installed_extractors_stay(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for release, sha256 in enumerate(("a" * 64, "b" * 64, "c" * 64), start=1):
        store.keep_head(StoredHead(head(sha256), release, parcel(f"rel-{release}")), {"b" * 64, "c" * 64})
    assert [stored.release for stored in store.heads()] == [2, 3]


def test_a_head_whose_report_did_not_reach_the_outbox_still_reports(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.keep_head(StoredHead(head(), 3, parcel("rel-3")))
    assert store.outbox() == [parcel("rel-3")]
    store.remember(Memory(done=("rel-3",)))
    assert store.outbox() == []


@pytest.mark.parametrize("damage", [b"", b"half", b"\xff" * 100])
def test_damaged_files_count_as_missing(tmp_path: Path, damage: bytes) -> None:
    store = Store(tmp_path)
    store.keep_head(StoredHead(head(), 3, parcel("rel-3")))
    store.remember(Memory(version=7))
    store.keep(parcel("t-3-0"))
    for file in (f"heads/{SHA}.safetensors", "memory.json", "outbox/t-3-0.json"):
        (tmp_path / file).write_bytes(damage)
    assert (store.memory(), store.outbox(), store.heads()) == (Memory(), [], [])


def test_the_device_folder_is_private(tmp_path: Path) -> None:
    with Store(tmp_path / "device").owned():
        assert (tmp_path / "device").stat().st_mode & 0o777 == 0o700


def test_a_folder_belongs_to_one_agent(tmp_path: Path) -> None:
    with Store(tmp_path).owned(), pytest.raises(InputError, match="another agent"), Store(tmp_path).owned():
        pass
    with Store(tmp_path).owned():
        pass


WRITER = """
import sys, itertools
from pathlib import Path
from edge_fl_devices.storage.store import Store, StoredHead
from tests.devices.storage.test_store import head, parcel
store = Store(Path(sys.argv[1]))
print("ready", flush=True)
for n in itertools.count():
    store.keep_own("t", n, 0, b"%012d" % n * 1000)
    store.keep(parcel(f"t-{n}-0"), b"%012d" % n * 1000)
    store.keep_head(StoredHead(head(), n, parcel(f"rel-{n}")))
    store.forget(f"t-{n}-0")
"""


@pytest.mark.parametrize("after_s", [0.01, 0.05, 0.1, 0.2])
def test_a_kill_at_any_moment_leaves_no_half_file(tmp_path: Path, after_s: float) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert writer.stdout and writer.stdout.readline() == b"ready\n"
    time.sleep(after_s)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    store = Store(tmp_path)
    store.tidy()
    for waiting in store.outbox():
        blob = store.blob(waiting.report.id)
        assert blob is None or len(blob) == 12_000
    assert all(len(file.read_bytes()) == 12_000 for file in tmp_path.glob("own/t/*"))
    assert all(stored.parcel.report.id == f"rel-{stored.release}" for stored in store.heads())
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("command", "closed"),
    [
        ("status --dir", "."),
        ("status --dir", "heads"),
        ("predict /etc/hostname --dir", "release"),
        ("backup /nonexistent/saved --dir", "."),
    ],
)
def test_what_another_account_may_not_read_is_never_said_to_be_missing(
    tmp_path: Path, command: str, closed: str
) -> None:
    folder = reachable(tmp_path) / "device"
    store = Store(folder)
    store.remember(Memory())
    store.keep_head(StoredHead(head(), 1, parcel("t-1-0")))
    (folder / "release").mkdir()
    with account() as agent, account() as other:
        ROOT.run("chown", "-R", f"{agent.uid}:{agent.gid}", folder)
        (folder / closed).chmod(0o700)
        done = other.python("-m", "edge_fl", "device", *command.split(), folder, check=False)
        assert done.returncode == 4, done.stderr
        allowed = f"the account {other.name} may not .* it; expected the account {agent.name}: "
        assert re.search(allowed, done.stderr), done.stderr
        mine = agent.python("-m", "edge_fl", "device", "status", "--dir", folder)
        assert "nothing fitted yet" in mine.stdout  # there is no release


@pytest.mark.parametrize(
    "command",
    [
        "status --dir",
        "predict image.png --dir",
        "serve --dir",
        "backup /nonexistent/saved --dir",
        "doctor --dir",
    ],
)
def test_a_device_inside_a_closed_folder_names_the_account_that_may(tmp_path: Path, command: str) -> None:
    closed = reachable(tmp_path) / "closed"
    Store(closed / "device").remember(Memory())
    closed.chmod(0o700)
    with account() as other:
        done = other.python("-m", "edge_fl", "device", *command.split(), closed / "device", check=False)
    assert done.returncode == 4 and "bug" not in done.stderr, done.stderr
    assert (
        f"the account {other.name} may not " in done.stderr and "expected the account root: " in done.stderr
    )
