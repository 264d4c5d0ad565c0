"""The server's commands: invalid input gives one line and an exit code; a signal ends a run in order."""

import json
import socket
import time
from contextlib import closing

import msgspec
import pytest

from edge_fl.cli import main
from edge_fl.console.tables import listing
from edge_fl.errors import InputError
from edge_fl.fields import Tier
from edge_fl.metrics import PERSONAL_AFTER
from edge_fl.wire.messages import Capability, DeviceState, Report, encode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet
from edge_fl_server.children import CommandProcesses
from edge_fl_server.mqtt.connector import LeaseLimits
from edge_fl_server.mqtt.devices import device_list
from edge_fl_server.mqtt.devices.roster import RosterDevice
from edge_fl_server.registry import Database, registered_devices, registered_reports, tables
from edge_fl_server.registry.tables import DeviceRecord, ReportRecord
from edge_fl_server.runs.recorder import RunTotals
from edge_fl_server.runs.results import Results


def test_an_unknown_recipe_setting_or_dataset_is_one_line_and_exit_code_4(capsys, tmp_path):
    for arguments, said in (
        (["nosuch"], "recipe 'nosuch': unknown"),
        (["demo", "--set", "method.epoch=3"], "did you mean 'epochs'"),
        (["demo", "--set", "data.dataset=digitz"], "digitz"),
        (["demo", "--set", "method.name=repperr"], "did you mean 'repper'"),
        (["--resume", str(tmp_path / "norun")], "not a run's folder"),
    ):
        assert main(["server", "run", *arguments, "--runs", str(tmp_path / "runs")]) == 4
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_no_broker_is_one_line_and_exit_code_2(capsys):
    with socket.socket() as nobody:  # bound, but does not listen
        nobody.bind(("127.0.0.1", 0))
        assert main(["fleet", "list", "--port", str(nobody.getsockname()[1])]) == 2
    assert "edge-fl broker up" in capsys.readouterr().err


@pytest.mark.broker
def test_fleet_list_shows_that_no_server_is_online_and_when_one_last_received_a_message(
    own_mosquitto, tmp_path, capsys
):
    topics, endpoint = Topics("main"), own_mosquitto.endpoint
    device = MqttTransport(endpoint, "pi-1", None, lambda event: None)
    device.publish(Packet(topics.up("pi-1", "state"), encode(DeviceState("ready", "b1")), retain=True))
    device.drain(60)
    with closing(Database.open(tmp_path / "server" / "registry.sqlite")) as db:
        registered_devices.record(db, [DeviceRecord("main", "pi-1", "ready")])
        (known,) = registered_devices.listed(db, "main")
    where = ["--port", str(endpoint.port), "--home", str(tmp_path / "releases"), "--format", "json"]
    assert main(["fleet", "list", *where]) == 0
    said = capsys.readouterr()
    (row,) = json.loads(said.out)
    assert (row["status"], row["last_seen"]) == ("ready", known.seen_at[:19].replace("T", " "))
    assert "no server is online" in said.err
    device.close()


@pytest.mark.broker
def test_sigterm_ends_a_run_that_waits_for_devices_as_stopped(own_mosquitto, tmp_path):
    lines = []
    port = str(own_mosquitto.endpoint.port)
    with CommandProcesses(lambda name, line: lines.append(line), {"OMP_NUM_THREADS": "1"}) as children:
        folders = ["--runs", str(tmp_path / "runs"), "--home", str(tmp_path / "home")]
        child = children.start("server", "server", "run", "demo", "--port", port, *folders)
        until = time.monotonic() + 60
        while not any("waiting for 4 full devices" in line for line in lines) and time.monotonic() < until:
            time.sleep(0.05)
    assert child.code == 143 and lines[-1] == "edge-fl: stopped by SIGTERM", lines
    (path,) = (tmp_path / "runs").iterdir()
    state = Results.open(path).state()
    assert (state.state, state.reason) == ("stopped", "stopped by SIGTERM")


def test_the_list_shows_the_last_state_of_each_device(stage, tmp_path):
    stage.head("h1", tmp_path)
    going, quick, rows = stage.device("d1"), LeaseLimits(settle_s=0.2), []
    assert stage.eventually(lambda: "d/d1/up/meta" in stage.retained())  # it has to be born before it goes
    going.crash()
    db, at = Database.open(), "2026-11-20T14:03:59.123+00:00"
    seen = DeviceRecord("main", "d1", seen_at=at, first_seen_at=at, outlier_score=0.5)
    db.put(tables.devices, [msgspec.to_builtins(seen)])
    registered_reports.accept(
        db, ReportRecord("main", "d1", "r1", "run", 1, "update", 9, {PERSONAL_AFTER: 0.923}, after=0.923)
    )

    def complete() -> bool:
        rows[:] = device_list.devices(stage.connect, "main", db, quick).rows
        return [(row["status"], row["tier"]) for row in rows] == [("lost", "full"), ("ready", "head")]

    assert stage.eventually(complete), rows
    lost, there = rows
    assert (lost["device"], lost["tier"], lost["status"]) == ("d1", "full", "lost")
    assert (there["device"], there["head"], there["samples"]) == ("h1", "nothing fitted yet", 9)
    assert (lost["last_seen"], there["last_seen"]) == ("2026-11-20 14:03:59", "")
    assert (lost["measured"], there["measured"]) == ("", "")
    assert (lost["score"], lost["standing"], there["score"]) == (0.5, "", None)
    assert (lost["accuracy"], there["accuracy"], lost["release"]) == (0.923, None, 0)
    table = listing([lost | {"score": 0.0}, there], device_list.SHOWN)
    shown = dict(zip(table.headings, table.rows[0], strict=True))
    assert (shown["accuracy"], shown["release"], shown["outlier score"]) == ("92.3 %", "-", "-")
    registered_reports.accept(db, ReportRecord("main", "h1", "r2", "run", 1, "head", 9, head="fleet"))
    there = device_list.devices(stage.connect, "main", db, quick).rows[1]
    assert (there["head"], there["configured"]) == ("fleet's head with own labels", "svm")
    with pytest.raises(InputError, match="no fleet 'other' on this broker"):
        device_list.devices(stage.connect, "other", db, quick)


