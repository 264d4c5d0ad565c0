"""The agent: all decisions of a device in one pure function, `step(state, event, now_s)` -> next state and effects.

No sockets, clocks, files or torch here: `now_s` is any monotonic clock, and the runtime carries out the effects. Every connection
starts with a birth (capability, status "init"; "ready" once the retained messages have arrived). A new assignment is worked on, one at
a time (`edge_fl_devices.agent.assignments`), and ends in a report that stays in the outbox until the server acknowledges it. The status
message is derived from the state at the end of each step and published when it has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from edge_fl.failures import Failure
from edge_fl.fields import Tier
from edge_fl.release.agent import AgentUpdate
from edge_fl.wire.messages import (
    PROTOCOL,
    Ack,
    Assignment,
    Capability,
    Command,
    DeviceState,
    Echo,
    Request,
    Round,
    ServerState,
)
from edge_fl.wire.transport import Connected, Disconnected
from edge_fl_devices.agent import assignments, effects, events, outbox
from edge_fl_devices.agent.effects import Effect, without_server
from edge_fl_devices.agent.events import Event
from edge_fl_devices.agent.state import AgentState, Phase, StepContext

REMEMBERED_ROUNDS = 4
REJECTIONS = frozenset(
    {
        Failure.UNSIGNED,
        Failure.FORGED,
        Failure.WRONG_KEY,
        Failure.MISDIRECTED,
        Failure.REPLAYED,
        Failure.EXPIRED,
    }
)
"""Failure words of a message whose signature does not count."""


def step(state: AgentState, event: Event, now_s: float) -> tuple[AgentState, tuple[Effect, ...]]:
    """Return the state after `event`, and the effects to carry out, in order."""
    if state.phase is Phase.STOPPED:
        return state, ()
    context = StepContext(state, now_s)
    _HANDLERS[type(event)](context, event)
    assignments.end_overdue(context)
    assignments.begin(context)
    if context.state.connected:
        context.publish_status()  # before the report, after which a server may leave
    _send_reports(context)
    return context.state, tuple(context.effects)


def will(boot: str) -> DeviceState:
    """The message that the broker publishes when the device's connection breaks."""
    return DeviceState("lost", boot)


def _on_connected(context: StepContext, event: Connected) -> None:
    state, topics = context.state, context.state.topics
    if not (state.born and event.session_present):
        for pattern in (
            topics.server("state"),
            topics.tuf("timestamp.json"),
            topics.round("+"),
            topics.down(state.device, "#"),
        ):
            context.emit(effects.Subscribe(pattern))
    _publish_birth(context)
    context.update(outbox=outbox.reconnected(state.outbox, context.now_s))


def _on_disconnected(context: StepContext, event: Disconnected) -> None:
    """Go on without a broker: after `offline_s` new data lead to a fit."""
    if context.state.phase is not Phase.OFFLINE:
        context.update(phase=Phase.OFFLINE, alone_at_s=context.now_s + context.state.limits.offline_s)


def _publish_birth(context: StepContext) -> None:
    """Publish capability and echo; when the echo returns, all retained messages have arrived."""
    state = context.state
    echo, settled_s = Echo(f"born-{state.boot}-{state.sequence}"), context.now_s + state.limits.settle_s
    context.update(phase=Phase.SETTLING, settled_s=settled_s, echo=echo.id, born=True, published=None)
    _publish_capability(context)
    context.publish(state.topics.down(state.device, "echo"), echo, expiry_s=60)


def _publish_capability(context: StepContext) -> None:
    state = context.state
    context.publish(state.topics.up(state.device, "meta"), state.capability, retain=True)


def _on_tick(context: StepContext, event: events.Tick) -> None:
    if context.state.phase is Phase.SETTLING and context.now_s >= context.state.settled_s:
        _end_settling(context)


def _end_settling(context: StepContext) -> None:
    """Start normal operation; request an assignment if none was retained, or an older one."""
    state = context.state
    context.update(phase=Phase.UP, outdated=False)
    if state.assignment is None or state.outdated:
        request = Request(f"assignment-{state.boot}-{state.sequence}", "assignment")
        context.publish(state.topics.up(state.device, "req"), request, expiry_s=60)


def _on_data_changed(context: StepContext, event: events.DataChanged) -> None:
    changed = event.refit and not event.why
    refit = context.state.refit or changed
    context.update(capability=_measured(context, event), refit=refit, data_problem=event.why)
    waits_for_data = context.state.not_before_s == math.inf
    if changed and (
        waits_for_data or not context.state.connected
    ):  # a pause may be one of what only a broker has
        context.update(tries=0, not_before_s=-math.inf)
    if context.state.connected:
        _publish_birth(context)


def _measured(context: StepContext, event: events.DataChanged | events.TierChanged) -> Capability:
    """The capability of an event; how the agent is updated, and its settings, are no measurement."""
    known = context.state.capability
    return replace(event.capability, update=known.update, settings=known.settings)


