"""Numbers and texts of one device cannot spoil results, logs or tables."""

import json
import logging

import msgspec
import pytest

from edge_fl import metrics
from edge_fl.console.units import MAX_PROSE
from edge_fl.fleet.remote_settings import ActualSetting, SettingsStatus
from edge_fl.wire.messages import Capability, DeviceState, Log, Report, encode
from edge_fl_console import changes
from edge_fl_console.dashboard import prometheus
from edge_fl_server.mqtt.device_packets import decode_cleaned, one_line
from edge_fl_server.mqtt.devices import device_list, remote_settings
from edge_fl_server.registry import Database, registered_reports, runs
from edge_fl_server.registry.registered_reports import KEPT_REJECTIONS
from edge_fl_server.registry.tables import RejectionRecord, RoundRecord, RunRecord
from tests.rejections import rejections_of
from tests.server.single_round import one_round

IMPLAUSIBLE = {
    "undeclared": {"fedcrl.tau_mix": 0.5},
    "accuracy": {metrics.PERSONAL_AFTER: 1e308},
    "negative accuracy": {metrics.GLOBAL_TEST: -0.01},
    "count": {metrics.TEST_SAMPLES: -1.0},
    "more pictures than a board holds": {metrics.TEST_SAMPLES: 1e9},
    "magnitude": {metrics.USED_CPU: -1e300},
}


@pytest.mark.parametrize("bad", IMPLAUSIBLE)
@pytest.mark.parametrize("error", ["", "out_of_memory"])
def test_a_report_with_an_implausible_number_is_rejected(bench, bad, error):
    bench.device("d1")
    wrong = bench.device(
        "d2",
        tamper=lambda mode, report, payload: [
            (msgspec.structs.replace(report, metrics=IMPLAUSIBLE[bad], error=error), payload)
        ],
    )
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.responded == ("d1",)
    assert bench.eventually(lambda: [ack.reason for ack in wrong.acks] == ["metrics"])


def test_work_that_failed_has_no_numbers(bench):
    bench.device("d1")
    failed = {"metrics": {metrics.PERSONAL_AFTER: 1.0}, "error": "out_of_memory"}
    wrong = bench.device(
        "d2", tamper=lambda mode, report, payload: [(msgspec.structs.replace(report, **failed), payload)]
    )
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.responded == ("d1",)
    assert bench.eventually(lambda: [ack.reason for ack in wrong.acks] == ["metrics"])
    sent = Report("r", "head", "b", 9, failed["metrics"], release=2, error="out_of_memory")
    stored = registered_reports.record_of("main", "d2", "toy", 1, sent)
    assert (stored.before, stored.after, stored.metrics) == (None, None, {})


def test_a_method_s_own_number_is_taken_where_it_is_declared(bench):
    bench.device(
        "d1",
        tamper=lambda mode, report, payload: [
            (msgspec.structs.replace(report, metrics={"fedcrl.tau_mix": 0.5}), payload)
        ],
    )
    bench.wait_for(full=1)
    _, result = one_round(bench, bench.spec("fedcrl"))
    assert result.responded == ("d1",)


def test_device_text_has_no_control_characters_after_decoding():
    sneaky = "a\nb\x1b[31mc\u202ed\x7f\r\t\u2028e"
    state = decode_cleaned(encode(DeviceState("alert", "b1", why=sneaky)), DeviceState)
    assert state.why == "a b [31mc d    e" == one_line(sneaky)
    notes = decode_cleaned(
        json.dumps({"tier": "full", "machine": sneaky, "python": "3", "notes": [sneaky]}).encode(), Capability
    )
    assert [notes.machine, *notes.notes] == [one_line(sneaky)] * 2
    inside = SettingsStatus(1, {"data": ActualSetting("remote", [sneaky], sneaky)})
    able = decode_cleaned(encode(Capability("head", "x", "3", settings=inside)), Capability)
    assert able.settings
    assert able.settings.settings["data"] == ActualSetting("remote", [one_line(sneaky)], one_line(sneaky))
    report = decode_cleaned(encode(Report("r1", "head", "b1", 9, {"m": 0.5}, error="ö\n")), Report)
    assert (report.error, report.metrics) == ("ö ", {"m": 0.5})


