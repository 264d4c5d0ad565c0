"""Demotion and used-up budgets limit what work begins, and the status gives the reason."""

import math

from edge_fl.failures import Failure
from edge_fl.wire.messages import Assignment, Capability, DeviceState
from edge_fl.wire.transport import Connected, Disconnected
from edge_fl_devices.agent import effects, events
from edge_fl_devices.agent.state import wake_at
from tests.devices.agent.agents import Agent


def test_a_demotion_cancels_training_and_the_status_gives_the_reason() -> None:
    device = Agent("full").up()
    device.receive(Assignment(1, "train", "t", 1, "w-1"))
    can = Capability("head", "x86_64", "3.12", notes=["head: too hot"])
    done = device.on(events.TierChanged(can, "too hot"))
    said = [effect.message for effect in done if isinstance(effect, effects.Publish)]
    assert can in said and device.state.tier == "head"
    device.receive(device.echo())
    status = [
        e.message
        for e in device.last
        if isinstance(e, effects.Publish) and isinstance(e.message, DeviceState)
    ]
    assert status[-1].why == "too hot" and device.state.outbox[0].parcel.report.error == "unsupported_tier"


def test_over_budget_no_work_begins_until_the_budget_is_renewed() -> None:
    device = Agent().up()
    device.on(events.BudgetChanged("budget: bytes"))
    device.receive(Assignment(1, "serve", "t", 1, "rel-1", release=3))
    assert not any(isinstance(effect, effects.Refresh) for effect in device.done)
    assert device.state.reason == "budget: bytes"
    assert any(isinstance(effect, effects.Refresh) for effect in device.on(events.BudgetChanged("")))


def test_over_budget_no_wake_up_is_scheduled_for_pending_work() -> None:
    device = Agent().up()
    device.receive(Assignment(1, "serve", "t", 1, "rel-1", release=3))
    device.on(events.Failed(Failure.MISSING))
    assert wake_at(device.state) < math.inf
    device.on(events.BudgetChanged("budget: bytes"))
    assert wake_at(device.state) == math.inf


def test_drift_is_published_with_the_capability_once_the_device_is_connected() -> None:
    device = Agent().up()
    found = device.on(events.Drifted(0.8))
    published = [effect.message for effect in found if isinstance(effect, effects.Publish)]
    assert [message.drift for message in published if isinstance(message, Capability)] == [0.8]
    assert device.state.reason == "drift"
    device.on(Disconnected("gone"))
    assert device.on(events.Drifted(0.9)) == ()
    device.on(Connected(session_present=True))
    assert device.state.capability in [e.message for e in device.last if isinstance(e, effects.Publish)]


def test_a_broken_promise_is_published_and_is_no_failure() -> None:
    device = Agent().up()
    found = device.on(events.PromiseChecked(0.3))
    published = [effect.message for effect in found if isinstance(effect, effects.Publish)]
    assert [message.missed for message in published if isinstance(message, Capability)] == [0.3]
    assert (device.state.reason, device.state.status) == ("promise_broken", "ready")
    device.on(events.PromiseChecked(0.0))
    assert device.state.reason == ""


def test_data_that_could_not_be_counted_is_an_alert_until_they_are() -> None:
    device = Agent().up()
    can = device.state.capability
    device.on(events.DataChanged(can, "out_of_memory"))
    device.receive(device.echo())
    assert (device.state.status, device.state.reason) == ("alert", "out_of_memory")
    device.receive(Assignment(1, "serve", "t", 1, "rel-1", release=3))
    assert any(isinstance(effect, effects.Refresh) for effect in device.done)  # it continues to work
    assert device.state.reason == "out_of_memory"
    device.on(events.DataChanged(can))
    device.receive(device.echo())
    assert (device.state.status, device.state.reason) == ("ready", "")


def test_a_background_thread_that_fails_is_an_alert_until_it_works_again() -> None:
    device = Agent().up()
    device.on(events.Impaired("error"))
    assert (device.state.status, device.state.reason) == ("alert", "error")
    assert device.statuses()[-1] == "alert"
    device.on(events.Impaired())
    assert (device.state.status, device.state.reason) == ("ready", "") and device.statuses()[-1] == "ready"
