"""An agent survives the deaths of its children: one is tried again, many are a state with words, and nothing counts as seen."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from edge_fl.wire.messages import Capability
from edge_fl_devices.agent.events import DataChanged
from edge_fl_devices.child import Children, feature_children
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.doctor import status
from edge_fl_devices.features.child_loader import ChildFeatureLoader
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.install import canary
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.storage.slots import InstalledRelease
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import ChildFitter
from tests.devices.deadly import deadly
from tests.devices.images import X, Y
from tests.devices.scripted import TOPICS, running
from tests.devices.site import FAST, QUICK, Site, site_over
from tools.memory_broker import InMemoryBroker, InMemoryTransport

FEATURES, FIT = "features.child_main", "workers.head_fitting"
FEW = replace(QUICK, max_kills=2)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    broker = InMemoryBroker()
    with site_over(partial(InMemoryTransport, broker), tmp_path) as site:
        yield site
    broker.close()


@pytest.fixture
def children() -> Iterator[Children]:
    with closing(feature_children()) as children:
        yield children


def picture(folder: Path, number: int) -> None:
    path = folder / "images" / "ab"[Y[number]] / f"{number}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(X[number, 0]).save(path)


def device(
    site: Site,
    children: Children,
    pictures: int = 8,
    check: Callable[[InstalledRelease], None] = canary.require,
) -> Device:
    """A head-only device that computes features and fits in children, as a real one does."""
    for number in range(pictures):
        picture(site.folder, number)
    config = DeviceConfig("pi-01", str(site.folder / "images"), folder=str(site.home))
    worker = HeadWorker(
        "pi-01",
        Store(site.home),
        FitSettings("nearest", cross_validate_below=100),
        loader=ChildFeatureLoader(config, children),
        fitter=ChildFitter(),
        runtime=runtime,
        limits=FEW,
        check=check,
    )
    return Device(
        "pi-01", TOPICS, Capability("head", "x86_64", "3.12", samples=8), worker, limits=FEW, fetching=FAST
    )


def shown(site: Site) -> dict[str, str]:
    return {str(row["what"]): str(row["value"]) for row in status.read(site.home)}


@pytest.mark.parametrize("module", [FEATURES, FIT])
def test_a_child_that_dies_once_delays_the_head(
    site: Site, children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    deaths = deadly(tmp_path / "site", monkeypatch, module, "SIGSEGV", times=1)
    with running(device(site, children), connect=site.connect):
        site.serve(site.publish())
        site.server.wait_for("pi-01", "state", lambda state: state.why == "killed")
        report = site.server.wait_for("pi-01", "rpt")
        assert not report.error and report.samples == 8 and not deaths.left
        site.server.wait_for("pi-01", "state", lambda state: state.release == 1 and not state.why)
    assert "killed" not in shown(site)


def test_new_pictures_count_although_the_child_of_the_refit_dies(
    site: Site, children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = device(site, children)
    with running(agent, connect=site.connect) as runner:
        site.serve(site.publish())
        site.server.ack("pi-01", site.server.wait_for("pi-01", "rpt").id)
        deadly(tmp_path / "site", monkeypatch, FEATURES, "SIGSEGV", times=1)
        for number in (8, 9, 10, 11):
            picture(site.folder, number)
        runner.deliver(agent, DataChanged(agent.state.capability))
        report = site.server.wait_for("pi-01", "rpt", lambda report: report.id.startswith("refit"))
        assert not report.error and report.samples == 12
        site.server.wait_for("pi-01", "log", lambda line: "killed (SIGSEGV)" in line.text)


def test_an_agent_whose_child_always_ends_by_sigill_stays_up_says_why_and_works_after_a_change(
    site: Site, children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = deadly(tmp_path / "site", monkeypatch, "-", "SIGILL", times=100, when="onnxruntime")
    agent = device(site, children, check=lambda installed: None)  # the canary would say it first
    with running(agent, connect=site.connect) as runner:
        manifest = site.publish()
        site.serve(manifest)
        report = site.server.wait_for("pi-01", "rpt")
        assert (report.error, report.release) == ("killed", 1)
        site.server.ack("pi-01", report.id)
        site.server.wait_for("pi-01", "state", lambda state: (state.status, state.why) == ("alert", "killed"))
        site.server.wait_for("pi-01", "log", lambda line: "not tried again until new data" in line.text)
        left = deaths.left
        assert "onnxruntime ends with SIGILL on this processor" in shown(site)["killed"]
        assert "edge-fl device doctor" in shown(site)["killed"]
        (tmp_path / "site" / "sitecustomize.py").unlink()
        runner.deliver(agent, DataChanged(agent.state.capability))
        again = site.server.wait_for("pi-01", "rpt", number=2)
        assert not again.error and again.release == 1 and deaths.left == left
    assert "killed" not in shown(site)


def test_a_board_on_which_no_canary_starts_gives_no_verdict_about_the_release(
    site: Site, children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadly(tmp_path / "site", monkeypatch, "-", "SIGILL", when="onnxruntime")
    agent = device(site, children)
    with running(agent, connect=site.connect):
        site.serve(site.publish())
        assert site.server.wait_for("pi-01", "rpt").error == "killed"
    assert "blocked release 1" not in shown(site)
    assert "onnxruntime ends with SIGILL on this processor" in shown(site)["killed"]
