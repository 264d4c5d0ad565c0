"""An agent is born, says what it is and what it wants to know, and leaves."""

from __future__ import annotations

from devices.agent import effects, events
from edge_fl.wire.messages import (
    Command,
    DeviceState,
    Request,
    ServerState,
)
from edge_fl.wire.transport import Connected, Disconnected
from tests.devices.agent.agents import Agent, none_of, serve, the


def test_a_birth_subscribes_says_what_it_is_and_is_ready_once_the_retained_messages_are_in() -> None:
    device = Agent()
    first = device.on(Connected(session_present=False))
    assert [e.pattern for e in first if isinstance(e, effects.Subscribe)] == [
        "efl/1/main/srv/state",
        "efl/1/main/tuf/timestamp.json",
        "efl/1/main/round/+",
        "efl/1/main/d/pi-01/dn/#",
    ]
    meta, echo, state = [e for e in first if isinstance(e, effects.Publish)]
    assert meta == effects.Publish("efl/1/main/d/pi-01/up/meta", device.state.capability, retain=True)
    assert echo == effects.Publish("efl/1/main/d/pi-01/dn/echo", device.echo(), expiry_s=60)
    assert isinstance(state.message, DeviceState) and state.message.status == "init" and state.retain
    device.hear(device.echo())
    assert device.said() == ["init", "ready"]


def test_a_broker_that_gives_no_echo_is_waited_for_so_long_and_no_longer() -> None:
    device = Agent()
    device.on(Connected(session_present=False))
    device.on(events.Tick(), 1.9)
    assert device.said() == ["init"]
    device.sleep_until_woken()
    assert device.said() == ["init", "ready"]
    assert device.hear(device.echo()) == ()


def test_the_echo_of_another_connection_says_nothing_about_this_one() -> None:
    device = Agent()
    device.on(Connected(session_present=False))
    before = device.echo()
    device.on(Disconnected("gone"))
    device.on(Connected(session_present=True))
    device.hear(before)
    assert device.said() == ["init", "init"]
    device.hear(device.echo())
    assert device.said() == ["init", "init", "ready"]


def test_a_device_without_a_want_asks_for_one_once() -> None:
    device = Agent().up()
    asked = [e for e in device.done if isinstance(e, effects.Publish) and isinstance(e.message, Request)]
    assert len(asked) == 1 and asked[0].message.kind == "assignment" and not asked[0].retain  # type: ignore[attr-defined]


def test_a_device_that_finds_its_want_retained_does_not_ask() -> None:
    device = Agent()
    device.on(Connected(session_present=False))
    device.hear(serve(), retain=True)
    device.hear(device.echo())
    assert not [e for e in device.done if isinstance(e, effects.Publish) and isinstance(e.message, Request)]
    assert the(effects.Refresh, device.last).release == 3


def test_a_session_that_the_broker_kept_is_not_subscribed_again_but_the_will_is_taken_back() -> None:
    device = Agent().up()
    device.on(Disconnected("gone"))
    again = device.on(Connected(session_present=True))
    assert none_of(effects.Subscribe, again)
    assert device.said()[-1] == "init"


def test_a_new_process_subscribes_even_when_the_broker_kept_the_session() -> None:
    assert not none_of(effects.Subscribe, Agent().on(Connected(session_present=True)))


def test_the_sequence_counts_every_message_of_a_boot() -> None:
    device = Agent().up()
    said = [
        e.message.sequence
        for e in device.done
        if isinstance(e, effects.Publish) and isinstance(e.message, DeviceState)
    ]
    assert said == [3, 5]  # meta is 1, the echo 2, the request for a want 4


def test_rebirth_repeats_meta_and_state() -> None:
    device = Agent().up()
    device.hear(Command("c1", "rebirth"))
    assert [e.topic[-5:] for e in device.last if isinstance(e, effects.Publish)] == ["/meta", "state"]


def test_a_command_that_was_retained_is_ignored() -> None:
    assert Agent().up().hear(Command("c1", "rebirth"), retain=True) == ()


def test_a_clean_stop_says_disconnected_and_nothing_follows() -> None:
    device = Agent().up()
    device.on(events.StopRequested())
    assert device.said()[-1] == "disconnected" and device.last[-1] == effects.Stop()
    assert device.on(Connected(session_present=True)) == ()


def test_a_server_of_another_major_version_is_not_obeyed() -> None:
    device = Agent().up()
    device.hear(ServerState(True, "server-1", protocol="2.0"))
    assert device.said()[-1] == "alert" and device.state.why == "unsupported_proto"
    assert none_of(effects.Refresh, device.hear(serve()))
    device.hear(ServerState(True, "server-1"))
    assert device.said()[-1] == "ready" and not none_of(effects.Refresh, device.last)
