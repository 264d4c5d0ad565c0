"""A full device works on each training assignment once and cancels work that is no longer assigned."""

import msgspec
import pytest

from edge_fl.failures import Failure
from edge_fl.wire.messages import (
    Ack,
    Assignment,
    Command,
    Round,
    ServerState,
    spec_digest,
)
from edge_fl_devices.agent import effects, events
from edge_fl_devices.agent.effects import Memory
from edge_fl_devices.agent.outbox import OutboxEntry, Parcel
from edge_fl_devices.agent.state import AgentLimits, wake_at
from tests.devices.agent.agents import (
    DOWN,
    SPEC,
    Agent,
    full_device_at_work,
    none_of,
    only,
    report,
    serve,
    train,
)


def test_a_round_is_fetched_trained_reported_and_acknowledged() -> None:
    device = Agent("full").up()
    device.receive(Round("t", 1, 60, SPEC))
    assert only(effects.Fetch, device.receive(train())) == effects.Fetch(DOWN, keep=False)
    trained = only(effects.Train, device.on(events.Fetched(DOWN.sha256, 900)))
    assert (trained.assignment.id, trained.spec, trained.bytes_down) == ("t-1-0", SPEC, 900)
    sent = only(effects.Send, device.on(events.Finished(report("t-1-0"))))
    assert (sent.parcel.run_id, sent.parcel.round, sent.expiry_s) == ("t", 1, 120)
    acknowledged = device.receive(Ack("t-1-0", "accepted"))
    assert only(effects.Forget, acknowledged).id == "t-1-0"
    assert only(effects.Remember, acknowledged).memory.done == ("t-1-0",)
    assert device.state.outbox == ()


def test_a_round_with_another_specification_than_the_assigned_one_is_not_trained() -> None:
    device = Agent("full").up()
    device.receive(Round("t", 1, 60, msgspec.structs.replace(SPEC, seed=SPEC.seed + 1)))
    assert none_of(effects.Fetch, device.receive(train(spec=spec_digest(SPEC))))
    assert device.state.reason == "forged"
    assert not none_of(effects.Fetch, device.receive(Round("t", 1, 60, SPEC)))


def test_training_waits_for_the_round_that_rebuilds_the_method() -> None:
    device = Agent("full").up()
    assert none_of(effects.Fetch, device.receive(train()))
    assert not none_of(effects.Fetch, device.receive(Round("t", 1, 60, SPEC)))


def test_training_does_not_begin_while_the_server_is_away() -> None:
    device = Agent("full").up(online=False)
    device.receive(Round("t", 1, 60, SPEC))
    assert none_of(effects.Fetch, device.receive(train()))
    assert not none_of(effects.Fetch, device.receive(ServerState(True, "server-1")))


def test_an_update_may_start_from_nothing() -> None:
    device = Agent("full").up()
    device.receive(Round("t", 1, 60, SPEC))
    assert only(effects.Train, device.receive(train(down=None))).bytes_down == 0


def test_an_assignment_of_a_finished_round_is_not_begun() -> None:
    device = Agent("full").up()
    device.receive(Round("t", 2, 60, SPEC))
    assert none_of(effects.Fetch, device.receive(train(round=1)))


def test_an_older_assignment_is_ignored() -> None:
    device = full_device_at_work()
    device.receive(train(version=5, round=2))
    before = device.state
    assert device.receive(train(version=4, round=9)) == () and device.state == before


def test_an_older_assignment_is_ignored_after_a_restart() -> None:
    device = Agent("full", memory=Memory(version=5, server="server-1")).up()
    device.receive(Round("t", 1, 60, SPEC))
    assert none_of(effects.Fetch, device.receive(train(version=4)))
    assert not none_of(effects.Fetch, device.receive(train(version=5)))


def test_a_new_server_s_versions_count_from_the_start() -> None:
    device = Agent("full", memory=Memory(version=500, server="an-earlier-server")).up()
    device.receive(Round("t", 1, 60, SPEC))
    assert not none_of(effects.Fetch, device.receive(train(version=1)))


def test_a_repeated_assignment_is_not_redone_but_its_report_is_sent_again() -> None:
    device = full_device_at_work()
    device.on(events.Finished(report("t-1-0")))
    again = device.receive(train())
    assert only(effects.Send, again).parcel.report.id == "t-1-0" and none_of(effects.Train, again)


