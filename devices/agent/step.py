"""The agent: everything a device decides, as one pure function. `step(state, event, now_s)` gives the next state and what to do.

No sockets, no clock, no files, no torch in here: `now_s` is any clock that only moves forward, and the runner carries out the
effects. The life of an agent: every connection is a birth (capability, status init; ready once the retained messages are in); a
`Want` that is new is worked on, one at a time (`devices.agent.assignments`), and ends in a report that stays in the outbox until the server
acknowledges it. What the status message says follows from the state at the end of each step, and goes out when it is news.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from devices.agent import assignments, effects, events, outbox
from devices.agent.effects import Effect
from devices.agent.events import Event
from devices.agent.state import AgentState, Phase
from devices.agent.step_context import StepContext
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
    context = StepContext(state, now_s)
    _ON[type(event)](context, event)
    assignments.end_overdue(context)
    assignments.begin(context)
    _send(context)
    _say(context)
    return context.state, tuple(context.effects)


def will(device: str, boot: str) -> DeviceState:
    """What the broker says of this device when its connection breaks."""
    return DeviceState("lost", boot)


def _connected(context: StepContext, event: Connected) -> None:
    state, topics = context.state, context.state.topics
    if not (state.born and event.session_present):
        for pattern in (
            topics.server_state(),
            topics.tuf("timestamp.json"),
            topics.round("+"),
            topics.down(state.device),
        ):
            context.do(effects.Subscribe(pattern))
    _bear(context)
    context.set(outbox=outbox.again(state.outbox, context.now_s))


def _bear(context: StepContext) -> None:
    """Says what the device is and that it begins; it is ready when its echo is back, and with it all that the broker retains."""
    state = context.state
    echo, settled_s = Echo(f"born-{state.boot}-{state.sequence}"), context.now_s + state.limits.settle_s
    context.set(phase=Phase.SETTLING, settled_s=settled_s, echo=echo.id, born=True, said=None)
    _describe(context)
    context.publish(state.topics.echo(state.device), echo, expiry_s=60)


def _describe(context: StepContext) -> None:
    """Says what the device is."""
    context.publish(
        context.state.topics.meta(context.state.device), context.state.capability, retain=True
    )


def _disconnected(context: StepContext, event: Disconnected) -> None:
    context.set(phase=Phase.OFFLINE)


def _tick(context: StepContext, event: events.Tick) -> None:
    if context.state.phase is Phase.SETTLING and context.now_s >= context.state.settled_s:
        _settle(context)


def _settle(context: StepContext) -> None:
    """All that the broker retains is in; whoever has no want by now asks for one."""
    state = context.state
    context.set(phase=Phase.UP)
    if state.assignment is None:
        ask = Request(f"want-{state.boot}-{state.sequence}", "assignment")
        context.publish(state.topics.request(state.device), ask, expiry_s=60)


def _data_changed(context: StepContext, event: events.DataChanged) -> None:
    context.set(capability=event.capability, refit=True)
    if context.state.connected:
        _bear(context)


def _tier_changed(context: StepContext, event: events.TierChanged) -> None:
    """What the device can no longer do is dropped; the server learns the new tier and plans anew."""
    state = context.state
    if event.capability.tier != state.capability.tier and state.work:
        context.give_up(state.work.assignment.id)
        assignments.drop(context)
    context.set(capability=event.capability, demoted=event.why)
    context.log(
        "warning" if event.why else "info", f"tier {event.capability.tier}: {event.why or 'as measured'}"
    )
    if context.state.connected:
        _bear(context)


def _rationed(context: StepContext, event: events.BudgetChanged) -> None:
    context.set(over_budget=event.why)


def _drifted(context: StepContext, event: events.Drifted) -> None:
    """The data are looked at once more, and a head fitted if there are new labels among them."""
    can = context.state.capability
    if event.score and not can.drift:
        context.set(refit=True)
        context.log(
            "warning", f"drift: features moved by {event.score:.2f} standard deviations since the fit"
        )
    context.set(capability=replace(can, drift=event.score))
    if context.state.connected:
        _describe(context)


def _metadata_changed(context: StepContext, event: events.MetadataChanged) -> None:
    if context.state.assignment and context.state.assignment.mode == "serve":
        context.set(not_before_s=context.now_s)


def _stop(context: StepContext, event: events.StopRequested) -> None:
    connected = context.state.connected
    context.set(phase=Phase.STOPPED, assignment=None)
    if connected:
        context.say_status()
    context.do(effects.Stop())


def _received(context: StepContext, event: events.Received) -> None:
    if handle := _HEARD.get(event.address.kind):
        handle(context, event)


def _server_state(context: StepContext, event: events.Received) -> None:
    server, state = event.message, context.state
    if not isinstance(server, ServerState):
        return
    if server.protocol.split(".")[0] != PROTOCOL.split(".")[0]:
        context.set(server=None, why="unsupported_proto")
        return
    if server.boot != state.memory.server:
        context.remember(server=server.boot, version=0)
    came_back = server.online and not (
        state.server_online and state.server and state.server.boot == server.boot
    )
    if server.return_s != (state.server.return_s if state.server else 0.0):
        context.do(effects.SpreadReconnects(server.return_s))
    context.set(server=server, why="" if state.why == "unsupported_proto" else state.why)
    if came_back:
        spread_s = max(state.limits.return_s, server.return_s) * outbox.jitter(
            state.boot, server.boot, server.epoch
        )
        context.set(
            outbox=outbox.again(state.outbox, context.now_s + spread_s, grace_s=state.limits.grace_s)
        )


def _round(context: StepContext, event: events.Received) -> None:
    if context.state.tier is not Tier.FULL:
        return
    run_id = event.address.path[0]
    rounds = {name: round for name, round in context.state.rounds.items() if name != run_id}
    if isinstance(event.message, Round) and event.message.run_id == run_id:
        rounds[run_id] = event.message
    context.set(rounds=dict(list(rounds.items())[-REMEMBERED_ROUNDS:]))


def _assignment(context: StepContext, event: events.Received) -> None:
    assignments.accept(context, event.message if isinstance(event.message, Assignment) else None)


def _command(context: StepContext, event: events.Received) -> None:
    command = event.message
    if isinstance(command, Command) and not event.retain and (do := _DO.get(command.do)):
        do(context)


def _rebirth(context: StepContext) -> None:
    _describe(context)
    context.set(said=None)


def _abort(context: StepContext) -> None:
    if work := context.state.work:
        context.give_up(work.assignment.id)
        assignments.drop(context)


def _revoke(context: StepContext) -> None:
    """The head goes, and does not come back for the want that it served."""
    if context.state.assignment:
        context.give_up(context.state.assignment.id)
    context.set(release=0, refit=False)
    context.do(effects.Revoke())


def _ack(context: StepContext, event: events.Received) -> None:
    ack = event.message
    waiting = outbox.find(context.state.outbox, ack.id) if isinstance(ack, Ack) else None
    if not isinstance(ack, Ack) or event.retain or not waiting:
        return
    if waiting.parcel.report.error:
        context.give_up(ack.id)
    else:
        context.done(ack.id)
    context.set(outbox=outbox.drop(context.state.outbox, ack.id))
    context.do(effects.Forget(ack.id))


def _echo(context: StepContext, event: events.Received) -> None:
    echo, state = event.message, context.state
    if isinstance(echo, Echo) and echo.id == state.echo and state.phase is Phase.SETTLING:
        _settle(context)


def _send(context: StepContext) -> None:
    """Sends the reports that are due, while there is a server to take them."""
    state = context.state
    if state.phase is not Phase.UP or not state.server_online:
        return
    sent = []
    for waiting in state.outbox:
        if waiting.next_s <= context.now_s:
            context.do(
                effects.Send(waiting.parcel, expiry_s=max(1, round(waiting.due_s - context.now_s)))
            )
            context.set(sequence=context.state.sequence + 1)
            waiting = outbox.after_sending(
                waiting, context.now_s, state.limits.resend_s, state.limits.resend_bytes_per_s
            )
        sent.append(waiting)
    context.set(outbox=tuple(sent))


def _say(context: StepContext) -> None:
    state = context.state
    if state.connected and state.said != (state.status, state.activity, state.release, state.reason):
        context.say_status()


_ON: dict[type, Callable[[StepContext, Any], None]] = {
    Connected: _connected,
    Disconnected: _disconnected,
    events.Tick: _tick,
    events.Received: _received,
    events.MetadataChanged: _metadata_changed,
    events.Refreshed: assignments.refreshed,
    events.Fetched: assignments.fetched,
    events.Installed: assignments.installed,
    events.Finished: assignments.finished,
    events.Failed: assignments.failed,
    events.DataChanged: _data_changed,
    events.TierChanged: _tier_changed,
    events.BudgetChanged: _rationed,
    events.Drifted: _drifted,
    events.StopRequested: _stop,
}
_HEARD: dict[str, Callable[[StepContext, events.Received], None]] = {
    "server_state": _server_state,
    "round": _round,
    "assignment": _assignment,
    "cmd": _command,
    "ack": _ack,
    "echo": _echo,
}
_DO: dict[str, Callable[[StepContext], None]] = {
    "rebirth": _rebirth,
    "abort": _abort,
    "revoke-local-head": _revoke,
}