def _on_tier_changed(context: StepContext, event: events.TierChanged) -> None:
    """Cancel work that the new tier cannot do; the server learns of it by a new birth."""
    state = context.state
    if event.capability.tier != state.capability.tier:
        _abort(context)
    context.update(capability=_measured(context, event), demoted=event.why)
    level, reason = ("warning", event.why) if event.why else ("info", "as measured")
    context.log(level, f"tier {event.capability.tier}: {reason}")  # type: ignore[arg-type]
    if context.state.connected:
        _publish_birth(context)


def _on_drifted(context: StepContext, event: events.Drifted) -> None:
    """When drift begins, read the data again; a head is fitted if they contain new labels."""
    capability = context.state.capability
    if event.score and not capability.drift:
        context.update(refit=True)
        context.log(
            "warning", f"drift: features moved by {event.score:.2f} standard deviations since the fit"
        )
    _change_capability(context, drift=event.score)


def _on_promise_checked(context: StepContext, event: events.PromiseChecked) -> None:
    if event.missed and not context.state.capability.missed:
        context.log(
            "warning", f"promise broken: {event.missed:.0%} of the newest labels were outside their sets"
        )
    _change_capability(context, missed=event.missed)


def _on_settings_changed(context: StepContext, event: events.SettingsChanged) -> None:
    if event.status != context.state.capability.settings:
        _change_capability(context, settings=event.status)


def _change_capability(context: StepContext, **changes: Any) -> None:
    context.update(capability=replace(context.state.capability, **changes))
    if context.state.connected:
        _publish_capability(context)


def _on_metadata_changed(context: StepContext, event: events.MetadataChanged) -> None:
    state = context.state
    if state.assignment and state.assignment.mode == "serve" and state.not_before_s < math.inf:
        context.update(not_before_s=context.now_s)


def _on_stop(context: StepContext, event: events.StopRequested) -> None:
    connected = context.state.connected
    why = Failure.SHUT_DOWN if event.planned else context.state.why
    context.update(phase=Phase.STOPPED, assignment=None, why=why)
    if connected:
        context.publish_status()
    context.emit(effects.Stop())


def _on_received(context: StepContext, event: events.Received) -> None:
    if handler := _MESSAGE_HANDLERS.get(event.address.kind):
        handler(context, event)


def _on_server_state(context: StepContext, event: events.Received) -> None:
    server, state = event.message, context.state
    if not isinstance(server, ServerState):
        return
    if server.protocol.split(".")[0] != PROTOCOL.split(".")[0]:
        context.update(server=None, why=Failure.UNSUPPORTED_PROTO)
        return
    if server.boot != state.memory.server:
        context.remember(server=server.boot, version=0)
    same_server = state.server is not None and state.server.boot == server.boot
    returned = server.online and not (state.server_online and same_server)
    if server.return_s != (state.server.return_s if state.server else 0.0):
        context.emit(effects.SpreadReconnects(server.return_s))
    context.update(server=server, why="" if state.why == Failure.UNSUPPORTED_PROTO else state.why)
    if returned:
        window_s = max(state.limits.return_s, server.return_s)
        send_s = context.now_s + window_s * outbox.jitter(state.boot, server.boot, server.epoch)
        context.update(outbox=outbox.reschedule(state.outbox, send_s, grace_s=state.limits.grace_s))


def _on_round(context: StepContext, event: events.Received) -> None:
    if context.state.tier is not Tier.FULL:
        return
    run_id = event.address.path[0]
    rounds = {known: round for known, round in context.state.rounds.items() if known != run_id}
    if isinstance(event.message, Round) and event.message.run_id == run_id:
        rounds[run_id] = event.message
    context.update(rounds=dict(list(rounds.items())[-REMEMBERED_ROUNDS:]))


def _on_assignment(context: StepContext, event: events.Received) -> None:
    signed = context.state.memory.signed
    if not isinstance(event.message, Assignment):
        assignments.accept(context, None)
    elif why := _rejection(event, signed, required=signed > 0):
        if _is_outdated(context, why):
            context.update(outdated=True)
            return
        if why != context.state.why:
            context.log("warning", f"assignment {event.message.id} rejected: {why}")
        context.update(why=why)
    else:
        context.update(outdated=False)
        if event.number:
            _note_key(context, event.key)
            context.remember(signed=event.number)
        if context.state.why in REJECTIONS:
            context.update(why="")
        assignments.accept(context, event.message)


def _note_key(context: StepContext, key: str) -> None:
    """Do not rely on ids and numbers of releases when another key signs: it may be another server's, which counts anew."""
    memory = context.state.memory
    if memory.key not in ("", key):
        context.remember(**without_server(memory))
        context.emit(effects.Unblock())
    context.remember(key=key)


def _rejection(event: events.Received, lowest: int, *, required: bool) -> str:
    """The failure word of a message that the server did not sign for this device, or signed before a later one; "" for a valid one.

    `lowest`: the lowest number that counts. Unless a signature is `required`, the server may have no keys.
    """
    if event.rejected:
        return event.rejected
    if not event.number:
        return Failure.UNSIGNED if required else ""
    return Failure.REPLAYED if event.number < lowest else ""


