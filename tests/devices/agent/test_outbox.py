"""A report is sent until it is acknowledged or its deadline has passed."""

from dataclasses import replace

from edge_fl.wire.messages import (
    Ack,
    Round,
    ServerState,
)
from edge_fl.wire.topics import Address
from edge_fl.wire.transport import Connected, Disconnected
from edge_fl_devices.agent import effects, events, outbox
from edge_fl_devices.agent.outbox import Parcel
from edge_fl_devices.agent.state import wake_at
from tests.devices.agent.agents import (
    SPEC,
    Agent,
    full_device_at_work,
    head_device_reporting,
    none_of,
    only,
    report,
    train,
)


def test_a_report_is_sent_again_until_it_is_acknowledged() -> None:
    device = head_device_reporting()
    pauses = []
    for _ in range(3):
        before_s = device.now_s
        assert only(effects.Send, device.sleep_until_woken()).parcel.report.id == "rel-3"
        pauses.append(device.now_s - before_s)
    assert device.state.outbox[0].sent == 4
    assert all(7.5 <= pause <= 12.5 for pause in pauses) and len(set(pauses)) == 3
    device.receive(Ack("rel-3", "duplicate"))
    assert wake_at(device.state) == float("inf")


def test_a_report_is_sent_again_on_reconnect() -> None:
    device = head_device_reporting()
    device.on(Disconnected("gone"))
    device.on(Connected(session_present=True))
    assert not none_of(effects.Send, device.sleep_until_woken())


def test_a_report_waits_for_an_offline_server_and_outlives_its_deadline_by_the_grace_time() -> None:
    device = full_device_at_work()
    device.receive(ServerState(False, "server-1"))
    assert none_of(effects.Send, device.on(events.Finished(report("t-1-0"))))
    device.receive(ServerState(True, "server-1"), after_s=119.0)
    assert only(effects.Send, device.sleep_until_woken()).expiry_s in (29, 30, 31)


def test_a_fleet_sends_its_reports_spread_over_the_server_s_return_time() -> None:
    waits = []
    for number in range(40):
        device = Agent("full")
        device.state = replace(device.state, boot=f"boot-{number}")
        device.up()
        assert (
            only(
                effects.SpreadReconnects, device.receive(ServerState(True, "server-1", return_s=60.0))
            ).over_s
            == 60.0
        )
        assert none_of(effects.SpreadReconnects, device.receive(ServerState(True, "server-1", return_s=60.0)))
        waiting = outbox.put((), Parcel("t", 1, report("t-1-0"), 120.0), device.now_s)
        device.state = replace(device.state, outbox=waiting)
        device.receive(ServerState(False, "server-1", return_s=60.0))
        device.receive(ServerState(True, "server-2", return_s=60.0))
        waits.append(device.state.outbox[0].next_s - device.now_s)
    assert min(waits) < 10 and max(waits) > 50 and max(waits) <= 60


def test_a_fleet_sends_its_reports_within_a_second_if_the_server_names_no_time() -> None:
    waits = []
    for number in range(40):
        device = Agent("full")
        device.state = replace(device.state, boot=f"boot-{number}")
        device.up()
        waiting = outbox.put((), Parcel("t", 1, report("t-1-0"), 120.0), device.now_s)
        device.state = replace(device.state, outbox=waiting)
        device.receive(ServerState(True, "server-2"))
        waits.append(device.state.outbox[0].next_s - device.now_s)
    assert 0 <= min(waits) < 0.1 and 0.9 < max(waits) < 1


def test_a_report_past_its_deadline_is_forgotten() -> None:
    device = full_device_at_work()
    device.on(events.Finished(report("t-1-0")))
    device.on(events.Tick(), after_s=120.0)
    assert only(effects.Forget, device.last).id == "t-1-0" and device.state.why == "deadline"


def test_an_acknowledgement_of_another_report_changes_nothing() -> None:
    device = head_device_reporting()
    before = device.state
    assert device.receive(Ack("rel-2", "accepted")) == () and device.state == before


def test_an_acknowledgement_that_was_retained_is_ignored() -> None:
    device = head_device_reporting()
    assert device.receive(Ack("rel-3", "accepted"), retain=True) == () and len(device.state.outbox) == 1


def test_a_parcel_is_in_the_outbox_once() -> None:
    parcel = Parcel("t", 1, report("t-1-0"), 60)
    once = outbox.put((), parcel, 1000)
    assert outbox.put(once, parcel, 1001) == once


def test_the_memory_is_bounded() -> None:
    device = Agent("full").up()
    for round in range(100):
        device.receive(Round("t", round, 60, SPEC))
        device.on(events.Received(Address("round", path=(f"t{round}",)), Round(f"t{round}", 1, 60, SPEC)))
        device.receive(train(version=2 * round, round=round, down=None))
        device.on(events.Finished(report(f"t-{round}-0")))
        device.receive(Ack(f"t-{round}-0", "accepted"))
        device.receive(train(version=2 * round + 1, round=round, attempt=1, deadline_s=0.5))
        device.on(events.Tick(), after_s=1.0)
    assert (
        len(device.state.memory.done) == len(device.state.memory.given_up) == 64
        and len(device.state.rounds) == 4
    )
