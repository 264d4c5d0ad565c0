"""A head-only device brings the wanted release to serve, and keeps trying for as long as it is wanted."""

from __future__ import annotations

from typing import Any

from devices.agent import effects, events
from devices.agent.effects import Memory
from edge_fl.wire.blob import describe
from edge_fl.wire.messages import (
    Ack,
    Capability,
    Command,
    DeviceState,
)
from edge_fl.wire.transport import Connected, Disconnected
from tests.devices.agent.agents import (
    MANIFEST,
    ONNX,
    Agent,
    head_device_reporting,
    none_of,
    report,
    serve,
    the,
)


def test_a_release_is_refreshed_fetched_installed_fitted_and_reported() -> None:
    extra = describe(b"head")
    device = Agent().up()
    assert the(effects.Refresh, device.hear(serve())).release == 3
    assert the(effects.Fetch, device.on(events.Refreshed(MANIFEST, (ONNX, extra)))) == effects.Fetch(
        ONNX, keep=True
    )
    assert the(effects.Fetch, device.on(events.Fetched(ONNX.sha256, 900))).blob == extra
    assert the(effects.Install, device.on(events.Fetched(extra.sha256, 4))).manifest == MANIFEST
    assert the(effects.Fit, device.on(events.Installed(3))).bytes_down == 904
    finished = device.on(events.Finished(report("rel-3", "head", release=3)))
    assert the(effects.Send, finished).expiry_s == 86_400
    state = [e.message for e in finished if isinstance(e, effects.Publish)][-1]
    assert isinstance(state, DeviceState) and (state.status, state.release) == ("ready", 3)


def test_a_head_that_is_being_fitted_is_reported_though_a_newer_release_is_wanted() -> None:
    device = Agent().up()
    device.hear(serve())
    device.on(events.Refreshed(MANIFEST, installed=True))
    device.hear(serve(version=2, release=4))
    finished = device.on(events.Finished(report("rel-3", "head", release=3)))
    assert the(effects.Send, finished).parcel.report.id == "rel-3"
    assert the(effects.Refresh, finished).release == 4


def test_a_release_that_is_overtaken_while_it_is_fetched_is_left_alone() -> None:
    device = Agent().up()
    device.hear(serve())
    device.on(events.Refreshed(MANIFEST, (ONNX,)))
    newer = device.hear(serve(version=2, release=4))
    assert effects.CancelFetch() in newer and the(effects.Refresh, newer).release == 4


def test_a_release_that_is_installed_already_is_only_fitted() -> None:
    device = Agent().up()
    device.hear(serve())
    assert not none_of(effects.Fit, device.on(events.Refreshed(MANIFEST, installed=True)))


def test_a_release_is_installed_while_the_server_is_away() -> None:
    assert not none_of(effects.Refresh, Agent().up(online=False).hear(serve()))


def test_a_release_whose_metadata_are_late_is_tried_again_when_they_change() -> None:
    device = Agent().up()
    device.hear(serve())
    device.on(events.Failed("missing"))
    assert not none_of(effects.Refresh, device.on(events.MetadataChanged(), after_s=0.1))


def test_a_release_is_tried_for_as_long_as_it_is_wanted_with_growing_pauses() -> None:
    device = Agent().up()
    device.hear(serve())
    pauses = []
    for _ in range(12):
        device.on(events.Failed("deadline"))
        before_s = device.now_s
        assert not none_of(effects.Refresh, device.sleep_until_woken())
        pauses.append(device.now_s - before_s)
    assert 1.5 <= pauses[0] <= 2.5 and 225 <= pauses[-1] <= 375


def test_a_failure_without_a_link_is_told_by_the_status_once_there_is_one() -> None:
    device = Agent().up()
    device.hear(serve())
    device.on(Disconnected("gone"))
    assert device.on(events.Failed("deadline")) == ()
    device.on(Connected(session_present=True))
    device.hear(device.echo())
    assert device.said()[-1] == "alert" and device.state.reason == "deadline"


def test_a_release_that_failed_its_canary_is_reported_and_not_tried_again() -> None:
    device = Agent().up()
    device.hear(serve())
    sent = the(effects.Send, device.on(events.Failed("canary_failed", final=True)))
    assert (sent.parcel.report.error, sent.parcel.report.release) == ("canary_failed", 3)
    device.hear(Ack("rel-3", "accepted"))
    assert device.said()[-1] == "alert" and none_of(effects.Refresh, device.on(events.MetadataChanged()))
    assert the(effects.Refresh, device.hear(serve(version=2, release=4))).release == 4


def test_a_rollback_is_a_want_for_a_release_that_was_done_before() -> None:
    device = Agent(release=4, memory=Memory(done=("rel-3", "rel-4"))).up()
    assert the(effects.Refresh, device.hear(serve(version=9, release=3))).release == 3
    device.on(events.Refreshed(MANIFEST, installed=True))
    device.on(events.Finished(report("rel-3", "head", release=3)))
    device.hear(Ack("rel-3", "duplicate"))
    assert device.state.release == 3 and none_of(effects.Refresh, device.on(events.Tick(), after_s=60))


def test_a_release_that_is_served_is_not_fitted_again() -> None:
    device = Agent(release=3, memory=Memory(done=("rel-3",))).up()
    assert none_of(effects.Refresh, device.hear(serve(version=9, release=3)))


def test_new_data_give_a_device_without_a_head_another_chance() -> None:
    device = Agent().up()
    device.hear(serve())
    device.on(events.Failed("no_data", final=True))
    device.hear(Ack("rel-3", "accepted"))
    device.on(events.DataChanged(replace_capability(device.state.capability, samples=8)))
    assert the(effects.Refresh, device.sleep_until_woken()).release == 3


def test_new_data_refit_the_head_of_the_release_that_serves() -> None:
    device = head_device_reporting()
    device.hear(Ack("rel-3", "accepted"))
    device.on(events.DataChanged(replace_capability(device.state.capability, samples=8)))
    assert device.said()[-1] == "init"  # what a device can do changes only at a birth
    fit = the(effects.Fit, device.sleep_until_woken())
    assert fit.assignment.release == 3 and fit.assignment.id.startswith("refit-boot-1-")
    device.on(events.Finished(report(fit.assignment.id, "head", release=3)))
    assert none_of(effects.Fit, device.on(events.Tick(), after_s=1.0))


def replace_capability(capability: Capability, **changes: Any) -> Capability:
    return Capability(
        **{**{name: getattr(capability, name) for name in capability.__struct_fields__}, **changes}
    )


def test_drift_has_the_data_looked_at_once_more_within_the_budget() -> None:
    device = head_device_reporting()
    device.hear(Ack("rel-3", "accepted"))
    device.on(events.BudgetChanged("budget: processor"))
    assert none_of(effects.Fit, device.on(events.Drifted(0.8)))
    assert the(effects.Fit, device.on(events.BudgetChanged(""))).assignment.release == 3
    device.on(events.Finished(report("refit", "head", release=3)))
    assert none_of(effects.Fit, device.on(events.Drifted(0.9)))


def test_a_revoked_head_is_removed() -> None:
    device = head_device_reporting()
    device.hear(Command("c1", "revoke-local-head"))
    assert not none_of(effects.Revoke, device.last) and device.state.release == 0
    device.hear(Ack("rel-3", "accepted"))
    assert none_of(effects.Refresh, device.on(events.MetadataChanged()))
    assert not none_of(effects.Refresh, device.hear(serve(version=2)))
