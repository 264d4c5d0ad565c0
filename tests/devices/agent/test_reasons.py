"""A board that is not well, or a budget that is used up, changes what an agent may begin, and its status says why."""

from __future__ import annotations

import math

from devices.agent import effects, events
from devices.agent.state import wake_at
from edge_fl.wire.messages import Assignment, Capability, DeviceState
from tests.devices.agent.agents import Agent


def test_work_that_a_demoted_device_cannot_do_is_dropped_and_the_status_says_why() -> None:
    device = Agent("full").up()
    device.hear(Assignment(1, "train", "t", 1, "w-1"))
    can = Capability("head", "x86_64", "3.12", notes=["head: too hot"])
    done = device.on(events.TierChanged(can, "too hot"))
    said = [effect.message for effect in done if isinstance(effect, effects.Publish)]
    assert can in said and device.state.tier == "head"
    device.hear(device.echo())
    status = [
        e.message
        for e in device.last
        if isinstance(e, effects.Publish) and isinstance(e.message, DeviceState)
    ]
    assert status[-1].why == "too hot" and device.state.outbox[0].parcel.report.error == "unsupported_tier"


def test_beyond_a_budget_nothing_new_is_begun_until_there_is_one_again() -> None:
    device = Agent().up()
    device.on(events.BudgetChanged("budget: bytes"))
    device.hear(Assignment(1, "serve", "t", 1, "rel-1", release=3))
    assert not any(isinstance(effect, effects.Refresh) for effect in device.done)
    assert device.state.reason == "budget: bytes"
    assert any(isinstance(effect, effects.Refresh) for effect in device.on(events.BudgetChanged("")))


def test_beyond_a_budget_nobody_is_woken_for_work_that_may_not_begin() -> None:
    device = Agent().up()
    device.hear(Assignment(1, "serve", "t", 1, "rel-1", release=3))
    device.on(events.Failed("missing"))
    assert wake_at(device.state) < math.inf
    device.on(events.BudgetChanged("budget: bytes"))
    assert wake_at(device.state) == math.inf