def test_an_assignment_done_before_a_restart_is_not_redone() -> None:
    device = Agent("full", memory=Memory(done=("t-1-0",), version=1, server="server-1")).up()
    device.receive(Round("t", 1, 60, SPEC))
    assert device.receive(train(), retain=True) == ()


def test_a_given_up_assignment_is_retried_only_with_a_higher_version() -> None:
    device = Agent("full", memory=Memory(given_up=("t-1-0",), version=1, server="server-1")).up()
    device.receive(Round("t", 1, 60, SPEC))
    assert device.receive(train(version=1), retain=True) == ()
    assert not none_of(effects.Fetch, device.receive(train(version=2)))


def test_an_assignment_whose_report_is_in_the_outbox_after_a_restart_is_not_redone() -> None:
    waiting = OutboxEntry(Parcel("t", 1, report("t-1-0"), 60), 1060, 1000)
    device = Agent("full", outbox=(waiting,)).up()
    device.receive(Round("t", 1, 60, SPEC))
    assert none_of(effects.Fetch, device.receive(train(), retain=True))
    assert len([e for e in device.done if isinstance(e, effects.Send)]) == 1


def test_a_newer_assignment_cancels_a_fetch_at_once() -> None:
    device = Agent("full").up()
    device.receive(Round("t", 1, 60, SPEC))
    device.receive(train())
    device.receive(Round("t", 2, 60, SPEC))
    newer = device.receive(train(version=2, round=2))
    assert newer[1] == effects.CancelFetch() and not none_of(effects.Fetch, newer)


def test_a_newer_assignment_waits_for_the_worker_whose_old_result_is_dropped() -> None:
    device = full_device_at_work()
    device.receive(Round("t", 2, 60, SPEC))
    assert none_of(effects.Fetch, device.receive(train(version=2, round=2)))
    freed = device.on(events.Finished(report("t-1-0")))
    assert only(effects.Forget, freed).id == "t-1-0" and none_of(effects.Send, freed)
    assert not none_of(effects.Fetch, freed)


def test_rest_cancels_the_work_under_way() -> None:
    device = full_device_at_work()
    device.receive(Assignment(2, "rest"))
    assert none_of(effects.Send, device.on(events.Finished(report("t-1-0"))))
    assert wake_at(device.state) == float("inf")


def test_work_past_its_deadline_is_cancelled_and_published() -> None:
    device = full_device_at_work()
    device.sleep_until_woken()
    assert (
        device.now_s == pytest.approx(1120.4)
        and device.statuses()[-1] == "alert"
        and device.state.why == "deadline"
    )
    assert none_of(effects.Send, device.on(events.Finished(report("t-1-0"))))
    assert device.receive(train()) == ()


def test_an_assignment_that_cannot_begin_before_its_deadline_is_given_up() -> None:
    device = Agent("full").up(online=False)
    device.receive(train())
    device.sleep_until_woken()
    device.receive(Round("t", 1, 60, SPEC))
    assert none_of(effects.Fetch, device.receive(ServerState(True, "server-1")))


def test_abort_cancels_the_work() -> None:
    device = full_device_at_work()
    device.receive(Command("c1", "abort"))
    assert none_of(effects.Send, device.on(events.Finished(report("t-1-0"))))
    assert device.receive(train()) == ()


def test_a_head_device_reports_unsupported_tier_for_training() -> None:
    device = Agent().up()
    asked = device.receive(train())
    assert only(effects.Send, asked).parcel.report.error == "unsupported_tier"
    assert only(effects.Keep, asked).parcel == device.state.outbox[0].parcel


def test_a_full_device_ignores_serve() -> None:
    device = Agent("full").up()
    device.receive(serve())
    assert none_of(effects.Refresh, device.last) and none_of(effects.Send, device.last)


def test_failing_training_is_tried_three_times_then_reported() -> None:
    device = Agent("full", limits=AgentLimits(retry_s=1.0)).up()
    device.receive(Round("t", 1, 60, SPEC))
    device.receive(train())
    for _ in range(2):
        device.on(events.Failed(Failure.CHUNK_HASH))
        assert device.statuses()[-1] == "alert" and none_of(effects.Fetch, device.last)
        assert not none_of(effects.Fetch, device.sleep_until_woken())
    sent = only(effects.Send, device.on(events.Failed(Failure.CHUNK_HASH)))
    assert sent.parcel.report.error == "chunk_hash" and sent.parcel.report.kind == "update"
