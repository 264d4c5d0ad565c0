"""Several processes receive the reports of one fleet and share a database: each report counts once, also after a crash."""

import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge_fl.blob import describe
from edge_fl.learn.tree import same
from edge_fl.methods import build_method
from edge_fl.wire import identity, tensors
from edge_fl.wire.messages import Report
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import Authority
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.connector import connector
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import Server
from edge_fl_server.mqtt.updates.workers import UpdateWorker
from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.registry import Database, registered_reports, runs
from edge_fl_server.training import rounds
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.rounds import Plan
from tests.rejections import rejections_of
from tests.server.conftest import QUICK, Bench
from tests.server.scripted import ScriptedDevice

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(300)]
IDS = tuple(f"d{number}" for number in range(6))


@pytest.fixture(params=["file", "postgresql"])
def url(request, tmp_path):
    if request.param == "file":
        return str(tmp_path / "registry.sqlite")
    return request.getfixturevalue("new_postgresql_database")()


@pytest.fixture
def crew(own_mosquitto, url):
    """A coordinator and two workers in this process; the first is connected before its transport is returned."""
    connect = partial(MqttTransport, own_mosquitto.endpoint)

    def connect_first(*arguments, **options):
        transport = connect(*arguments, **options)
        transport.wait_connected(60)
        time.sleep(0.1)
        return transport

    db = Database.open(url)
    with Journal(db) as journal:
        connection = ServerConnection(connect, journal, workers=True, limits=QUICK)
        server = Server.of(connection)
        bench = Bench(connect=connect, topics=connection.topics, server=server)
        connection.open()
        journals = [Journal(Database.open(url)) for _ in range(2)]
        with (
            UpdateWorker(connect_first, journals[0]) as first,
            UpdateWorker(connect, journals[1]) as second,
        ):
            yield bench, (first, second)
        server.inbox.stop()
        connection.close()
        bench.close()
        for one in journals:
            one.db.close()
    db.close()


def test_workers_share_a_round_that_ends_as_with_one_server(crew):
    bench, workers = crew
    spec, plan = bench.spec("fedrep"), Plan(2, seed=1)
    for id in IDS:
        bench.device(id)
    bench.wait_for(full=len(IDS))
    *_, ours = rounds.run(build_method(spec), bench.fleet(spec), plan)
    alone = SequentialClients({id: bench.client(id) for id in IDS}, build_method(spec))
    *_, theirs = rounds.run(build_method(spec), alone, plan)
    assert ours.responded == IDS
    assert same(ours.shared, theirs.shared)
    assert sum(worker.received for worker in workers) >= 2 * len(IDS)
    assert all(worker.received for worker in workers)
    assert bench.eventually(lambda: all(len(device.acks) == 2 for device in bench.devices))
    assert {run_id.state for run_id in runs.requests_of(bench.inbox.journal.db, "t1")} == {"succeeded"}
    assert len(registered_reports.of_run(bench.inbox.journal.db, "t1")) == 2 * len(IDS)


def test_a_round_counts_an_update_whose_worker_ended_before_it_stored_that(crew):
    bench, workers = crew
    stored = []
    for worker in workers:
        worker._journal.accept = lambda *accepted: stored.append(accepted)
    bench.device("d1"), bench.device("d2")
    bench.wait_for(full=2)
    spec = bench.spec("fedavg")
    result = next(rounds.run(build_method(spec), bench.fleet(spec), Plan(1, seed=1)))
    db = bench.inbox.journal.db
    assert (result.responded, len(stored)) == (("d1", "d2"), 2)
    assert [given.state for given in runs.requests_of(db, "t1")] == ["succeeded"] * 2
    assert len(registered_reports.of_run(db, "t1", 1)) == 2


def test_any_worker_rejects_a_bad_update(crew):
    bench, _ = crew

    def tamper(mode, report, payload):
        parts = tensors.unpack(payload)
        name = next(iter(parts))
        spoilt = {
            key: np.full_like(array, np.nan) for key, array in parts[name].items() if array.dtype.kind == "f"
        }
        payload = tensors.pack({**parts, name: {**parts[name], **spoilt}})
        return [(msgspec.structs.replace(report, blob=describe(payload, 1024)), payload)]

    bench.device("d1"), bench.device("d2", tamper=tamper)
    bench.wait_for(full=2)
    plan = Plan(1, seed=1, cohort=CohortConfig(quorum=0.5))
    result = next(rounds.run(build_method(bench.spec("fedavg")), bench.fleet(bench.spec("fedavg")), plan))
    assert result.responded == ("d1",)
    assert [one.reason for one in rejections_of(bench.inbox.journal.db, "main")] == ["tensors"]
    late = bench.devices[0]
    late.report("t1", 1, Report("t1-1-old-1", "update", "b1", 20), b"")
    assert bench.eventually(lambda: [ack.reason for ack in late.acks][-1:] == ["stale_round"])


