"""A simulated fleet follows from its seed, runs the agents of real devices, and stops when there is nothing left to do."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edge_fl.cli import main
from edge_fl.config import MethodConfig, MethodSpec, ModelConfig
from edge_fl.data.partition import DataConfig
from edge_fl.errors import ConfigError
from edge_fl.fleet.simulated import full_devices, names
from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.release.manifests import Canary, Manifest, canary_input
from edge_fl.wire.messages import Report, Round
from edge_fl.wire.tensors import pack
from edge_fl_devices.agent.state import AgentLimits
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.simulated.fleet import (
    DeviceFactory,
    DeviceResult,
    FleetConfig,
    device_result,
    fleet_progress,
    run_fleet,
    tier_counts,
    unmeasured,
)
from edge_fl_devices.workers.full import FullWorker
from edge_fl_devices.workers.head_fitting import ChildFitter
from edge_fl_server.release.repository import Repository
from tests.devices import graphs
from tests.devices.scripted import ScriptedServer, eventually
from tools.memory_broker import InMemoryBroker, InMemoryTransport

INPUT = InputSpec((1, 8, 8))
DIGITS = [str(digit) for digit in range(10)]
SPEC = MethodSpec(
    ModelConfig("cnn-tiny", {"feature_dim": 4, "width": 2}), INPUT, DIGITS, MethodConfig("fedavg"), seed=0
)
WEIGHTS = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)


def extractor() -> tuple[bytes, Manifest]:
    payload = graphs.graph(weights=WEIGHTS, input_shape=("n", 1, 8, 8), output_shape=("n", 8))
    features = canary_input(Canary(5, 2, []), INPUT).reshape(2, -1) @ WEIGHTS
    manifest = graphs.manifest_for(payload, expected=features, input=INPUT, feature_dim=8, classes=DIGITS)
    return payload, manifest


def config(folder: Path, **changes: object) -> FleetConfig:
    quick = AgentLimits(settle_s=0.05, return_s=0.1)
    data = DataConfig(clients=6, fraction=0.3)
    base = FleetConfig(
        data,
        full=2,
        folder=folder,
        fleet="test",
        seed=1,
        workers=2,
        until_idle=True,
        idle_s=0.5,
        limits=quick,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    broker = InMemoryBroker()
    yield broker
    broker.close()


def test_a_fleet_trains_installs_fits_reports_and_ends(broker: InMemoryBroker, tmp_path: Path) -> None:
    connect = partial(InMemoryTransport, broker)
    server, results, lines = ScriptedServer(connect), list[DeviceResult](), list[str]()

    def show(devices: Sequence[Device]) -> None:
        lines.append(fleet_progress(devices))

    thread = threading.Thread(
        target=lambda: results.extend(
            run_fleet(config(tmp_path), connect, full_worker=FullWorker, show=show, every_s=0.05)
        )
    )
    thread.start()
    server.online()
    full = {names(6)[number] for number in full_devices(6, 2, 1)}
    payload, manifest = extractor()
    server.release(Repository(tmp_path / "server"), manifest, payload)
    down = pack(tree.to_arrays(steps.start(build_method(SPEC))))
    server.round(Round("t", 1, 60, SPEC))
    blob = server.chunks(down)
    for name in names(6):
        if name in full:
            server.assignment(name, "train", run_id="t", round=1, id="t-1-0", down=blob)
        else:
            server.assignment(name, "serve", run_id="t", round=1, id="rel-1", release=1)
    for name in names(6):
        server.ack(name, server.wait_for(name, "rpt").id)
    thread.join(60)
    assert not thread.is_alive()
    assert [found.device for found in results] == names(6)
    for found in results:
        assert (
            found.tier == ("full" if found.device in full else "head")
            and found.accepted == 1
            and not found.why
        )
        assert found.bytes_down == (len(down) if found.device in full else len(payload))
    heads = [found for found in results if found.tier == "head"]
    assert [found.head for found in heads] == ["logistic", "svm", "mlp", "logistic"]
    assert all(found.release == 1 and found.after is not None and found.after > 0.3 for found in heads)
    for words in ("6/6 connected", "4 serving a head", "6 reports accepted"):
        assert words in lines[-1]
    assert {state.status for state in server.messages("sim-000", "state")} == {
        "init",
        "ready",
        "disconnected",
    }


def test_a_fleet_does_not_wait_for_a_server_that_disconnected_without_notice(
    broker: InMemoryBroker, tmp_path: Path
) -> None:
    connect = partial(InMemoryTransport, broker)
    server = ScriptedServer(connect)
    server.online()
    thread = threading.Thread(
        target=run_fleet, args=(config(tmp_path, full=0), connect), kwargs={"every_s": 0.05}
    )
    thread.start()
    server.wait_for("sim-005", "state", lambda state: state.status == "ready")
    thread.join(1.0)
    assert thread.is_alive(), "an online server may still send assignments"
    server.transport.close(clean=False)
    thread.join(30)
    assert not thread.is_alive()


def test_a_head_only_fleet_is_stopped_from_outside(broker: InMemoryBroker, tmp_path: Path) -> None:
    runners = []
    settings = config(tmp_path, full=0, until_idle=False)
    thread = threading.Thread(
        target=run_fleet,
        args=(settings, partial(InMemoryTransport, broker)),
        kwargs={"on_start": runners.append},
    )
    thread.start()
    eventually(lambda: runners and len(runners[0].devices) == 6)
    runners[0].stop()
    thread.join(30)
    assert not thread.is_alive()


def test_which_devices_are_full_follows_from_the_seed() -> None:
    assert full_devices(100, 20, 0) == full_devices(100, 20, 0) != full_devices(100, 20, 1)
    assert len(full_devices(100, 20, 0)) == 20


def test_ids_sort_as_their_numbers_do() -> None:
    assert (
        names(2) == ["sim-000", "sim-001"]
        and names(2001)[-1] == "sim-2000"
        and sorted(names(2001)) == names(2001)
    )


@pytest.mark.parametrize(
    ("devices", "head", "full", "expected"),
    [
        (100, "0.8", "0.2", (80, 20)),
        (12, "8", "4", (8, 4)),
        (12, "", "4", (8, 4)),
        (12, "0.5", "", (6, 6)),
        (7, "", "", (7, 0)),
        (None, "8", "4", (8, 4)),
        (None, "", "3", (0, 3)),
    ],
)
def test_tier_counts_are_numbers_or_fractions(
    devices: int | None, head: str, full: str, expected: tuple[int, int]
) -> None:
    assert tier_counts(devices, head, full) == expected


@pytest.mark.parametrize(
    ("devices", "head", "full"),
    [(10, "8", "4"), (10, "-1", "11"), (10, "many", ""), (None, "0.8", "0.2"), (10, "", "11")],
)
def test_tier_counts_that_do_not_add_up_are_rejected(devices: int | None, head: str, full: str) -> None:
    with pytest.raises(ConfigError, match="nothing was changed"):
        tier_counts(devices, head, full)


def test_full_devices_without_their_worker_are_rejected(broker: InMemoryBroker, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="full_worker"):
        run_fleet(config(tmp_path), partial(InMemoryTransport, broker))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--heads", "svn"], 4, "did you mean 'svm'"),
        (["--set", "data.partition=dirichlett"], 4, "partition"),
        (["--dataset", "digit"], 4, "did you mean 'digits'"),
        (["--head-only", "3", "--full", "3", "--devices", "7"], 4, "expected them to add up"),
        (["--devices", "2", "--wait", "0.2", "--port", "1"], 2, "127.0.0.1:1"),
        (["--fleet", "No Fleet"], 4, "fleet"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(
    arguments: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--quiet", "fleet", "up", "--dir", str(tmp_path), *arguments]) == code
    output = capsys.readouterr()
    assert words in output.err and output.err.count("\n") == 1 and not output.out


def test_a_fleet_whose_full_devices_reported_no_accuracy_says_why(
    broker: InMemoryBroker, tmp_path: Path
) -> None:
    def result(device: str, tier: str = "full", why: str = "", after: float | None = None) -> DeviceResult:
        return DeviceResult(device, tier, "", 9, 0, 2, 2, None, after, None, 0, 0, 0.0, why)

    failed, head = result("d1", why="rejected"), result("h1", "head", after=0.5)
    expected = "no full device could evaluate or personalise: rejected"
    assert unmeasured([failed, result("d2", why="rejected"), head]) == expected
    assert not unmeasured([failed, result("d2", after=0.5), head])
    assert not unmeasured([result("d1"), head]) and not unmeasured([head])


def test_the_result_of_a_device_keeps_the_reason_of_its_last_failed_report(
    broker: InMemoryBroker, tmp_path: Path
) -> None:
    device = DeviceFactory(config(tmp_path), ChildFitter(), FullWorker)(names(6)[0])
    assert device_result(device).why == ""
    device.reporting.last["personal"] = Report("r1", "personal", "b1", 9, error="rejected")
    assert device_result(device).why == "rejected"
