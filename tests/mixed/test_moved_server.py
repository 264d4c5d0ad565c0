"""A server moves to another machine with its backup: a fleet that is online, over mosquitto with certificates, goes on where it was.

Only what docs/backup-and-move.md names is restored there; the old machine's files are deleted before.
"""

import json
import shutil
import subprocess
import tarfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import free_port
from edge_fl_server.children import CommandProcesses
from edge_fl_server.registry import fleets, registered_devices
from tests import agents
from tests.agents import Board, eventually
from tests.mixed.closed_fleet import Machine, all_serve, boards
from tests.sample import sample

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]
WAYS = ("the broker has another address", "its name leads to the new machine")
NAMES = ("pi-1", "pi-2")
QUARANTINED = "pi-3"
ALERTS = """
[rules.certificate]
limit = 4000   # days: every certificate ends so soon
"""
LISTS = (
    "fleet group list",
    "fleet settings",
    "fleet traffic",
    "token list",
    "release list",
    "release compare",
    "release keys list",
)
COLUMNS = ("device", "standing", "tier", "head", "tags", "release", "accuracy", "agent")


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agents.factory(tmp_path_factory.mktemp("installation"))


def state(broker: Machine, machine: Machine) -> dict[str, Any]:
    """Everything that an operator sees on a machine, with the devices at a broker."""
    found: dict[str, Any] = {command: machine.rows(command) for command in LISTS}
    listed = json.loads(machine.run("fleet list --format json", port=broker.port))
    found["devices"] = [{key: row[key] for key in COLUMNS} for row in listed]
    found["fleet settings"] = [row for row in found["fleet settings"] if row["setting"] != "broker.port"]
    for key in found["release keys list"]:
        del key["place"]  # the folder
    found["certificates"] = [row for row in machine.rows("fleet certificates") if row["name"] != "broker"]
    alerts = machine.rows("fleet alerts list")
    found["alerts"] = sorted((row["rule"], row["subject"], row["state"], row["since"]) for row in alerts)
    with machine.registry() as db:
        found["registry"] = fleets.id_of(db, "main")
    return found


def fill(machine: Machine) -> None:
    """What an operator may have made: tags, a group, settings, tokens, a quarantine, alerts, and a roll-out that is under way."""
    machine.run("fleet tag", "pi-1", "site=berlin")
    machine.run("fleet group save", "cameras", "site=berlin")
    machine.run("fleet set", "pi-1", "keep=50", code=None)
    machine.run("token create", "ann", "--role", "viewer")
    machine.run("fleet alerts silence", "pi-2", "--for", "7d")
    with machine.registry() as db:
        registered_devices.quarantine(db, "main", QUARANTINED, "by hand")
        eventually(lambda: {row["subject"] for row in machine.rows("fleet alerts list")} >= {*NAMES})


@pytest.mark.parametrize("how", sample(WAYS, WAYS[:1]))
def test_a_moved_server_continues_with_what_its_backup_holds(
    how: str,
    mosquitto_program: Program,
    factory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stack: ExitStack,
) -> None:
    lines: list[str] = []
    children = stack.enter_context(
        CommandProcesses(lambda name, line: lines.append(f"{name}: {line}"), {"OMP_NUM_THREADS": "1"})
    )
    old = Machine(tmp_path / "old", free_port("127.0.0.1"), children, capsys)
    old.run("fleet enrol", "--baked", *NAMES, QUARANTINED)
    (old.runs / "releases" / "main").mkdir(parents=True)
    (old.runs / "releases" / "main" / "alerts.toml").write_text(ALERTS)
    there = boards(tmp_path / "boards", factory, old, *NAMES)
    serials = serials_of(there)
    old.start_broker()
    old.start_server()
    for board in there.values():
        stack.callback(board.stop)
        board.start()
    eventually(lambda: {row["device"] for row in old.rows("fleet list")} >= {*NAMES}, "devices", 240)
    old.store_release()
    old.run("release rollout", "1", "--stages", "1")
    all_serve(old, 1, *NAMES)
    fill(old)
    all_serve(old, 1, *NAMES)  # again with the new setting

    old.store_release(good=False)
    old.run("release rollout", "2", "--stages", "0.5,1", code=None)
    assert old.rows("release list")[0]["state"] == "paused"
    # The roll-out pauses with the report of a canary that failed; the device's own alert follows with the next states.
    eventually(lambda: {row["rule"] for row in old.rows("fleet alerts list")} >= {"rollout", "failing"})

    address = how == "the broker has another address"
    new = Machine(tmp_path / "new", free_port("127.0.0.1") if address else old.port, children, capsys)
    if (
        address
    ):  # the new broker runs first: a device returns to the old one unless it reaches the new one soon
        restore(old, new, tmp_path / "early.tar")
        new.start_broker()
        old.run("fleet set", "tier=head", f"broker.port={new.port}", "--yes", code=None)
        eventually(lambda: connected(new), "the devices are at the new broker", 240)
    old.services.pop().end()  # the server
    before = state(new if address else old, old)
    restore(old, new, tmp_path / "fleet.tar")
    old.stop()
    assert {path.name for path in old.runs.iterdir()} == {"identities", "releases", "server", "broker"}
    shutil.rmtree(old.folder)

    if not address:
        new.start_broker()
    new.start_server()
    eventually(lambda: connected(new), "the devices are at the new broker", 240)
    after = state(new, new)
    assert set(after["alerts"]) == set(before["alerts"])  # as sets, because a failure then names what differs
    assert after == before
    new.run("release abort")
    new.store_release(2.0)
    new.run("release rollout", "3", "--stages", "1")
    all_serve(new, 3, *NAMES)
    assert {row["device"] for row in new.rows("release compare 1 3")} == {*NAMES}
    assert serials_of(there) == serials, "no device was enrolled again"
    assert not [line for line in lines if "wrong_key" in line or "rollback" in line or "replayed" in line]


def connected(machine: Machine) -> bool:
    there = {row["device"] for row in machine.rows("fleet list") if row["status"] in ("ready", "alert")}
    return there >= {*NAMES}


def restore(old: Machine, new: Machine, file: Path) -> None:
    """As docs/backup-and-move.md says."""
    old.run("server backup", str(file))
    with tarfile.open(file) as archive:
        assert {name.partition("/")[0] for name in archive.getnames()} == {"identities", "releases", "server"}
    assert file.stat().st_mode & 0o077 == 0
    new.runs.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-xpf", str(file), "-C", str(new.runs)], check=True)


def serials_of(there: dict[str, Board]) -> dict[str, bytes]:
    return {name: (board.folder / "identity" / "client.crt").read_bytes() for name, board in there.items()}
