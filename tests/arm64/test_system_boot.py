"""Whole boots with systemd: failing installations, a successful one, ready, a power cut, and the same model again.

On demand: `pytest -m 'arm64 and slow'`.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from edge_fl import metrics
from edge_fl.cli import main
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_server.release import website
from tests.arm64 import site, userland
from tests.arm64.machine import HOST, Machine
from tests.conftest import Issue
from tests.devices.flash import cards

pytestmark = [pytest.mark.arm64, pytest.mark.slow, pytest.mark.broker, pytest.mark.timeout(3600)]
REBOOT_S, STEP_S = 600, 1500
WHEEL = "edge-fl/wheels/tuf-*.whl"
LOG = "edge-fl/install.log"


def test_a_card_boots_installs_learns_and_survives_a_power_cut(
    broker: Mosquitto, issue: Issue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = userland.build([*userland.BASE, *userland.SYSTEM])
    machine = Machine(tmp_path / "machine", site.issued_for(userland.python(base)))
    repository = site.backbone(tmp_path / "server")
    website.export(repository, tmp_path / "releases")
    identity = site.identity(issue, tmp_path / "id")
    flash = site.flash(machine.card, HOST, broker, identity, tmp_path / "releases")
    assert main([*flash, "--images", str(site.pictures(tmp_path / "images"))]) == 0
    capsys.readouterr()
    machine.boot_until_reboot("first", REBOOT_S)
    assert lines(machine, "install rc=0") == 1, machine.console_tail("first")
    assert cards.mtools(machine.card, "mtype", "::/cmdline.txt").decode() == f"{cards.CMDLINE}\n"
    cards.mtools(machine.card, "mcopy", f"::/{WHEEL}", str(tmp_path))
    cards.mtools(machine.card, "mdel", f"::/{WHEEL}")
    with machine.powered("failing"):
        await_lines(machine, "install rc=1", 2, "failing")  # systemd starts it again
    (wheel,) = tmp_path.glob("tuf-*.whl")
    cards.mtools(machine.card, "mcopy", str(wheel), f"::/edge-fl/wheels/{wheel.name}")
    with machine.powered("installing"):
        await_lines(machine, "edge-fl: installing", 3, "installing")
        time.sleep(5)  # then the power is cut
    assert lines(machine, "install rc=0") == 1
    with site.serving(broker, issue, repository) as server:
        try:
            began_s = time.monotonic()
            with machine.powered("ready"):
                await_lines(machine, "install rc=0", 2, "ready")
                installed_s = time.monotonic()
                meta = server.wait_for(site.DEVICE, "meta", lambda m: m.samples, deadline_s=STEP_S)
                assert (meta.machine, meta.samples) == ("aarch64", site.SAMPLES)
                born_s = time.monotonic()
                report = server.wait_for(site.DEVICE, "rpt", deadline_s=STEP_S)
                assert (report.error, report.metrics[metrics.PERSONAL_AFTER]) == ("", 1.0)
                server.ack(site.DEVICE, report.id)
                server.wait_for(
                    site.DEVICE, "state", lambda s: s.status == "ready" and s.release == 1, deadline_s=STEP_S
                )
                ready_s = time.monotonic()
            server.wait_for(
                site.DEVICE, "state", lambda s: s.status == "lost"
            )  # published by the broker (last will)
            again_s = time.monotonic()
            with machine.powered("again"):
                server.wait_for(
                    site.DEVICE,
                    "state",
                    lambda s: s.boot != report.boot and s.status == "ready" and s.release == 1,
                    deadline_s=STEP_S,
                )
            assert len({message.id for message in server.messages(site.DEVICE, "rpt")}) == 1
        except AssertionError as error:
            raise AssertionError(f"{error}\n{machine.console_tail('ready')}") from error
    with capsys.disabled():
        sys.stdout.write(
            f"\naarch64 with systemd: installed {installed_s - began_s:.0f} s after power on, birth {born_s - installed_s:.0f} s "
            f"later, report {ready_s - born_s:.0f} s later, ready {time.monotonic() - again_s:.0f} s after a power cut\n"
        )


def lines(machine: Machine, text: str) -> int:
    """Count the lines of the installation's log on the card that contain this text."""
    try:
        return cards.mtools(machine.card, "mtype", f"::/{LOG}").decode().count(text)
    except subprocess.CalledProcessError:  # the running machine is renaming it
        return 0


def await_lines(machine: Machine, text: str, count: int, name: str) -> None:
    """Wait until the log contains so many; the running machine writes it."""
    deadline_s = time.monotonic() + STEP_S
    while lines(machine, text) < count:
        assert time.monotonic() < deadline_s, machine.console_tail(name)
        time.sleep(5)
