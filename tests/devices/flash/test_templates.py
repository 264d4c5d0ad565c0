"""systemd-analyze accepts the units; skipped where it is missing."""

import shutil
import subprocess
from pathlib import Path

import pytest

from edge_fl_devices.board import installation
from edge_fl_devices.flash import bundle

pytestmark = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
EXPOSURE = "20"  # of 100; systemd calls this safe, a plain unit has 96


def analyse(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("host", ["192.168.1.10", "broker.local"])
def test_systemd_knows_every_word_of_the_units(tmp_path: Path, host: str) -> None:
    for name, text in (
        (installation.SERVICE, bundle.service(host)),
        (installation.LABEL_SERVICE, bundle.label_service("/srv/my 100% images")),
        (installation.INSTALLER, bundle.template(installation.INSTALLER)),
    ):
        there = text.replace("/usr/local/bin/edge-fl", "/bin/true")  # it looks for the program
        (tmp_path / name).write_text(there)
        done = analyse("verify", "--man=no", str(tmp_path / name))
        mine = [line for line in (done.stdout + done.stderr).splitlines() if "edge-fl" in line]
        assert mine == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (installation.SERVICE, bundle.service("192.168.1.10")),
        (installation.LABEL_SERVICE, bundle.label_service("/srv/images")),
    ],
)
def test_the_units_expose_little(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    done = analyse("security", "--offline=yes", f"--threshold={EXPOSURE}", "--no-pager", str(tmp_path / name))
    assert done.returncode == 0, done.stdout[-2000:]
