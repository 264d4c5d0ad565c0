"""A whole boot with systemd: install, reboot, ready, a power cut, and the same model again. On demand: `pytest -m 'arm64 and slow'`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from broker.mosquitto import Mosquitto
from edge_fl import metrics
from edge_fl.cli import main
from tests.arm64 import site, userland
from tests.arm64.machine import HOST, Machine
from tests.conftest import Issue
from tests.devices.flash import cards

pytestmark = [pytest.mark.arm64, pytest.mark.slow, pytest.mark.broker, pytest.mark.timeout(3600)]
INSTALL_S, STEP_S = 2400, 600


def test_a_card_boots_installs_learns_and_survives_a_power_cut(
    broker: Mosquitto, issue: Issue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = userland.build([*userland.BASE, *userland.SYSTEM])
    machine = Machine(tmp_path / "machine", site.issued_for(userland.python(base)))
    flash = site.flash(machine.card, HOST, broker, site.identity(issue, tmp_path / "id"))
    assert main([*flash, "--images", str(site.pictures(tmp_path / "images"))]) == 0
    capsys.readouterr()
    install_s = machine.boot_until_reboot("install", INSTALL_S)
    log = cards.mtools(machine.card, "mtype", "::/edge-fl/install.log").decode()
    assert log.endswith("edge-fl: install rc=0\n"), log + machine.console_tail("install")
    assert cards.mtools(machine.card, "mtype", "::/cmdline.txt").decode() == f"{cards.CMDLINE}\n"
    with site.serving(broker, issue, tmp_path / "server") as server:
        try:
            began_s = time.monotonic()
            with machine.powered("ready"):
                meta = server.wait_for(site.DEVICE, "meta", deadline_s=STEP_S)
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
            f"\naarch64 with systemd: install and reboot {install_s:.0f} s, birth {born_s - began_s:.0f} s after power on, "
            f"report {ready_s - born_s:.0f} s later, ready {time.monotonic() - again_s:.0f} s after a power cut\n"
        )
