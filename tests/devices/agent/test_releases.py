"""A head-only device brings the assigned release into service and retries while it is assigned."""

import math
from dataclasses import replace

import msgspec
import pytest

from edge_fl.blob import describe
from edge_fl.failures import Failure
from edge_fl.release.agent import AgentUpdate, UpdateStatus
from edge_fl.wire.messages import (
    Ack,
    Command,
    DeviceState,
    Log,
)
from edge_fl.wire.topics import Address
from edge_fl.wire.transport import Connected, Disconnected
from edge_fl_devices.agent import effects, events
from edge_fl_devices.agent.effects import Memory
from edge_fl_devices.agent.state import LIMITS, wake_at
from tests.devices.agent.agents import (
    MANIFEST,
    ONNX,
    Agent,
    head_device_reporting,
    head_device_serving,
    new_data,
    none_of,
    only,
    report,
    serve,
    train,
)


def test_a_release_is_refreshed_fetched_installed_fitted_and_reported() -> None:
    extra = describe(b"head")
    device = Agent().up()
    assert only(effects.Refresh, device.receive(serve())).release == 3
    assert only(effects.Fetch, device.on(events.Refreshed(MANIFEST, (ONNX, extra)))) == effects.Fetch(
        ONNX, keep=True
    )
    assert only(effects.Fetch, device.on(events.Fetched(ONNX.sha256, 900))).blob == extra
    assert only(effects.Install, device.on(events.Fetched(extra.sha256, 4))).manifest == MANIFEST
    assert only(effects.Fit, device.on(events.Installed(3))).bytes_down == 904
    finished = device.on(events.Finished(report("rel-3", "head", release=3)))
    assert only(effects.Send, finished).expiry_s == 86_400
    state = [e.message for e in finished if isinstance(e, effects.Publish)][-1]
    assert isinstance(state, DeviceState) and (state.status, state.release) == ("ready", 3)
    assert isinstance(finished[-1], effects.Send)  # a server that leaves with this report knows the state


def test_a_fit_under_way_is_reported_although_a_newer_release_is_assigned() -> None:
    device = Agent().up()
    device.receive(serve())
    device.on(events.Refreshed(MANIFEST, installed=True))
    device.receive(serve(version=2, release=4))
    finished = device.on(events.Finished(report("rel-3", "head", release=3)))
    assert only(effects.Send, finished).parcel.report.id == "rel-3"
    assert only(effects.Refresh, finished).release == 4


def test_a_newer_release_cancels_the_download_of_the_older_one() -> None:
    device = Agent().up()
    device.receive(serve())
    device.on(events.Refreshed(MANIFEST, (ONNX,)))
    newer = device.receive(serve(version=2, release=4))
    assert effects.CancelFetch() in newer and only(effects.Refresh, newer).release == 4


def test_an_installed_release_is_only_fitted() -> None:
    device = Agent().up()
    device.receive(serve())
    assert not none_of(effects.Fit, device.on(events.Refreshed(MANIFEST, installed=True)))


def test_a_release_is_installed_while_the_server_is_away() -> None:
    assert not none_of(effects.Refresh, Agent().up(online=False).receive(serve()))


def test_a_release_with_late_metadata_is_retried_when_they_change() -> None:
    device = Agent().up()
    device.receive(serve())
    device.on(events.Failed(Failure.MISSING))
    assert not none_of(effects.Refresh, device.on(events.MetadataChanged(), after_s=0.1))


def test_a_release_is_retried_while_assigned_with_growing_pauses() -> None:
    device = Agent().up()
    device.receive(serve())
    pauses = []
    for _ in range(12):
        device.on(events.Failed(Failure.DEADLINE))
        before_s = device.now_s
        assert not none_of(effects.Refresh, device.sleep_until_woken())
        pauses.append(device.now_s - before_s)
    assert 1.5 <= pauses[0] <= 2.5 and 225 <= pauses[-1] <= 375


def test_the_first_retries_of_a_fleet_are_spread_by_a_quarter_around_two_seconds() -> None:
    pauses = []
    for number in range(40):
        device = Agent()
        device.state = replace(device.state, boot=f"boot-{number}")
        device.up()
        device.receive(serve())
        device.on(events.Failed(Failure.DEADLINE))
        pauses.append(device.state.not_before_s - device.now_s)
    assert 1.5 <= min(pauses) < 1.55 and 2.45 < max(pauses) < 2.5


def killed(device: Agent) -> int:
    """Let every attempt end by a signal, until the device waits; return the number of attempts."""
    for tries in range(1, 100):
        device.on(events.Failed(Failure.KILLED, signal="SIGSEGV"))
        if device.state.not_before_s == math.inf:
            return tries
        device.on(events.Tick(), device.state.not_before_s - device.now_s)
        assert device.state.work
    raise AssertionError("it never stops")


