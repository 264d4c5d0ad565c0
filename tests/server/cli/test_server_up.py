"""`edge-fl server up` as a process next to a run: either may be killed, and devices that join later are served."""

import os
import signal
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from edge_fl.wire.messages import ServerState, decode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_server.children import CommandProcesses
from edge_fl_server.registry import Database, fleets, registered_reports, rollouts
from edge_fl_server.release.publish import Publisher
from edge_fl_server.release.repository import Repository
from tests.devices import graphs
from tests.server.conftest import Stage

START_S = 240.0  # of which two minutes are for a killed run to return

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(1200)]


def server(stage: Stage) -> str:
    """The kind of server that is online: "up", "run" or none, ""."""
    payload = stage.retained("srv/state").get("srv/state")
    state = decode(payload, ServerState) if payload else None
    return "" if not state or not state.online else "up" if state.yields else "run"


def release(stage: Stage, home: Path, db: Database) -> None:
    """What an earlier run left: release 1, rolled out to the whole fleet."""
    transport = stage.connect("publisher", None, lambda event: None)
    payload = graphs.graph(weights=graphs.WEIGHTS)
    manifest = graphs.manifest_for(payload, release=1)
    publisher = Publisher(transport, Topics("main"), Repository(home / "main"))
    publisher.publish(manifest, {manifest.extractor.sha256: payload})
    transport.close()
    fleets.claim(db, "main")
    record = rollouts.get(db, rollouts.begin(db, "main", 1))
    assert record is not None
    rollouts.advance(db, record, state="completed")


@pytest.mark.long
def test_a_server_between_runs_serves_devices_that_join_whatever_process_is_killed(
    own_mosquitto: Mosquitto, tmp_path: Path
) -> None:
    home, lines = tmp_path / "releases", []
    stage = Stage(connect=partial(MqttTransport, own_mosquitto.endpoint))
    options = ["--port", str(own_mosquitto.endpoint.port), "--home", str(home)]
    with closing(Database.open(tmp_path / "server" / "registry.sqlite")) as db:
        release(stage, home, db)
        with CommandProcesses(
            lambda name, line: lines.append(f"{name}: {line}"), {"OMP_NUM_THREADS": "1"}
        ) as children:

            def has_joined(device: str) -> bool:
                head = stage.head(device, tmp_path)
                return stage.eventually(lambda: [ack.status for ack in head.acks] == ["accepted"])

            def becomes(kind: str) -> bool:
                # seldom, as each time it connects to the broker anew
                return stage.eventually(lambda: server(stage) == kind, START_S, every_s=0.5)

            first = children.start("first", "server", "up", *options)
            assert becomes("up"), lines
            assert has_joined("h1"), lines
            run = children.start("run", "server", "run", "demo", "--runs", str(tmp_path / "runs"), *options)
            assert becomes("run"), lines
            assert stage.eventually(lambda: "run: waiting for 4 full devices, 0 online" in lines, START_S), (
                lines
            )
            assert not [line for line in lines if "lost" in line or "trying again" in line], lines
            planned = lambda line: "handed over to server" in line and "as planned" in line  # noqa: E731
            assert stage.eventually(lambda: any(map(planned, lines)), START_S), lines
            os.kill(run.pid, signal.SIGKILL)
            assert becomes("up"), lines
            assert has_joined("h2"), lines
            os.kill(first.pid, signal.SIGKILL)
            assert becomes(""), lines
            last = children.start("last", "server", "up", *options)
            assert becomes("up"), lines
            assert has_joined("h3"), lines
        assert last.code == 0 and server(stage) == "", lines
        assert lines[-1] == "last: fleet 'main': offline, stopped by SIGTERM"
        assert {report.device for report in registered_reports.of_release(db, "main", 1)} == {
            "h1",
            "h2",
            "h3",
        }
    stage.close()
