"""`edge-fl server up`: a fleet is served between runs; runs take over while they last."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from edge_fl.wire.messages import Report, ServerState, decode
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.connector import LeaseLimits
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import connected
from edge_fl_server.orchestrate import serving as module
from edge_fl_server.orchestrate.serving import FleetAccess, FleetServer
from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.registry import Database, registered_reports, rollouts, runs
from edge_fl_server.registry.tables import RunRecord
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout import stored_rollout
from edge_fl_server.release.rollout.coordinator import CoordinatorOptions, RolloutCoordinator
from edge_fl_server.release.rollout.stages import ALL_AT_ONCE
from tests.devices import graphs
from tests.server.conftest import FAR_S, WAIT_S, Stage
from tools.memory_broker import InMemoryTransport

ONE_RUN = RunRecord("toy-1", "main", "fedavg", "toy", "fleet", 3, "runs/toy-1")


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    with closing(Database.open(tmp_path / "server" / "registry.sqlite")) as db:
        yield db


@pytest.fixture
def server(broker, db: Database, tmp_path: Path) -> FleetServer:
    connect = partial(InMemoryTransport, broker)
    # A run's server publishes a beat per second.
    limits = LeaseLimits(settle_s=0.05, lease_s=4.0)
    return FleetServer(FleetAccess(connect, "main", tmp_path / "home"), db, limits, FAR_S)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the server prints."""
    lines: list[str] = []
    monkeypatch.setattr(module, "print_status", lines.append)
    return lines


@contextmanager
def serving(server: FleetServer) -> Iterator[None]:
    stopping = threading.Event()
    thread = threading.Thread(target=server.serve, args=(stopping,))
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()


@contextmanager
def run(server: FleetServer) -> Iterator[RolloutCoordinator]:
    """What the server of a run does: it takes the fleet over and releases."""
    with Journal(server.db) as journal, connected(ServerConnection(server.access.connect, journal)) as online:
        runs.begin(server.db, ONE_RUN)
        with closing(RolloutCoordinator(online, Repository(server.access.home / "main"))) as rollout:
            yield rollout
        runs.end(server.db, ONE_RUN.run, "completed")


def release(rollout: RolloutCoordinator, number: int) -> None:
    payload = graphs.graph(weights=graphs.WEIGHTS * number)
    manifest = graphs.manifest_for(payload, release=number)
    rollout.roll_out(manifest, {manifest.extractor.sha256: payload})
    rollout.wait(0, WAIT_S)


def is_online(stage: Stage) -> bool:
    """Whether a server without a run is online."""
    payload = stage.retained("srv/state").get("srv/state")
    state = decode(payload, ServerState) if payload else None
    return bool(state and state.online and state.yields)


def test_a_device_that_joins_after_a_run_gets_the_current_release(server, stage, tmp_path) -> None:
    with run(server) as rollout:
        early = stage.head("early", tmp_path)
        release(rollout, 1)
        release(rollout, 2)
    assert early.served == [1, 2]
    with serving(server):
        late = stage.head("late", tmp_path)
        assert stage.eventually(lambda: [ack.status for ack in late.acks] == ["accepted"])
    assert (early.served[:2], late.served) == ([1, 2], [2])
    assert {report.device for report in registered_reports.of_release(server.db, "main", 2)} == {
        "early",
        "late",
    }
    assert not decode(stage.retained("srv/state")["srv/state"], ServerState).online


def test_a_run_takes_over_and_the_server_continues_after_it(server, stage, tmp_path) -> None:
    with serving(server):
        assert stage.eventually(lambda: is_online(stage))
        head = stage.head("h1", tmp_path)
        with run(server) as rollout:
            release(rollout, 1)
            assert not is_online(stage)
        assert head.served == [1]
        assert stage.eventually(lambda: is_online(stage))
        late = stage.head("late", tmp_path)
        assert stage.eventually(lambda: late.served == [1])


@pytest.mark.parametrize("own", [True, False])
def test_a_run_counts_reports_on_its_own_releases_only(server, stage, tmp_path, own: bool) -> None:
    with run(server) as rollout:
        release(rollout, 1)
        run_id = rollout.current.run_id if own else "other"
    counted = []
    with Journal(server.db) as journal, connected(ServerConnection(server.access.connect, journal)) as online:
        options = CoordinatorOptions(resume=True, run_id=run_id)
        note = lambda device, report: counted.append(device)  # noqa: E731
        with closing(RolloutCoordinator(online, Repository(server.access.home / "main"), options, note)):
            head = stage.head("h1", tmp_path)
            assert stage.eventually(lambda: [ack.status for ack in head.acks] == ["accepted"])
    assert counted == (["h1"] if own else [])


def test_a_report_that_arrives_before_the_releases_are_known_is_not_answered(bench, tmp_path) -> None:
    """The device sends it again; a rejection would delete it."""
    head = bench.head("h1", tmp_path)
    bench.wait_for(heads=1)
    head._publish(bench.topics.up("h1", "rpt", "toy-1", 1), Report("rel-1", "head", "h1", 9, release=1))
    head._publish(bench.topics.up("h1", "rpt", "toy-1", 1), Report("later", "update", "h1", 9))
    assert bench.eventually(lambda: bool(head.acks))
    assert [ack.id for ack in head.acks] == ["later"]


def test_it_waits_for_a_server_that_is_online(server, bench, db, said) -> None:
    server = replace(server, access=replace(server.access, adopt=True))  # the bench has a registry of its own
    with serving(server):
        assert bench.eventually(lambda: bool(said))
        assert said[0] == f"fleet 'main': server {bench.connection.boot} is online; waiting"
        assert not is_online(bench)
        bench.connection.check()
        bench.connection.close()
        assert bench.eventually(lambda: is_online(bench))


class Clock:
    """A clock that a test may put forward."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


def test_a_run_whose_server_is_offline_keeps_the_fleet_for_a_while(
    server, stage, said, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    runs.begin(server.db, ONE_RUN)
    with serving(server):
        assert stage.eventually(lambda: bool(said))
        assert said == ["run toy-1 has not ended; its server is offline and may return; waiting"]
        assert not is_online(stage)
        assert runs.get(server.db, ONE_RUN.run).state == "running"
        clock.ahead_s = FAR_S
        assert stage.eventually(lambda: is_online(stage))
        assert stage.eventually(lambda: runs.get(server.db, ONE_RUN.run).state == "stopped")


def test_a_roll_out_continues_across_servers(server, stage, tmp_path) -> None:
    """Requested by the dashboard while no server is online, begun by one server, ended by the next."""
    with run(server) as rollout:
        for number in (1, 2):
            release(rollout, number)
    number = stored_rollout.request(server.db, "main", 1, RolloutConfig(stages=ALL_AT_ONCE))
    silent = stage.head("h1", tmp_path, silent=True)
    with serving(server):
        assert stage.eventually(lambda: silent.served == [1])
    assert rollouts.get(server.db, number).state == "running"
    with run(server) as rollout:
        assert (rollout.current.release, rollout.stages.state) == (1, "running")
    rollouts.steer(server.db, number, "aborted")
    with serving(server):
        assert stage.eventually(lambda: silent.served[-1] == 2)
    assert rollouts.get(server.db, number).state == "aborted"