def logged(device: Agent) -> list[str]:
    return [
        e.message.text for e in device.done if isinstance(e, effects.Publish) and isinstance(e.message, Log)
    ]


def test_a_release_whose_child_is_killed_is_tried_a_few_times_reported_and_says_what_it_waits_for() -> None:
    device = Agent().up()
    device.receive(serve())
    assert killed(device) == LIMITS.max_kills
    (sent,) = [e for e in device.done if isinstance(e, effects.Send)]
    assert (sent.parcel.report.error, sent.parcel.report.release) == ("killed", 3)
    assert (device.state.status, device.state.reason) == ("alert", "killed")
    assert logged(device)[-2:] == [
        f"serve for rel-3 failed, try {LIMITS.max_kills}: killed (SIGSEGV)",
        "rel-3: not tried again until new data, another release or a restart",
    ]
    device.receive(Ack("rel-3", "accepted"))
    assert none_of(effects.Refresh, device.on(events.Tick(), 1e6))
    assert none_of(effects.Refresh, device.on(events.MetadataChanged()))
    assert "rel-3" not in device.state.memory.given_up  # so the next start tries again


@pytest.mark.parametrize("acknowledged", [True, False])
def test_new_data_begin_a_release_again_whose_child_was_killed(acknowledged: bool) -> None:
    device = Agent().up()
    device.receive(serve())
    killed(device)
    if acknowledged:
        device.receive(Ack("rel-3", "accepted"))
    new_data(device)
    device.receive(device.echo())
    assert any(isinstance(effect, effects.Refresh) for effect in device.done[-6:])
    assert not device.state.outbox and device.state.work and killed(device) == LIMITS.max_kills


def test_another_release_is_begun_at_once_after_one_whose_child_was_killed() -> None:
    device = Agent().up()
    device.receive(serve())
    killed(device)
    assert only(effects.Refresh, device.receive(serve(version=2, release=4))).release == 4


@pytest.mark.parametrize("reason", [Failure.KILLED, Failure.OUT_OF_MEMORY, Failure.DEADLINE, Failure.ERROR])
def test_a_refit_that_failed_is_tried_again(reason: Failure) -> None:
    """Otherwise new pictures count as seen, and no head knows them."""
    device = refitting()
    device.on(events.Failed(reason))
    fit = only(effects.Fit, device.sleep_until_woken())
    assert fit.assignment.version == 0
    device.on(events.Finished(report(fit.assignment.id, "head", release=3)))
    assert device.state.reason == "" and wake_at(device.state) < math.inf  # its report is sent


def test_a_refit_whose_child_is_killed_waits_for_new_data() -> None:
    device = refitting()
    assert killed(device) == LIMITS.max_kills
    assert not device.state.outbox and device.state.reason == "killed"
    assert wake_at(device.state) == math.inf
    new_data(device)
    device.receive(device.echo())
    assert device.state.work and device.state.work.activity == "fitting"


def test_a_refit_that_waits_does_not_keep_a_full_device_awake() -> None:
    device = refitting()
    device.on(events.Failed(Failure.DEADLINE))
    full = msgspec.structs.replace(device.state.capability, tier="full")
    device.on(events.TierChanged(full))
    device.receive(device.echo())
    assert device.state.refit and wake_at(device.state) == math.inf


def refitting() -> Agent:
    """A device that serves a release and fits another head because its data changed."""
    device = head_device_serving()
    new_data(device)
    device.receive(device.echo())
    assert device.state.work and device.state.work.activity == "fitting"
    return device


def test_a_failure_while_offline_is_in_the_status_after_reconnecting() -> None:
    device = Agent().up()
    device.receive(serve())
    device.on(Disconnected("gone"))
    assert device.on(events.Failed(Failure.DEADLINE)) == ()
    device.on(Connected(session_present=True))
    device.receive(device.echo())
    assert device.statuses()[-1] == "alert" and device.state.reason == "deadline"


def test_a_release_that_failed_its_canary_is_reported_and_not_tried_again() -> None:
    device = Agent().up()
    device.receive(serve())
    sent = only(effects.Send, device.on(events.Failed(Failure.CANARY_FAILED)))
    assert (sent.parcel.report.error, sent.parcel.report.release) == ("canary_failed", 3)
    device.receive(Ack("rel-3", "accepted"))
    assert device.statuses()[-1] == "alert" and none_of(effects.Refresh, device.on(events.MetadataChanged()))
    assert only(effects.Refresh, device.receive(serve(version=2, release=4))).release == 4


