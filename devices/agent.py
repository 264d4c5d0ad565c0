"""The agent: everything a device decides, as one pure function. `step(state, event, now_s)` gives the next state and what to do.

No sockets, no clock, no files, no torch in here: `now_s` is any clock that only moves forward, and the runner carries out the
effects. The life of an agent: every connection is a birth (capability, status init; ready once the retained messages are in); a
`Want` that is new is worked on, one at a time (`devices.machine.wants`), and ends in a report that stays in the outbox until the server
acknowledges it. What the status message says follows from the state at the end of each step, and goes out when it is news.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from devices.machine import effects, events, outbox, wants
from devices.machine.effects import Effect
from devices.machine.events import Event
from devices.machine.state import AgentState, Phase
from devices.machine.turn import Turn
from edge_fl.capability import Tier
from edge_fl.wire.messages import PROTOCOL, Ack, Command, DeviceState, Echo, Request, Round, ServerState, Want
from edge_fl.wire.transport import Connected, Disconnected

REMEMBERED_ROUNDS = 4


def step(state: AgentState, event: Event, now_s: float) -> tuple[AgentState, tuple[Effect, ...]]:
    """The state after `event`, and what to do, in order."""
    if state.phase is Phase.STOPPED:
        return state, ()
    turn = Turn(state, now_s)
    _ON[type(event)](turn, event)
    wants.end_overdue(turn)
    wants.begin(turn)
    _send(turn)
    _say(turn)
    return turn.state, tuple(turn.effects)


def will(device: str, boot: str) -> DeviceState:
    """What the broker says of this device when its connection breaks."""
    return DeviceState("lost", boot)


def _connected(turn: Turn, event: Connected) -> None:
    state, topics = turn.state, turn.state.topics
    if not (state.born and event.session_present):
        for pattern in (
            topics.server_state(),
            topics.tuf("timestamp.json"),
            topics.round("+"),
            topics.down(state.device),
        ):
            turn.do(effects.Subscribe(pattern))
    _bear(turn)
    turn.set(outbox=outbox.again(state.outbox, turn.now_s))


def _bear(turn: Turn) -> None:
    """Says what the device is and that it begins; it is ready when its echo is back, and with it all that the broker retains."""
    state = turn.state
    echo, settled_s = Echo(f"born-{state.boot}-{state.sequence}"), turn.now_s + state.limits.settle_s
    turn.set(phase=Phase.SETTLING, settled_s=settled_s, echo=echo.id, born=True, said=None)
    _describe(turn)
    turn.publish(state.topics.echo(state.device), echo, expiry_s=60)


def _describe(turn: Turn) -> None:
    """Says what the device is."""
    turn.publish(turn.state.topics.meta(turn.state.device), turn.state.capability, retain=True)


def _disconnected(turn: Turn, event: Disconnected) -> None:
    turn.set(phase=Phase.OFFLINE)


def _tick(turn: Turn, event: events.Tick) -> None:
    if turn.state.phase is Phase.SETTLING and turn.now_s >= turn.state.settled_s:
        _settle(turn)


def _settle(turn: Turn) -> None:
    """All that the broker retains is in; whoever has no want by now asks for one."""
    state = turn.state
    turn.set(phase=Phase.UP)
    if state.want is None:
        ask = Request(f"want-{state.boot}-{state.sequence}", "want")
        turn.publish(state.topics.request(state.device), ask, expiry_s=60)


def _data_changed(turn: Turn, event: events.DataChanged) -> None:
    turn.set(capability=event.capability, refit=True)
    if turn.state.connected:
        _bear(turn)


def _tier_changed(turn: Turn, event: events.TierChanged) -> None:
    """What the device can no longer do is dropped; the server learns the new tier and plans anew."""
    state = turn.state
    if event.capability.tier != state.capability.tier and state.work:
        turn.give_up(state.work.want.id)
        wants.drop(turn)
    turn.set(capability=event.capability, demoted=event.why)
    turn.log(
        "warning" if event.why else "info", f"tier {event.capability.tier}: {event.why or 'as measured'}"
    )
    if turn.state.connected:
        _bear(turn)


def _rationed(turn: Turn, event: events.Rationed) -> None:
    turn.set(rationed=event.why)


def _drifted(turn: Turn, event: events.Drifted) -> None:
    """The data are looked at once more, and a head fitted if there are new labels among them."""
    can = turn.state.capability
    if event.score and not can.drift:
        turn.set(refit=True)
        turn.log("warning", f"drift: features moved by {event.score:.2f} standard deviations since the fit")
    turn.set(capability=replace(can, drift=event.score))
    if turn.state.connected:
        _describe(turn)


def _metadata_changed(turn: Turn, event: events.MetadataChanged) -> None:
    if turn.state.want and turn.state.want.mode == "serve":
        turn.set(not_before_s=turn.now_s)


def _stop(turn: Turn, event: events.StopAsked) -> None:
    connected = turn.state.connected
    turn.set(phase=Phase.STOPPED, want=None)
    if connected:
        turn.say_status()
    turn.do(effects.Stop())


def _received(turn: Turn, event: events.Received) -> None:
    if handle := _HEARD.get(event.address.kind):
        handle(turn, event)


def _server_state(turn: Turn, event: events.Received) -> None:
    server, state = event.message, turn.state
    if not isinstance(server, ServerState):
        return
    if server.protocol.split(".")[0] != PROTOCOL.split(".")[0]:
        turn.set(server=None, why="unsupported_proto")
        return
    if server.boot != state.memory.server:
        turn.remember(server=server.boot, version=0)
    came_back = server.online and not (
        state.server_online and state.server and state.server.boot == server.boot
    )
    if server.return_s != (state.server.return_s if state.server else 0.0):
        turn.do(effects.Spread(server.return_s))
    turn.set(server=server, why="" if state.why == "unsupported_proto" else state.why)
    if came_back:
        spread_s = max(state.limits.return_s, server.return_s) * outbox.jitter(
            state.boot, server.boot, server.epoch
        )
        turn.set(outbox=outbox.again(state.outbox, turn.now_s + spread_s, grace_s=state.limits.grace_s))


def _round(turn: Turn, event: events.Received) -> None:
    if turn.state.tier is not Tier.FULL:
        return
    task = event.address.path[0]
    rounds = {name: round for name, round in turn.state.rounds.items() if name != task}
    if isinstance(event.message, Round) and event.message.task == task:
        rounds[task] = event.message
    turn.set(rounds=dict(list(rounds.items())[-REMEMBERED_ROUNDS:]))


def _want(turn: Turn, event: events.Received) -> None:
    wants.accept(turn, event.message if isinstance(event.message, Want) else None)


def _command(turn: Turn, event: events.Received) -> None:
    command = event.message
    if isinstance(command, Command) and not event.retain and (do := _DO.get(command.do)):
        do(turn)


def _rebirth(turn: Turn) -> None:
    _describe(turn)
    turn.set(said=None)


def _abort(turn: Turn) -> None:
    if work := turn.state.work:
        turn.give_up(work.want.id)
        wants.drop(turn)


def _revoke(turn: Turn) -> None:
    """The head goes, and does not come back for the want that it served."""
    if turn.state.want:
        turn.give_up(turn.state.want.id)
    turn.set(release=0, refit=False)
    turn.do(effects.Revoke())


def _ack(turn: Turn, event: events.Received) -> None:
    ack = event.message
    waiting = outbox.find(turn.state.outbox, ack.id) if isinstance(ack, Ack) else None
    if not isinstance(ack, Ack) or event.retain or not waiting:
        return
    if waiting.parcel.report.error:
        turn.give_up(ack.id)
    else:
        turn.done(ack.id)
    turn.set(outbox=outbox.drop(turn.state.outbox, ack.id))
    turn.do(effects.Forget(ack.id))


def _echo(turn: Turn, event: events.Received) -> None:
    echo, state = event.message, turn.state
    if isinstance(echo, Echo) and echo.id == state.echo and state.phase is Phase.SETTLING:
        _settle(turn)


def _send(turn: Turn) -> None:
    """Sends the reports that are due, while there is a server to take them."""
    state = turn.state
    if state.phase is not Phase.UP or not state.server_online:
        return
    sent = []
    for waiting in state.outbox:
        if waiting.next_s <= turn.now_s:
            turn.do(effects.Send(waiting.parcel, expiry_s=max(1, round(waiting.due_s - turn.now_s))))
            turn.set(sequence=turn.state.sequence + 1)
            waiting = outbox.after_sending(
                waiting, turn.now_s, state.limits.resend_s, state.limits.resend_bytes_per_s
            )
        sent.append(waiting)
    turn.set(outbox=tuple(sent))


def _say(turn: Turn) -> None:
    state = turn.state
    if state.connected and state.said != (state.status, state.activity, state.release, state.reason):
        turn.say_status()


_ON: dict[type, Callable[[Turn, Any], None]] = {
    Connected: _connected,
    Disconnected: _disconnected,
    events.Tick: _tick,
    events.Received: _received,
    events.MetadataChanged: _metadata_changed,
    events.Refreshed: wants.refreshed,
    events.Fetched: wants.fetched,
    events.Installed: wants.installed,
    events.Finished: wants.finished,
    events.Failed: wants.failed,
    events.DataChanged: _data_changed,
    events.TierChanged: _tier_changed,
    events.Rationed: _rationed,
    events.Drifted: _drifted,
    events.StopAsked: _stop,
}
_HEARD: dict[str, Callable[[Turn, events.Received], None]] = {
    "server_state": _server_state,
    "round": _round,
    "want": _want,
    "cmd": _command,
    "ack": _ack,
    "echo": _echo,
}
_DO: dict[str, Callable[[Turn], None]] = {"rebirth": _rebirth, "abort": _abort, "revoke-local-head": _revoke}