def test_a_worker_killed_during_a_round_loses_no_update(crew, own_mosquitto, url, tmp_path: Path):
    """A third worker receives its share and is killed before it stores or acknowledges anything."""
    bench, _ = crew
    script = tmp_path / "dying.py"
    script.write_text(
        "import os, signal, sys\n"
        "from functools import partial\n"
        "from edge_fl.wire.endpoint import Endpoint\n"
        "from edge_fl.wire.mqtt.transport import MqttTransport\n"
        "from edge_fl_server.registry import Database\n"
        "from edge_fl_server.mqtt.updates import workers\n"
        "from edge_fl_server.mqtt.journal import Journal\n"
        "workers.UpdateWorker._on_packet = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "connect = partial(MqttTransport, Endpoint('127.0.0.1', int(sys.argv[1])))\n"
        "with workers.UpdateWorker(connect, Journal(Database.open(sys.argv[2]))):\n"
        "    print('ready', flush=True)\n"
        "    signal.pause()\n"
    )
    command = [sys.executable, str(script), str(own_mosquitto.settings.port), url]
    dying = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    try:
        assert dying.stdout and dying.stdout.readline() == b"ready\n"
        resending = [bench.device(id) for id in IDS]
        bench.wait_for(full=len(IDS))
        spec = bench.spec("fedavg")
        round = rounds.run(build_method(spec), bench.fleet(spec, deadline_s=90.0), Plan(1, seed=1))
        stop = _resend(resending)
        result = next(round)
        stop()
        assert dying.wait(60) == -9
    finally:
        dying.kill()
        dying.wait()
        dying.stdout.close()
    assert (result.responded, result.attempts) == (IDS, 1)
    assert len(registered_reports.of_run(bench.inbox.journal.db, "t1", 1)) == len(IDS)


def test_over_mtls_workers_share_a_round_and_one_is_killed_in_it(
    mosquitto_program, new_postgresql_database, tmp_path: Path
):
    """Every client has its own certificate and the broker its access list; the workers are the real command."""
    authority, ids = Authority.make(tmp_path / "home"), tmp_path / "ids"
    ids.mkdir()
    names = (*IDS, "worker-1", "worker-2")
    authority.bake({name: ids / name for name in names})
    certificates = register_sync.certificates(authority, "127.0.0.1")
    settings = register_sync.with_register(
        BrokerSettings(tmp_path / "broker", port=0, fleet="main", certificates=certificates), authority
    )
    url = new_postgresql_database()
    with Mosquitto(settings, mosquitto_program) as broker, ExitStack() as stack:
        port, db = broker.settings.port, stack.enter_context(closing(Database.open(url)))
        connect = connector("127.0.0.1", port, tmp_path / "home" / "server")
        journal = stack.enter_context(Journal(db))
        connection = ServerConnection(connect, journal, workers=True, limits=QUICK)
        server = Server.of(connection)
        bench = Bench(connect=connect, topics=connection.topics, server=server)
        connection.open()
        stack.callback(connection.close)
        stack.callback(server.inbox.stop)
        workers = [stack.enter_context(_worker(url, port, ids / name)) for name in ("worker-1", "worker-2")]
        for number, id in enumerate(IDS):
            endpoint = identity.read(ids / id).endpoint("127.0.0.1", port)
            device = ScriptedDevice(
                partial(MqttTransport, endpoint), bench.topics, id, delay_s=2.0 * (number > 2)
            )
            bench.devices.append(device)
        stack.callback(bench.close)
        bench.wait_for(full=len(IDS))
        spec = bench.spec("fedavg")
        found = rounds.run(build_method(spec), bench.fleet(spec, deadline_s=90.0), Plan(1, seed=1))
        killed = threading.Thread(target=_kill_after_one_report, args=(workers[0], db), daemon=True)
        killed.start()
        stop = _resend(bench.devices)
        result = next(found)
        stop()
        killed.join(60)
        assert workers[0].wait(60) == -9
        assert workers[1].poll() is None
        assert (result.responded, result.attempts) == (IDS, 1)
        assert len(registered_reports.of_run(db, "t1", 1)) == len(IDS)
    alone = SequentialClients({id: bench.client(id) for id in IDS}, build_method(spec))
    assert same(result.shared, next(rounds.run(build_method(spec), alone, Plan(1, seed=1))).shared)


@contextmanager
def _worker(url: str, port: int, folder: Path):
    """`edge-fl server worker` with an identity, once it receives reports."""
    there = ("--database", url, "--port", str(port), "--identity", str(folder))
    command = [sys.executable, "-m", "edge_fl", "server", "worker", *there]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    try:
        assert process.stderr
        assert "receiving reports" in process.stderr.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _kill_after_one_report(worker, db):
    while not registered_reports.of_run(db, "t1", 1):
        time.sleep(0.05)
    worker.kill()


def _resend(devices):
    """Send unacknowledged reports again every second, as an agent does."""
    stopped = threading.Event()

    def run():
        while not stopped.wait(1.0):
            for device in devices:
                for unsent in list(device._unacknowledged.values()):
                    device.report(*unsent)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def stop():
        stopped.set()
        thread.join(60)

    return stop