def test_a_rollback_assigns_a_release_that_was_done_before() -> None:
    device = Agent(release=4, memory=Memory(done=("rel-3", "rel-4"))).up()
    assert only(effects.Refresh, device.receive(serve(version=9, release=3))).release == 3
    device.on(events.Refreshed(MANIFEST, installed=True))
    device.on(events.Finished(report("rel-3", "head", release=3)))
    device.receive(Ack("rel-3", "duplicate"))
    assert device.state.release == 3 and none_of(effects.Refresh, device.on(events.Tick(), after_s=60))


def test_a_release_that_is_served_is_not_fitted_again() -> None:
    device = Agent(release=3, memory=Memory(done=("rel-3",))).up()
    assert none_of(effects.Refresh, device.receive(serve(version=9, release=3)))


def test_a_release_signed_by_another_key_is_another_one_although_it_has_the_same_number() -> None:
    """A new server counts anew; a key that was rotated costs a look-up."""
    device = Agent(release=3, memory=Memory(done=("rel-3",), signed=5, key="old")).up()
    address = Address("assignment", "pi-01")
    same = device.on(events.Received(address, serve(version=8), number=6, key="old"))
    assert none_of(effects.Refresh, same)
    found = device.on(events.Received(address, serve(version=9), number=7, key="new"))
    assert only(effects.Refresh, found).release == 3 and not none_of(effects.Unblock, found)
    assert device.state.memory.done == () and device.state.memory.key == "new"


def test_new_data_give_a_device_without_a_head_another_chance() -> None:
    device = Agent().up()
    device.receive(serve())
    device.on(events.Failed(Failure.NO_DATA))
    device.receive(Ack("rel-3", "accepted"))
    new_data(device, samples=8)
    assert only(effects.Refresh, device.sleep_until_woken()).release == 3


def test_a_device_without_labels_on_a_release_without_a_fleets_head_is_no_alert() -> None:
    device = Agent().up()
    device.receive(serve())
    found = device.on(events.Failed(Failure.NO_LABELS))
    (said,) = [e.message for e in found if isinstance(e, effects.Publish) and isinstance(e.message, Log)]
    assert said.level == "info" and said.text.startswith("rel-3: no labelled samples yet")
    assert said.text.count("the release has no fleet's head: nothing is served") == 1
    assert device.statuses()[-1] == "ready" and device.state.reason == "no_labels"
    assert device.on(events.Impaired(Failure.ERROR)) and device.statuses()[-1] == "alert"


def test_new_data_refit_the_head_of_the_release_that_serves() -> None:
    device = head_device_serving()
    new_data(device, samples=8)
    assert device.statuses()[-1] == "init"  # a new capability is published with a birth
    fit = only(effects.Fit, device.sleep_until_woken())
    assert fit.assignment.release == 3 and fit.assignment.id.startswith("refit-boot-1-")
    device.on(events.Finished(report(fit.assignment.id, "head", release=3)))
    assert none_of(effects.Fit, device.on(events.Tick(), after_s=1.0))


def test_drift_causes_one_refit_within_the_budget() -> None:
    device = head_device_serving()
    device.on(events.BudgetChanged("budget: processor"))
    assert none_of(effects.Fit, device.on(events.Drifted(0.8)))
    assert only(effects.Fit, device.on(events.BudgetChanged(""))).assignment.release == 3
    device.on(events.Finished(report("refit", "head", release=3)))
    assert none_of(effects.Fit, device.on(events.Drifted(0.9)))


def test_a_revoked_head_is_removed() -> None:
    device = head_device_reporting()
    device.receive(Command("c1", "revoke-local-head"))
    assert not none_of(effects.Revoke, device.last) and device.state.release == 0
    device.receive(Ack("rel-3", "accepted"))
    assert none_of(effects.Refresh, device.on(events.MetadataChanged()))
    assert not none_of(effects.Refresh, device.receive(serve(version=2)))


def test_what_the_server_offered_last_is_remembered() -> None:
    device = Agent().up()
    device.receive(serve(version=1, release=3))
    device.receive(train(version=2))
    assert device.state.memory.offered == 3
    device.receive(serve(version=3, release=2))  # back from an aborted roll-out
    assert device.state.memory.offered == 2

    updates = msgspec.structs.replace(device.state.capability, update=UpdateStatus(0))
    device.state = replace(device.state, capability=updates)
    for message, offered in ((AgentUpdate("agent-7", 7), 7), (None, 0)):
        found = device.on(events.Received(Address("agent", "pi-01"), message, retain=True))
        assert only(effects.DesireUpdate, found).update == message
        assert device.state.memory.offered_agent == offered