def _is_outdated(context: StepContext, why: str) -> bool:
    """Whether a message is older than one that the device has because a connection begins with it: the broker was restored from its last
    save. It does not count, and the server publishes its present one on every connection, so nothing is reported.
    """
    return why == Failure.REPLAYED and context.state.phase is Phase.SETTLING


def _on_update(context: StepContext, event: events.Received) -> None:
    """Desire another agent. A rejected message about the last update is no news."""
    update, memory, known = event.message, context.state.memory, context.state.capability.update
    if known is None:
        return
    if not isinstance(update, AgentUpdate):
        context.remember(offered_agent=0)
        context.emit(effects.DesireUpdate(None))
    elif why := _rejection(event, memory.signed_update, required=memory.signed > 0):
        if update.id != known.id and not _is_outdated(context, why):
            context.log("warning", f"agent update {update.id} rejected: {why}")
    else:
        signed_update = max(event.number, memory.signed_update)
        context.remember(signed_update=signed_update, offered_agent=update.number)
        context.emit(effects.DesireUpdate(update))


def _on_command(context: StepContext, event: events.Received) -> None:
    command, memory = event.message, context.state.memory
    if not isinstance(command, Command) or event.retain:
        return
    if why := _rejection(event, memory.signed_command + 1, required=memory.signed > 0):
        if not _is_outdated(context, why):
            context.log("warning", f"command {command.id} ({command.do}) rejected: {why}")
        return
    context.remember(signed_command=max(event.number, memory.signed_command))
    match command.do:
        case "rebirth":
            _publish_capability(context)
            context.update(published=None)
        case "abort":
            _abort(context)
        case "revoke-local-head":
            _revoke_head(context)


def _abort(context: StepContext) -> None:
    if work := context.state.work:
        context.give_up(work.assignment.id)
        assignments.cancel(context)


def _revoke_head(context: StepContext) -> None:
    """Delete the head and do not fit it again for the current assignment."""
    if context.state.assignment:
        context.give_up(context.state.assignment.id)
    context.update(release=0, refit=False)
    context.emit(effects.Revoke())


def _on_ack(context: StepContext, event: events.Received) -> None:
    ack = event.message
    if not isinstance(ack, Ack) or event.retain:
        return
    if (entry := outbox.find(context.state.outbox, ack.id)) is None:
        return
    if not (error := entry.parcel.report.error):
        context.mark_done(ack.id)
    elif error != Failure.KILLED:  # the next start tries that again
        context.give_up(ack.id)
    context.update(outbox=outbox.remove(context.state.outbox, ack.id))
    context.emit(effects.Forget(ack.id))


def _on_echo(context: StepContext, event: events.Received) -> None:
    echo, state = event.message, context.state
    if isinstance(echo, Echo) and echo.id == state.echo and state.phase is Phase.SETTLING:
        _end_settling(context)


def _send_reports(context: StepContext) -> None:
    """Send the reports that are due while a server is online."""
    state, limits = context.state, context.state.limits
    if state.phase is not Phase.UP or not state.server_online:
        return
    entries = []
    for entry in state.outbox:
        if entry.next_s <= context.now_s:
            expiry_s = max(1, round(entry.due_s - context.now_s))
            context.emit(effects.Send(entry.parcel, expiry_s))
            context.update(sequence=context.state.sequence + 1)
            entry = outbox.after_sending(entry, context.now_s, limits.resend_s, limits.resend_bytes_per_s)
        entries.append(entry)
    context.update(outbox=tuple(entries))


_HANDLERS: dict[type, Callable[[StepContext, Any], None]] = {
    Connected: _on_connected,
    Disconnected: _on_disconnected,
    events.Tick: _on_tick,
    events.Received: _on_received,
    events.MetadataChanged: _on_metadata_changed,
    events.Refreshed: assignments.refreshed,
    events.Interrupted: assignments.interrupted,
    events.Fetched: assignments.fetched,
    events.Installed: assignments.installed,
    events.Finished: assignments.finished,
    events.Failed: assignments.failed,
    events.DataChanged: _on_data_changed,
    events.TierChanged: _on_tier_changed,
    events.BudgetChanged: lambda context, event: context.update(over_budget=event.why),
    events.Drifted: _on_drifted,
    events.PromiseChecked: _on_promise_checked,
    events.Impaired: lambda context, event: context.update(impaired=event.why),
    events.UpdateChanged: lambda context, event: _change_capability(context, update=event.status),
    events.SettingsChanged: _on_settings_changed,
    events.StopRequested: _on_stop,
}
_MESSAGE_HANDLERS: dict[str, Callable[[StepContext, events.Received], None]] = {
    "server_state": _on_server_state,
    "round": _on_round,
    "assignment": _on_assignment,
    "cmd": _on_command,
    "agent": _on_update,
    "ack": _on_ack,
    "echo": _on_echo,
}
