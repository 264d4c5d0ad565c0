"""Power cuts of a flashed aarch64 board while its agent is updated over a broker on loopback, without a package index.

A cut ends all processes of the board, and what was not written to its disk is lost.
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edge_fl.cli import main
from edge_fl.release.agent import AgentUpdate
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.agent_update.launcher import MAX_STARTS
from edge_fl_devices.board.installation import INSTALLER, SERVICE
from edge_fl_devices.storage.store import Store
from edge_fl_server.release import agent_releases, website
from edge_fl_server.release.rollout.director import Director
from tests import agents
from tests.agents import eventually, own_files
from tests.arm64 import site, userland
from tests.arm64.pi import Pi, require
from tests.arm64.test_first_boot import entry, first_boot
from tests.conftest import Issue
from tests.devices.flash import cards
from tests.devices.scripted import TOPICS
from tests.power import Disk

pytestmark = [
    pytest.mark.arm64,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.broker,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not shutil.which("mformat"), reason="no mtools here"),
]
STEP_S = 600


def test_a_flashed_board_survives_power_cuts_during_an_agent_update(
    broker: Mosquitto, issue: Issue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require()
    repository = site.backbone(tmp_path / "server")
    website.export(repository, tmp_path / "releases")
    pi = installed(tmp_path, broker, issue)
    home = pi.root / "var/lib/edge-fl"
    Store(home).keep_privacy_spent(b"spent")
    pi.run("chown", "-R", "edge-fl:edge-fl", "/var/lib/edge-fl")
    wheel = agents.wheel(tmp_path / "wheels", "0.2.0")
    (signed,) = agent_releases.sign(repository, [wheel]).wheels
    update = Director(repository, TOPICS.fleet).sign("agent", site.DEVICE, AgentUpdate("agent-1", 1))
    log, began_s = tmp_path / "agent.log", time.monotonic()
    with Disk(tmp_path / "disk.img", home, 512) as disk, site.serving(broker, issue, repository) as server:
        server.chunks(wheel.read_bytes(), signed.blob)
        with pi.running(*service(pi), log=log):
            # its report is not acknowledged, and stays in the outbox
            server.wait_for(site.DEVICE, "state", lambda s: s.release == 1, deadline_s=STEP_S)
            kept = own_files(home)
            assert {"privacy.safetensors", "memory.json"} < kept.keys()
            assert any(name.startswith("outbox/") for name in kept)
            server.publish(TOPICS.down(site.DEVICE, "agent"), update, retain=True)
            half = home / "agent/1"
            eventually(lambda: any(half.glob("lib/*/site-packages/edge_fl*")), "wheels installed", STEP_S)
        disk.cut()
        assert own_files(home) == kept and not read_state(home).get("pending")
        with pi.running(*service(pi), log=log):
            eventually(lambda: read_state(home).get("pending"), "switched", STEP_S)
            eventually(lambda: read_state(home)["starts"] == 1, "started on trial", STEP_S)
        disk.cut()
        assert own_files(home) == kept
        with pi.running(*service(pi), log=log):
            done = server.wait_for(
                site.DEVICE, "meta", lambda m: m.update and m.update.state == "done", deadline_s=STEP_S
            )
            assert (done.machine, done.agent, done.update.number) == ("aarch64", "0.2.0", 1)
        disk.cut()
        state = read_state(home)
        assert (state["current"], state["pending"]) == ("1", False) and state["starts"] <= MAX_STARTS
        assert own_files(home) == kept
    with capsys.disabled():
        sys.stdout.write(
            f"\naarch64 under qemu: agent update with three power cuts {time.monotonic() - began_s:.0f} s\n"
        )


def installed(folder: Path, broker: Mosquitto, issue: Issue) -> Pi:
    """A board that was flashed, and has installed itself offline."""
    base = userland.build(userland.BASE)
    card = cards.image(folder / "sd.img", site.issued_for(userland.python(base)), mebibytes=192)
    identity = site.identity(issue, folder / "id")
    flash = site.flash(card, "127.0.0.1", broker, identity, folder / "releases")
    assert main([*flash, "--images", str(site.pictures(folder / "images"))]) == 0
    pi = Pi(card, userland.copy(base, folder / "pi"))
    pi.run(*first_boot(pi))
    pi.run(*entry(pi, INSTALLER, "ExecStart").split())
    return pi


def service(pi: Pi) -> list[str]:
    """The command of the installed unit, as its user; the launcher restarts the agent instead of systemd."""
    name = entry(pi, SERVICE, "User")
    user = f"--reuid={name} --regid={name} --clear-groups".split()
    command = entry(pi, SERVICE, "ExecStart").split()
    return ["setpriv", *user, "env", "HOME=/var/lib/edge-fl", *command]


def read_state(home: Path) -> dict[str, Any]:
    """The state of updates; empty before the first."""
    try:
        state: dict[str, Any] = json.loads((home / "agent/state.json").read_bytes())
    except FileNotFoundError:
        return {}
    return state