def test_lines_and_states_of_a_device_reach_log_and_registry_on_one_line(bench, caplog):
    device = bench.device("d1")
    bench.wait_for(full=1)
    caplog.set_level(logging.DEBUG)
    device.send(
        bench.topics.up("d1", "state"), encode(DeviceState("alert", "b1", why="x\n\x1b[2J")), retain=True
    )
    device.send(f"{bench.topics.root}/d/d1/up/non\x1b[2Jsense", b"{}")
    device.send(bench.topics.up("d1", "log"), encode(Log("warning", "first\nERROR d9: forged \x1b[31m")))
    assert bench.eventually(lambda: bench.connection.malformed.total() == 1)
    assert bench.eventually(lambda: (d := bench.roster.get("d1")) and d.state.why == "x  [2J")
    assert all(char.isprintable() for record in caplog.records for char in record.getMessage())
    assert bench.eventually(lambda: rejections_of(bench.inbox.journal.db, "main", device="d1"))
    (kept,) = rejections_of(bench.inbox.journal.db, "main", device="d1")
    assert kept.reason == "malformed" and (kept.id + kept.detail).isprintable()
    bench.inbox.journal.reject("d2", "", 0, "r", "parts", "name\n\x1b[2J")
    (kept,) = rejections_of(bench.inbox.journal.db, "main", device="d2")
    assert kept.detail == "name  [2J"


@pytest.mark.parametrize(
    "column",
    [
        *(
            device_list.SHOWN[key]
            for key in ("why", "machine", "agent", "agent_update", "reason", "measured")
        ),
        *(remote_settings.COLUMNS[key] for key in ("actual", "state")),
        changes.COLUMNS["text"],
    ],
)
def test_a_long_text_of_a_device_is_cut_in_every_table(column):
    assert len(column.write("x" * 2000)) <= MAX_PROSE and column.write("short") == "short"


def test_the_counter_of_rejected_reports_never_decreases():
    db = Database.open()

    def count(reason: str) -> float:
        lines = prometheus.text(db, "main").decode().splitlines()
        name = f'edge_fl_rejected_reports_total{{fleet="main",reason="{reason}"}}'
        return next(float(line.split()[-1]) for line in lines if line.startswith(name))

    registered_reports.reject(db, RejectionRecord("main", "d1", "r", "run", 1, "samples"))
    for number in range(KEPT_REJECTIONS + 5):
        registered_reports.reject(db, RejectionRecord("main", "d1", f"r{number}", "run", 1, "malformed"))
    assert (count("samples"), count("malformed")) == (1, KEPT_REJECTIONS + 5)


def test_what_the_round_gate_decided_is_counted_from_zero_on():
    db = Database.open()

    def counts() -> dict[str, float]:
        lines = (line.rsplit(" ", 1) for line in prometheus.text(db, "main").decode().splitlines())
        return {name: float(value) for name, value in lines if name.startswith("edge_fl_gate_")}

    def gated(outcome: str) -> str:
        return f'edge_fl_gate_rounds_total{{fleet="main",outcome="{outcome}"}}'

    named = 'edge_fl_gate_named_devices_total{fleet="main"}'
    nothing = dict.fromkeys([*map(gated, ("accepted", "repaired", "dropped", "forced")), named], 0)
    assert counts() == nothing
    for outcome, devices in (("accepted", 0), ("repaired", 2), ("dropped", 0), ("repaired", 1)):
        runs.count_verdict(db, "main", outcome, devices)
    runs.count_verdict(db, "other", "dropped", 1)
    assert counts() == nothing | {gated("accepted"): 1, gated("repaired"): 2, gated("dropped"): 1, named: 3}


def test_the_time_of_a_repeated_round_adds_up():
    db = Database.open()
    runs.begin(db, RunRecord("r", "main", "fedavg", "digits", "fleet", 3, "runs/r"))
    for seconds in (10.0, 3.0):
        runs.record_round(db, RoundRecord("r", 1, 2, 2, seconds))
    assert 'edge_fl_round_duration_seconds_sum{fleet="main"} 13.0' in prometheus.text(db, "main").decode()
