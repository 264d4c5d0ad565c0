"""Running devices over an in-memory broker and a real one, from birth to an acknowledged report."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edge_fl import metrics
from edge_fl.data.samples import ClientData
from edge_fl.errors import InputError
from edge_fl.failures import Failure
from edge_fl.wire.messages import Command, ServerState
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Listener, Packet, Transport
from edge_fl_devices.agent.events import DataChanged
from edge_fl_devices.board import usage
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.serving.predict import Predictor
from tests.devices import graphs
from tests.devices.scripted import TOPICS, eventually, running
from tests.devices.site import DATA, Site, big, expected, head_device, samples, site_over
from tools.memory_broker import InMemoryBroker, InMemoryTransport


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Site]:
    """Over a broker in memory."""
    broker = InMemoryBroker()
    with site_over(partial(InMemoryTransport, broker), tmp_path) as site:
        yield site
    broker.close()


@pytest.fixture(params=["local", pytest.param("mosquitto", marks=pytest.mark.broker)])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """Over each kind of broker."""
    if request.param == "local":
        yield request.getfixturevalue("local")
        return
    endpoint = request.getfixturevalue("mosquitto").endpoint
    with site_over(partial(MqttTransport, endpoint, session_expiry_s=0), tmp_path) as site:
        yield site


def test_a_head_device_connects_installs_fits_reports_and_predicts(site: Site) -> None:
    server = site.server
    manifest = site.publish()
    with running(head_device(site.home), connect=site.connect):
        assert server.wait_for("pi-01", "meta").samples == 20
        assert server.wait_for("pi-01", "req").kind == "assignment"
        site.serve(manifest)
        report = server.wait_for("pi-01", "rpt")
        assert (report.id, report.kind, report.release, report.head) == ("rel-1", "head", 1, "nearest")
        assert report.extractor == manifest.extractor.sha256 and report.blob is None and not report.error
        found = dict(report.metrics)
        assert found.pop(metrics.LATENCY_AFTER) > 0
        assert found == {
            metrics.TEST_SAMPLES: 10.0,
            metrics.VALIDATION_SAMPLES: 4.0,
            metrics.PERSONAL_AFTER: 1.0,
            metrics.PERSONAL_VALIDATION_AFTER: 1.0,
        }
        assert report.bytes_down == manifest.extractor.bytes and 0 < report.bytes_up < 1000
        server.ack("pi-01", "rel-1")
        server.wait_for("pi-01", "state", lambda s: (s.release, s.activity) == (1, "idle"))
        second = site.publish(big(-graphs.WEIGHTS), expected=-expected())
        site.serve(second)
        report = server.wait_for("pi-01", "rpt", number=2)
        assert report.metrics[metrics.PERSONAL_BEFORE] == 1.0 and report.release == 2
        assert report.metrics[metrics.TEST_LOST] == report.metrics[metrics.TEST_GAINED] == 0
        assert report.metrics[metrics.LATENCY_BEFORE] > 0
        server.ack("pi-01", "rel-2")
        server.wait_for("pi-01", "state", lambda s: (s.release, s.activity) == (2, "idle"))
    activities = [state.activity for state in server.messages("pi-01", "state")]
    assert [*dict.fromkeys(activities)] == ["idle", "fetching", "installing", "fitting", "reporting"]
    assert server.messages("pi-01", "state")[-1].status == "disconnected"
    predictor = Predictor(site.home)
    assert [name for name, _ in predictor.predict(DATA.test.x)] == [manifest.classes[y] for y in DATA.test.y]
    assert predictor.manifest.release == 2


def test_a_broker_may_answer_before_a_device_that_joins_has_its_connection(local: Site) -> None:
    def late(name: str, will: Packet | None, deliver: Listener) -> Transport:
        transport = local.connect(name, will, deliver)
        transport.wait_connected(5)
        time.sleep(0.1)
        return transport

    with running(connect=local.connect) as runner:
        runner.add(head_device(local.home), late)
        assert local.server.wait_for("pi-01", "meta").samples == 20


def test_auto_reports_each_kind_s_accuracy_and_the_day_s_usage(local: Site) -> None:
    data = ClientData(samples(20, 0), samples(12, 1), samples(10, 2))
    device = head_device(local.home, data=lambda: data, kind="auto")
    local.home.mkdir()
    meter = usage.Meter(local.home, lambda: 0, cpu_s=lambda: 5.0)
    meter.update()
    local.serve(local.publish())
    with running(device, connect=local.connect):
        report = local.server.wait_for("pi-01", "rpt")
    assert not report.error
    curve = {metrics.at_labels(labels, "nearest") for labels in (1, 2, 5, 10)}
    assert curve | {metrics.candidate("mlp")} <= report.metrics.keys()
    assert report.metrics[metrics.USED_CPU] == 5.0 and report.metrics[metrics.USED_ENERGY] > 0


def test_a_report_reaches_a_server_that_was_offline(site: Site) -> None:
    server = site.server
    server.online(False)
    manifest = site.publish()
    site.serve(manifest)
    with running(head_device(site.home), connect=site.connect):
        server.wait_for("pi-01", "state", lambda s: s.activity == "reporting")
        assert server.messages("pi-01", "rpt") == []
        server.online()
        server.wait_for("pi-01", "rpt", number=3)  # repeatedly, without an acknowledgement
        server.ack("pi-01", "rel-1")
        server.wait_for("pi-01", "state", lambda s: s.activity == "idle" and s.release == 1)


def test_a_corrupt_chunk_on_the_broker_is_fetched_again_and_never_used(local: Site) -> None:
    server = local.server
    payload = big()
    manifest = local.publish(payload)
    server.chunks(payload, manifest.extractor, spoil={20})
    local.serve(manifest)
    with running(head_device(local.home), connect=local.connect):
        request = server.wait_for("pi-01", "req", lambda request: request.kind == "chunks")
        assert (request.sha256, request.missing[0]) == (manifest.extractor.sha256, 20)
        server.chunks(payload, manifest.extractor)
        assert server.wait_for("pi-01", "rpt").metrics[metrics.PERSONAL_AFTER] == 1.0


def test_a_chunk_that_stays_corrupt_is_reported_and_the_device_retries(local: Site) -> None:
    server = local.server
    payload = big()
    manifest = local.publish(payload)
    server.chunks(payload, manifest.extractor, spoil={0})
    local.serve(manifest)
    with running(head_device(local.home), connect=local.connect):
        server.wait_for("pi-01", "state", lambda s: (s.status, s.why) == ("alert", "chunk_hash"))
        server.chunks(payload, manifest.extractor)
        assert server.wait_for("pi-01", "rpt").bytes_down < 2 * len(payload)
        server.wait_for("pi-01", "state", lambda s: s.status == "ready" and s.release == 1)


def test_an_extractor_that_fails_its_canary_is_reported_and_the_old_model_serves(local: Site) -> None:
    server = local.server
    good = local.publish()
    local.serve(good)
    with running(head_device(local.home), connect=local.connect):
        server.wait_for("pi-01", "rpt")
        server.ack("pi-01", "rel-1")
        local.serve(local.publish(graphs.gives_nan()))
        report = server.wait_for("pi-01", "rpt", number=2)
        assert (report.error, report.release) == ("canary_failed", 2)
        server.wait_for(
            "pi-01", "state", lambda s: (s.status, s.why, s.release) == ("alert", "canary_failed", 1)
        )
    assert Predictor(local.home).manifest == good


def test_metadata_that_arrive_after_the_assignment_are_waited_for(local: Site) -> None:
    server = local.server
    server.assignment("pi-01", "serve", run_id="toy", round=1, id="rel-1", release=1)
    with running(head_device(local.home), connect=local.connect):
        server.wait_for("pi-01", "state", lambda s: s.why == "missing")
        local.publish()
        assert server.wait_for("pi-01", "rpt").release == 1


def test_a_device_without_labels_is_no_alert_and_fits_once_it_has_some(local: Site) -> None:
    server = local.server
    local.serve(local.publish())
    none = DATA.train.take(np.empty(0, np.int64))
    holding = [ClientData(none, none, none)]
    device = head_device(local.home, data=lambda: holding[0])
    with running(device, connect=local.connect) as runner:
        assert server.wait_for("pi-01", "rpt").error == "no_labels"
        server.ack("pi-01", "rel-1")
        idle = server.wait_for("pi-01", "state", lambda s: s.why == "no_labels" and s.activity == "idle")
        assert idle.status == "ready"
        holding[0] = DATA
        runner.deliver(device, DataChanged(device.state.capability))
        assert server.wait_for("pi-01", "rpt", number=2).metrics[metrics.PERSONAL_AFTER] == 1.0


def test_a_revoked_head_is_gone(local: Site) -> None:
    server = local.server
    local.serve(local.publish())
    with running(head_device(local.home), connect=local.connect):
        server.wait_for("pi-01", "rpt")
        server.ack("pi-01", "rel-1")
        server.publish(TOPICS.down("pi-01", "cmd"), Command("c1", "revoke-local-head"))
        server.wait_for("pi-01", "state", lambda s: s.release == 0 and s.activity == "idle", number=2)
    with pytest.raises(InputError, match="no personal model"):
        Predictor(local.home)


def test_a_restarted_process_serves_the_same_model_and_reports_nothing_twice(local: Site) -> None:
    server = local.server
    local.serve(local.publish())
    with running(head_device(local.home), connect=local.connect):
        server.wait_for("pi-01", "rpt")
        server.ack("pi-01", "rel-1")
        server.wait_for("pi-01", "state", lambda s: s.release == 1 and s.activity == "idle")
    device = head_device(local.home)
    with running(device, connect=local.connect):
        server.wait_for(
            "pi-01", "state", lambda s: (s.boot, s.status, s.release) == (device.state.boot, "ready", 1)
        )
        time.sleep(0.3)
    assert len(server.messages("pi-01", "rpt")) == 1


def test_messages_that_break_the_protocol_are_ignored(local: Site) -> None:
    server = local.server
    with running(head_device(local.home), connect=local.connect):
        server.wait_for("pi-01", "state", lambda s: s.status == "ready")
        for payload in (b"[" * 5000, b'{"version": 1e400}', b"\xff", b'{"version": -1, "mode": "serve"}'):
            server.transport.publish(Packet(TOPICS.down("pi-01", "assignment"), payload))
        server.publish(TOPICS.down("pi-01", "cmd"), Command("c1", "rebirth"))
        server.wait_for("pi-01", "meta", number=2)


def test_many_devices_share_one_runner(local: Site) -> None:
    server = local.server
    manifest = local.publish(graphs.graph())
    ids = [f"pi-{number:02d}" for number in range(20)]
    for name in ids:
        local.serve(manifest, name)
    never = head_device(local.folder, "x", check=lambda installed: None)
    devices = [head_device(local.folder / name, name, check=lambda installed: None) for name in ids]
    with running(*devices, connect=local.connect, workers=2):
        for name in ids:
            server.ack(name, server.wait_for(name, "rpt").id)
        eventually(lambda: all(device.is_quiet and device.state.release == 1 for device in devices))
    assert not never.is_quiet and {device.reporting.acknowledged["accepted"] for device in devices} == {1}


def test_a_device_reports_a_server_of_another_protocol(local: Site) -> None:
    server = local.server
    server.publish(TOPICS.server("state"), ServerState(True, "s1", protocol="9.0"), retain=True)
    with running(head_device(local.home), connect=local.connect):
        server.wait_for("pi-01", "state", lambda s: (s.status, s.why) == ("alert", "unsupported_proto"))


def test_an_exception_of_a_job_is_logged_with_its_device_and_the_next_job_runs(
    local: Site, caplog: pytest.LogCaptureFixture
) -> None:
    agent = head_device(local.home)
    with running(agent, connect=local.connect) as runner:
        runner.submit(agent, lambda: 1 / 0)  # type: ignore[arg-type,return-value]
        eventually(lambda: "thread edge-fl-work, pi-01: unexpected error" in caplog.text)
        eventually(lambda: not runner.is_working(agent))
        local.serve(local.publish())
        assert not local.server.wait_for("pi-01", "rpt").error


@pytest.mark.parametrize(("fails", "why"), [(False, Failure.SHUT_DOWN), (True, "")])
def test_a_runner_that_ends_with_an_error_does_not_say_that_this_was_planned(
    local: Site, fails: bool, why: str
) -> None:
    agent, runner = head_device(local.home), Runner()
    runner.add(agent, local.connect)

    def done() -> bool:
        if agent.state.status == "ready" and fails:
            raise RuntimeError("an error of the agent")
        return agent.state.status == "ready"

    with pytest.raises(RuntimeError) if fails else nullcontext():
        runner.run(deadline_s=60, done=done, every_s=0.01)
    state = local.server.wait_for("pi-01", "state", lambda state: state.status == "disconnected")
    assert state.why == why
