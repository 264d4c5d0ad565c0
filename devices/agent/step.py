"""The agent: everything a device decides, as one pure function. `step(state, event, now_s)` gives the next state and what to do.

No sockets, no clock, no files, no torch in here: `now_s` is any clock that only moves forward, and the runner carries out the
effects. The life of an agent: every connection is a birth (capability, status init; ready once the retained messages are in); a
`Want` that is new is worked on, one at a time (`devices.agent.desired`), and ends in a report that stays in the outbox until the server
acknowledges it. What the status message says follows from the state at the end of each step, and goes out when it is news.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from devices.agent import desired, effects, events, outbox
from devices.agent.effects import Effect
from devices.agent.events import Event
from devices.agent.state import AgentState, Phase
from devices.agent.transition import Transition
from edge_fl.capability import Tier
from edge_fl.wire.messages import (
    PROTOCOL,
    Ack,
    Assignment,
    Command,
    DeviceState,
    Echo,
    Request,
    Round,
    ServerState,
)
from edge_fl.wire.transport import Connected, Disconnected

REMEMBERED_ROUNDS = 4


def step(state: AgentState, event: Event, now_s: float) -> tuple[AgentState, tuple[Effect, ...]]:
    """The state after `event`, and what to do, in order."""
    if state.phase is Phase.STOPPED:
        return state, ()
    transition = Transition(state, now_s)
    _ON[type(event)](transition, event)
    desired.end_overdue(transition)
    desired.begin(transition)
    _send(transition)
    _say(transition)
    return transition.state, tuple(transition.effects)


def will(device: str, boot: str) -> DeviceState:
    """What the broker says of this device when its connection breaks."""
    return DeviceState("lost", boot)


def _connected(transition: Transition, event: Connected) -> None:
    state, topics = transition.state, transition.state.topics
    if not (state.born and event.session_present):
        for pattern in (
            topics.server_state(),
            topics.tuf("timestamp.json"),
            topics.round("+"),
            topics.down(state.device),
        ):
            transition.do(effects.Subscribe(pattern))
    _bear(transition)
    transition.set(outbox=outbox.again(state.outbox, transition.now_s))


def _bear(transition: Transition) -> None:
    """Says what the device is and that it begins; it is ready when its echo is back, and with it all that the broker retains."""
    state = transition.state
    echo, settled_s = Echo(f"born-{state.boot}-{state.sequence}"), transition.now_s + state.limits.settle_s
    transition.set(phase=Phase.SETTLING, settled_s=settled_s, echo=echo.id, born=True, said=None)
    _describe(transition)
    transition.publish(state.topics.echo(state.device), echo, expiry_s=60)


def _describe(transition: Transition) -> None:
    """Says what the device is."""
    transition.publish(
        transition.state.topics.meta(transition.state.device), transition.state.capability, retain=True
    )


def _disconnected(transition: Transition, event: Disconnected) -> None:
    transition.set(phase=Phase.OFFLINE)


def _tick(transition: Transition, event: events.Tick) -> None:
    if transition.state.phase is Phase.SETTLING and transition.now_s >= transition.state.settled_s:
        _settle(transition)


def _settle(transition: Transition) -> None:
    """All that the broker retains is in; whoever has no want by now asks for one."""
    state = transition.state
    transition.set(phase=Phase.UP)
    if state.assignment is None:
        ask = Request(f"want-{state.boot}-{state.sequence}", "assignment")
        transition.publish(state.topics.request(state.device), ask, expiry_s=60)


def _data_changed(transition: Transition, event: events.DataChanged) -> None:
    transition.set(capability=event.capability, refit=True)
    if transition.state.connected:
        _bear(transition)


def _tier_changed(transition: Transition, event: events.TierChanged) -> None:
    """What the device can no longer do is dropped; the server learns the new tier and plans anew."""
    state = transition.state
    if event.capability.tier != state.capability.tier and state.work:
        transition.give_up(state.work.assignment.id)
        desired.drop(transition)
    transition.set(capability=event.capability, demoted=event.why)
    transition.log(
        "warning" if event.why else "info", f"tier {event.capability.tier}: {event.why or 'as measured'}"
    )
    if transition.state.connected:
        _bear(transition)


def _rationed(transition: Transition, event: events.Rationed) -> None:
    transition.set(rationed=event.why)


def _drifted(transition: Transition, event: events.Drifted) -> None:
    """The data are looked at once more, and a head fitted if there are new labels among them."""
    can = transition.state.capability
    if event.score and not can.drift:
        transition.set(refit=True)
        transition.log(
            "warning", f"drift: features moved by {event.score:.2f} standard deviations since the fit"
        )
    transition.set(capability=replace(can, drift=event.score))
    if transition.state.connected:
        _describe(transition)


def _metadata_changed(transition: Transition, event: events.MetadataChanged) -> None:
    if transition.state.assignment and transition.state.assignment.mode == "serve":
        transition.set(not_before_s=transition.now_s)


def _stop(transition: Transition, event: events.StopAsked) -> None:
    connected = transition.state.connected
    transition.set(phase=Phase.STOPPED, assignment=None)
    if connected:
        transition.say_status()
    transition.do(effects.Stop())


def _received(transition: Transition, event: events.Received) -> None:
    if handle := _HEARD.get(event.address.kind):
        handle(transition, event)


def _server_state(transition: Transition, event: events.Received) -> None:
    server, state = event.message, transition.state
    if not isinstance(server, ServerState):
        return
    if server.protocol.split(".")[0] != PROTOCOL.split(".")[0]:
        transition.set(server=None, why="unsupported_proto")
        return
    if server.boot != state.memory.server:
        transition.remember(server=server.boot, version=0)
    came_back = server.online and not (
        state.server_online and state.server and state.server.boot == server.boot
    )
    if server.return_s != (state.server.return_s if state.server else 0.0):
        transition.do(effects.Spread(server.return_s))
    transition.set(server=server, why="" if state.why == "unsupported_proto" else state.why)
    if came_back:
        spread_s = max(state.limits.return_s, server.return_s) * outbox.jitter(
            state.boot, server.boot, server.epoch
        )
        transition.set(
            outbox=outbox.again(state.outbox, transition.now_s + spread_s, grace_s=state.limits.grace_s)
        )


def _round(transition: Transition, event: events.Received) -> None:
    if transition.state.tier is not Tier.FULL:
        return
    run_id = event.address.path[0]
    rounds = {name: round for name, round in transition.state.rounds.items() if name != run_id}
    if isinstance(event.message, Round) and event.message.run_id == run_id:
        rounds[run_id] = event.message
    transition.set(rounds=dict(list(rounds.items())[-REMEMBERED_ROUNDS:]))


def _assignment(transition: Transition, event: events.Received) -> None:
    desired.accept(transition, event.message if isinstance(event.message, Assignment) else None)


def _command(transition: Transition, event: events.Received) -> None:
    command = event.message
    if isinstance(command, Command) and not event.retain and (do := _DO.get(command.do)):
        do(transition)


def _rebirth(transition: Transition) -> None:
    _describe(transition)
    transition.set(said=None)


def _abort(transition: Transition) -> None:
    if work := transition.state.work:
        transition.give_up(work.assignment.id)
        desired.drop(transition)


def _revoke(transition: Transition) -> None:
    """The head goes, and does not come back for the want that it served."""
    if transition.state.assignment:
        transition.give_up(transition.state.assignment.id)
    transition.set(release=0, refit=False)
    transition.do(effects.Revoke())


def _ack(transition: Transition, event: events.Received) -> None:
    ack = event.message
    waiting = outbox.find(transition.state.outbox, ack.id) if isinstance(ack, Ack) else None
    if not isinstance(ack, Ack) or event.retain or not waiting:
        return
    if waiting.parcel.report.error:
        transition.give_up(ack.id)
    else:
        transition.done(ack.id)
    transition.set(outbox=outbox.drop(transition.state.outbox, ack.id))
    transition.do(effects.Forget(ack.id))


def _echo(transition: Transition, event: events.Received) -> None:
    echo, state = event.message, transition.state
    if isinstance(echo, Echo) and echo.id == state.echo and state.phase is Phase.SETTLING:
        _settle(transition)


def _send(transition: Transition) -> None:
    """Sends the reports that are due, while there is a server to take them."""
    state = transition.state
    if state.phase is not Phase.UP or not state.server_online:
        return
    sent = []
    for waiting in state.outbox:
        if waiting.next_s <= transition.now_s:
            transition.do(
                effects.Send(waiting.parcel, expiry_s=max(1, round(waiting.due_s - transition.now_s)))
            )
            transition.set(sequence=transition.state.sequence + 1)
            waiting = outbox.after_sending(
                waiting, transition.now_s, state.limits.resend_s, state.limits.resend_bytes_per_s
            )
        sent.append(waiting)
    transition.set(outbox=tuple(sent))


def _say(transition: Transition) -> None:
    state = transition.state
    if state.connected and state.said != (state.status, state.activity, state.release, state.reason):
        transition.say_status()


_ON: dict[type, Callable[[Transition, Any], None]] = {
    Connected: _connected,
    Disconnected: _disconnected,
    events.Tick: _tick,
    events.Received: _received,
    events.MetadataChanged: _metadata_changed,
    events.Refreshed: desired.refreshed,
    events.Fetched: desired.fetched,
    events.Installed: desired.installed,
    events.Finished: desired.finished,
    events.Failed: desired.failed,
    events.DataChanged: _data_changed,
    events.TierChanged: _tier_changed,
    events.Rationed: _rationed,
    events.Drifted: _drifted,
    events.StopAsked: _stop,
}
_HEARD: dict[str, Callable[[Transition, events.Received], None]] = {
    "server_state": _server_state,
    "round": _round,
    "assignment": _assignment,
    "cmd": _command,
    "ack": _ack,
    "echo": _echo,
}
_DO: dict[str, Callable[[Transition], None]] = {
    "rebirth": _rebirth,
    "abort": _abort,
    "revoke-local-head": _revoke,
}
