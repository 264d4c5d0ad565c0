"""Birth of an agent: subscriptions, capability, status, request for an assignment; and its clean stop."""

from typing import Any

from edge_fl.failures import Failure
from edge_fl.wire.messages import (
    Assignment,
    Command,
    DeviceState,
    Log,
    Request,
    ServerState,
)
from edge_fl.wire.topics import Address
from edge_fl.wire.transport import Connected, Disconnected
from edge_fl_devices.agent import effects, events
from tests.devices.agent.agents import Agent, none_of, only, serve


def test_a_birth_subscribes_publishes_capability_and_becomes_ready_after_the_retained_messages() -> None:
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
    device.receive(device.echo())
    assert device.statuses() == ["init", "ready"]


def test_without_an_echo_the_device_becomes_ready_after_the_settle_time() -> None:
    device = Agent()
    device.on(Connected(session_present=False))
    device.on(events.Tick(), 1.9)
    assert device.statuses() == ["init"]
    device.sleep_until_woken()
    assert device.statuses() == ["init", "ready"]
    assert device.receive(device.echo()) == ()


def test_the_echo_of_an_earlier_connection_is_ignored() -> None:
    device = Agent()
    device.on(Connected(session_present=False))
    before = device.echo()
    device.on(Disconnected("gone"))
    device.on(Connected(session_present=True))
    device.receive(before)
    assert device.statuses() == ["init", "init"]
    device.receive(device.echo())
    assert device.statuses() == ["init", "init", "ready"]


def test_a_device_without_an_assignment_requests_one_once() -> None:
    device = Agent().up()
    asked = [e for e in device.done if isinstance(e, effects.Publish) and isinstance(e.message, Request)]
    assert len(asked) == 1 and asked[0].message.kind == "assignment" and not asked[0].retain  # type: ignore[attr-defined]


def test_a_device_with_a_retained_assignment_requests_none() -> None:
    device = Agent()
    device.on(Connected(session_present=False))
    device.receive(serve(), retain=True)
    device.receive(device.echo())
    assert not [e for e in device.done if isinstance(e, effects.Publish) and isinstance(e.message, Request)]
    assert only(effects.Refresh, device.last).release == 3


def test_a_resumed_session_is_not_subscribed_again_but_the_will_is_replaced() -> None:
    device = Agent().up()
    device.on(Disconnected("gone"))
    again = device.on(Connected(session_present=True))
    assert none_of(effects.Subscribe, again)
    assert device.statuses()[-1] == "init"


def test_a_new_process_subscribes_even_if_the_broker_kept_the_session() -> None:
    assert not none_of(effects.Subscribe, Agent().on(Connected(session_present=True)))


def test_the_sequence_counts_every_message_of_a_boot() -> None:
    device = Agent().up()
    sequences = [
        e.message.sequence
        for e in device.done
        if isinstance(e, effects.Publish) and isinstance(e.message, DeviceState)
    ]
    assert sequences == [3, 5]  # capability is 1, echo 2, request for an assignment 4


def test_rebirth_repeats_meta_and_state() -> None:
    device = Agent().up()
    device.receive(Command("c1", "rebirth"))
    assert [e.topic[-5:] for e in device.last if isinstance(e, effects.Publish)] == ["/meta", "state"]


def test_a_command_that_was_retained_is_ignored() -> None:
    assert Agent().up().receive(Command("c1", "rebirth"), retain=True) == ()


def test_a_clean_stop_publishes_disconnected_and_is_final() -> None:
    device = Agent().up()
    device.on(events.StopRequested())
    assert device.statuses()[-1] == "disconnected" and device.last[-1] == effects.Stop()
    assert device.state.reason == Failure.SHUT_DOWN
    assert device.on(Connected(session_present=True)) == ()


def test_an_agent_that_ends_because_of_an_error_does_not_say_that_it_was_planned() -> None:
    device = Agent().up()
    device.on(events.StopRequested(planned=False))
    assert device.statuses()[-1] == "disconnected" and device.state.reason == ""


def test_a_server_of_another_major_version_is_ignored() -> None:
    device = Agent().up()
    device.receive(ServerState(True, "server-1", protocol="2.0"))
    assert device.statuses()[-1] == "alert" and device.state.why == "unsupported_proto"
    assert none_of(effects.Refresh, device.receive(serve()))
    device.receive(ServerState(True, "server-1"))
    assert device.statuses()[-1] == "ready" and not none_of(effects.Refresh, device.last)


def signed(device: Agent, message: Assignment | Command, number: int, *, retain: bool = False) -> None:
    address = Address("assignment" if isinstance(message, Assignment) else "cmd", "pi-01")
    device.on(events.Received(address, message, retain, number))


def published(device: Agent, kind: type) -> list[Any]:
    return [e.message for e in device.last if isinstance(e, effects.Publish) and isinstance(e.message, kind)]


def test_what_a_broker_of_its_last_save_delivers_first_is_ignored_and_the_present_assignment_requested() -> (
    None
):
    device = Agent().up()
    old, new = serve(release=3), serve(2, release=4)
    signed(device, old, 1)
    signed(device, new, 2)
    signed(device, Command("c-1", "rebirth"), 3)
    device.on(Disconnected("the broker was killed"))
    device.on(Connected(session_present=False))
    signed(device, old, 1, retain=True)
    signed(device, Command("c-1", "rebirth"), 3)  # queued before the kill
    assert not published(device, Log) and device.state.assignment == new
    device.receive(device.echo())
    assert [each.kind for each in published(device, Request)] == ["assignment"]
    assert device.state.why == "" and device.statuses()[-1] == "ready"


def test_an_older_assignment_or_command_in_the_middle_of_a_connection_is_reported() -> None:
    device = Agent().up()
    signed(device, serve(2, release=4), 2)
    signed(device, serve(release=3), 1)
    assert [line.text for line in published(device, Log)] == ["assignment rel-3 rejected: replayed"]
    assert device.state.why == "replayed"
    signed(device, Command("c-1", "rebirth"), 3)
    signed(device, serve(3, release=4), 4)
    signed(device, Command("c-1", "rebirth"), 3)
    assert [line.text for line in published(device, Log)] == ["command c-1 (rebirth) rejected: replayed"]