def test_the_list_shows_a_devices_measurements_and_whether_a_server_is_online(bench):
    able = Capability("head", "aarch64", "3.11", notes=["no torch", "512 MB"])
    transport = bench.connect("d1", None, lambda event: None)
    transport.publish(Packet(bench.topics.up("d1", "meta"), encode(able), retain=True))
    transport.drain(60)
    online, (row,) = device_list.devices(bench.connect, "main", Database.open(), LeaseLimits(settle_s=0.2))
    assert online
    assert (row["status"], row["measured"]) == ("unknown", "no torch; 512 MB")
    bench.connection.close()
    assert not device_list.devices(bench.connect, "main", Database.open(), LeaseLimits(settle_s=0.2)).online
    transport.close()


def test_the_list_and_the_registry_agree_on_a_device_whose_state_cannot_be_read(stage, tmp_path):
    db = Database.open()
    registered_devices.record(
        db, [DeviceRecord("main", "d1", "ready"), DeviceRecord("main", "gone", "ready")]
    )
    registered_devices.remove(db, "main", "gone", "decommissioned")
    transport = stage.connect("d1", None, lambda event: None)
    for name in ("d1", "d2", "gone"):
        transport.publish(Packet(stage.topics.up(name, "state"), b'{"status": 7', retain=True))
    transport.drain(60)
    known, new = device_list.devices(stage.connect, "main", db, LeaseLimits(settle_s=0.2)).rows
    assert (
        known["status"] == registered_devices.get(db, "main", "d1").status == "ready"
    )  # as `fleet changes` counts
    assert (known["device"], new["device"], new["status"]) == ("d1", "d2", "unknown")
    for row in (known, new):
        assert str(row["reason"]).startswith("its state on the broker cannot be read (")
    transport.close()


def device(id, tier):
    return RosterDevice(
        id,
        DeviceState("ready", "b1"),
        Capability(tier, "arm", "3", samples=7, head="mlp" if tier == "head" else ""),
    )


def report(kind="head", **fields):
    return Report("id", kind, "b1", 6, seconds=1.5, bytes_down=10, bytes_up=1, **fields)


def test_a_row_says_which_head_was_fitted_and_what_its_accuracy_was_measured_on():
    ledger = RunTotals()
    devices = {id: device(id, "head") for id in ("h1", "h2")}
    found = {"personal.test_acc.after": 0.83, "test_samples": 60.0, "fleet.test_acc": 0.76}
    ledger.note("h1", report(metrics=found, release=1, head="fleet"))
    ledger.note("h2", report(metrics={"test_samples": 6.0}, release=1, head="fleet"))
    one, other = ledger.rows(devices)
    assert (one.fitted, one.labels, one.fleet) == ("fleet's head with own labels", 60, 0.76)
    assert one.low == pytest.approx(0.736, abs=1e-3) and one.high == pytest.approx(0.896, abs=1e-3)
    assert "fleet's head 76.0 % on the same, +7.0 points" in one.measured.words
    assert (other.after, other.low, other.measured.words) == (None, None, "not measured yet (6 of 8 scenes)")


def test_run_totals_add_bytes_and_seconds_and_keep_the_last_measurement():
    ledger = RunTotals()
    devices = {"d1": device("d1", "full"), "h1": device("h1", "head"), "h2": device("h2", "head")}
    ledger.note("h1", report(metrics={"personal.test_acc.after": 0.5}, release=1))
    ledger.note(
        "h1", report(metrics={"personal.test_acc.before": 0.5, "personal.test_acc.after": 0.75}, release=2)
    )
    ledger.note("h1", report(error="enospc", release=3))
    ledger.note("d1", report("update"))
    ledger.measure({"d1": {"personal.test_acc.after": 0.25}})
    ledger.enter("c000", 4)
    ledger.measure({"c000": {"personal.test_acc.after": 1.0}})
    rows = {row.device: row for row in ledger.rows(devices)}
    assert (rows["h1"].before, rows["h1"].after, rows["h1"].release) == (0.5, 0.75, 2)
    assert (rows["h1"].bytes_down, rows["h1"].bytes_up, rows["h1"].seconds) == (30, 3, 4.5)
    assert (rows["h2"].samples, rows["h2"].after) == (7, None)
    assert [rows[id].tier for id in ("c000", "d1", "h1")] == ["simulated", Tier.FULL, Tier.HEAD]
    summaries = ledger.summaries(devices)
    means = {
        name: (summary.mean, summary.clients) for name, summary in summaries.items() if name.endswith("after")
    }
    assert means == {
        "personal.test_acc.after": (pytest.approx(2 / 3), 3),
        "head.personal.test_acc.after": (0.75, 1),
        "full.personal.test_acc.after": (0.625, 2),
    }
    assert json.dumps({name: summary.mean for name, summary in summaries.items()})


def test_admit_ends_a_devices_quarantine(tmp_path):
    db = Database.open(tmp_path / "registry.sqlite")
    registered_devices.quarantine(db, "main", "pi-01", "3 reports refused")
    options = ["--database", str(tmp_path / "registry.sqlite")]
    assert main(["fleet", "admit", "pi-10", *options]) == 4
    assert main(["fleet", "admit", "pi-01", *options]) == 0
    assert registered_devices.blocked(db, "main") == {}
