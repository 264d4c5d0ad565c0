"""Work on the latest assignment, one piece at a time, from its arrival to its report.

"serve" verifies the signed metadata, fetches what is missing, installs and fits a head; it is retried until it succeeds or another
assignment arrives. "train", "evaluate", "personalise" and "compare" fetch broadcasts and run the method until their deadline. Either ends
in exactly one report; a report on a failure names the reason. After a change of the data a head is fitted on the installed release, also
without a broker.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from edge_fl.failures import Failure
from edge_fl.fields import Tier
from edge_fl.wire.messages import Activity, Assignment, Mode, Report, spec_digest
from edge_fl_devices.agent import effects, events, outbox
from edge_fl_devices.agent.outbox import Parcel
from edge_fl_devices.agent.state import AgentLimits, Phase, StepContext, Work

KINDS: dict[Mode, Literal["update", "personal", "evaluation", "head"]] = {
    "serve": "head",
    "train": "update",
    "evaluate": "evaluation",
    "compare": "evaluation",
    "personalise": "personal",
}
"""Kind of the report that answers an assignment."""


MEASURES: frozenset[Mode] = frozenset({"evaluate", "compare"})
"""Assignments that change nothing on the device."""


def accept(context: StepContext, assignment: Assignment | None) -> None:
    """Accept an assignment unless its version is old. A repeated one means that its report was lost: send the report again."""
    state = context.state
    if assignment is None:
        context.update(assignment=None)
        return
    if assignment.version < state.memory.version:
        return
    known = state.assignment
    if known and (assignment.id, assignment.version) == (known.id, known.version):
        resend = [replace(e, next_s=context.now_s) if e.id == known.id else e for e in state.outbox]
        context.update(outbox=tuple(resend))
        return
    if assignment.version > state.memory.version and assignment.id in state.memory.given_up:
        context.reconsider(assignment.id)
    offered = {"offered": assignment.release} if assignment.mode == "serve" else {}
    context.remember(version=assignment.version, **offered)
    if known and known.why == state.why:
        context.update(why="")
    due_s = math.inf if assignment.mode in ("serve", "rest") else context.now_s + assignment.deadline_s
    context.update(assignment=assignment, assignment_due_s=due_s, tries=0, not_before_s=-math.inf)
    if state.work and state.work.assignment.id != assignment.id and state.work.activity != "fitting":
        cancel(context)


def begin(context: StepContext) -> None:
    """Begin work on the assignment, or a refit, if the device is free to; without a broker only a refit."""
    state = context.state
    if state.may_refit_alone:
        if context.now_s >= max(state.not_before_s, state.alone_at_s):
            context.update(not_before_s=-math.inf)
            _begin_refit_alone(context)
        return
    if not state.may_begin or context.now_s < state.not_before_s:
        return
    if state.pending:
        context.update(not_before_s=-math.inf)
        _BEGIN[state.pending.mode](context, state.pending)
    elif state.wants_refit:
        context.update(not_before_s=-math.inf)
        _begin_refit(context)


def _begin_serve(context: StepContext, assignment: Assignment) -> None:
    if context.state.tier is Tier.HEAD:  # a full device serves no release
        context.reconsider(assignment.id)
        context.update(work=Work(assignment, "fetching"), refit=False)
        context.emit(effects.Refresh(assignment.release))


def _begin_training(context: StepContext, assignment: Assignment) -> None:
    state, round = context.state, context.state.rounds.get(assignment.run_id)
    if state.tier is not Tier.FULL:
        _give_up(context, assignment, Failure.UNSUPPORTED_TIER)
    elif round and assignment.spec not in ("", spec_digest(round.spec)):
        context.update(
            why=Failure.FORGED
        )  # the specification of the round is not the one that the server assigned
    elif state.server_online and round and round.round <= assignment.round:
        blobs = tuple(blob for blob in (assignment.before, assignment.down) if blob)
        _fetch_next(context, Work(assignment, "fetching", state.assignment_due_s, round.spec, to_fetch=blobs))


def _begin_rest(context: StepContext, assignment: Assignment) -> None:
    """Adopt the server's reason, if it gives one."""
    if assignment.why:
        context.update(why=assignment.why)


def _begin_refit(context: StepContext) -> None:
    """After a change of the data, retry a release that could not be fitted, or fit a new head for the one that serves."""
    state = context.state
    context.update(refit=False)
    if state.assignment and state.assignment.mode == "serve" and state.assignment.release != state.release:
        _withdraw_failure(context, state.assignment.id)
        context.reconsider(state.assignment.id)
        context.update(tries=0)
        begin(context)
    elif state.refit_on:
        _refit(context)


def _begin_refit_alone(context: StepContext) -> None:
    """Fit a head without a broker on the installed release, for its assignment if there is one that has no head yet."""
    state, assigned = context.state, context.state.assignment
    cancel(context)
    context.update(refit=False)
    if assigned and assigned.mode == "serve" and assigned.release == state.installed != state.release:
        _withdraw_failure(context, assigned.id)
        context.reconsider(assigned.id)
        _fit(context, Work(assigned, "fitting"))
    else:
        _refit(context)


def _refit(context: StepContext) -> None:
    """Fit a head on the installed release, of the device's own accord: as an assignment without a version."""
    state = context.state
    context.update(
        sequence=state.sequence + 1
    )  # without a broker nothing else would make the next id another one
    id = f"{outbox.REFIT}{state.boot}-{state.sequence}"
    _fit(context, Work(Assignment(0, "serve", id=id, release=state.refit_on), "fitting"))


def _withdraw_failure(context: StepContext, id: str) -> None:
    """Delete the report on a failure that the server has not acknowledged: the next one says more."""
    if (entry := outbox.find(context.state.outbox, id)) and entry.parcel.report.error:
        context.update(outbox=outbox.remove(context.state.outbox, id))
        context.emit(effects.Forget(id))


def refreshed(context: StepContext, event: events.Refreshed) -> None:
    """Fetch what is missing of the release, or fit a head if it is installed."""
    if work := _current_work(context):
        transferred = work.bytes_down + event.bytes
        work = replace(work, manifest=event.manifest, to_fetch=event.missing, bytes_down=transferred)
        if event.installed:
            context.update(installed=event.manifest.release)
            _fit(context, work)
        else:
            _fetch_next(context, work)


def fetched(context: StepContext, event: events.Fetched) -> None:
    """Train on the broadcast, or fetch the next blob."""
    work = _current_work(context)
    if work is None or work.fetching is None or work.fetching.sha256 != event.sha256:
        return
    work = replace(work, fetching=None, bytes_down=work.bytes_down + event.bytes)
    _fetch_next(context, work)


def installed(context: StepContext, event: events.Installed) -> None:
    """Fit a head on the installed release."""
    context.update(installed=event.release)
    if work := _current_work(context):
        context.log("info", f"release {work.assignment.release} is installed")
        _fit(context, work)


def interrupted(context: StepContext, event: events.Interrupted) -> None:
    """Look the release up anew with the next connection."""
    context.update(work=None)


def finished(context: StepContext, event: events.Finished) -> None:
    """Put the report into the outbox, or delete it if the work was cancelled."""
    work = context.state.work
    if work is None:
        return
    report = event.report
    context.update(work=None, release=report.release if report.kind == "head" else context.state.release)
    if work.cancelled:
        context.emit(effects.Forget(report.id))
    else:
        context.update(why="", tries=0)
        _add_report(context, parcel_for(work.assignment, report, context.state.limits))


def failed(context: StepContext, event: events.Failed) -> None:
    """Schedule a retry with growing pauses, or report the failure."""
    state, work = context.state, context.state.work
    if work is None:
        return
    context.update(work=None)
    if event.reason == Failure.WORSE:  # the one that serves is current again
        context.update(installed=state.release)
    if work.cancelled:
        return
    tries, limits, id = state.tries + 1, state.limits, work.assignment.id
    refit = work.assignment.version == 0
    context.update(why=event.reason, tries=tries)
    if event.reason.calm:
        context.log("info", f"{id}: {event.reason.explanation}")
    else:
        cause = f"{event.reason} ({event.signal})" if event.signal else event.reason
        context.log("warning", f"{work.assignment.mode} for {id} failed, try {tries}: {cause}")
    if event.reason.final or (tries >= limits.max_tries and work.assignment.mode != "serve"):
        _give_up(context, work.assignment, event.reason)
    elif event.reason == Failure.KILLED and tries >= limits.max_kills:
        context.update(not_before_s=math.inf)
        context.log("warning", f"{id}: not tried again until new data, another release or a restart")
        if not refit:
            _report_failure(context, work.assignment, event.reason)
    else:
        context.update(refit=state.refit or refit)
        pause_s = min(limits.retry_s * 2.0 ** (tries - 1), limits.max_retry_s)
        factor = 0.75 + 0.5 * outbox.jitter(state.boot, id, tries)
        context.update(not_before_s=context.now_s + pause_s * factor)


def cancel(context: StepContext) -> None:
    """Cancel the work: a fetch at once; a running job cannot be stopped, so its result will be dropped."""
    work = context.state.work
    if work and work.fetching:
        context.emit(effects.CancelFetch())
        context.update(work=None)
    elif work:
        context.update(work=replace(work, cancelled=True))


def end_overdue(context: StepContext) -> None:
    """End what is past its deadline: work, an assignment that could not begin, unacknowledged reports."""
    work, pending = context.state.work, context.state.pending
    if work and not work.cancelled and context.now_s >= work.due_s:
        context.update(why=Failure.DEADLINE)
        context.give_up(work.assignment.id)
        cancel(context)
    if pending and context.now_s >= context.state.assignment_due_s:
        context.update(why=Failure.DEADLINE)
        context.give_up(pending.id)
    offline = context.state.phase is Phase.OFFLINE
    for entry in context.state.outbox:
        if entry.due_s <= context.now_s and not (offline and outbox.waits(entry)):
            context.update(why=Failure.DEADLINE, outbox=outbox.remove(context.state.outbox, entry.id))
            context.give_up(entry.id)
            context.emit(effects.Forget(entry.id))


def parcel_for(assignment: Assignment, report: Report, limits: AgentLimits) -> Parcel:
    """Address a report. The report on a head is kept for long, any other until its round's deadline."""
    deadline_s = limits.head_report_s if assignment.mode == "serve" else assignment.deadline_s
    return Parcel(assignment.run_id, assignment.round, report, deadline_s)


def _current_work(context: StepContext) -> Work | None:
    """Return the work under way; cancelled work ends here."""
    work = context.state.work
    if work and work.cancelled:
        context.update(work=None)
        return None
    return work


def _fetch_next(context: StepContext, work: Work) -> None:
    if work.to_fetch:
        context.update(work=replace(work, fetching=work.to_fetch[0], to_fetch=work.to_fetch[1:]))
        context.emit(effects.Fetch(work.to_fetch[0], keep=work.spec is None))
    elif work.spec:
        _train(context, work)
    elif work.manifest:
        context.update(work=replace(work, activity="installing"))
        context.emit(effects.Install(work.manifest))


def _fit(context: StepContext, work: Work) -> None:
    context.update(work=replace(work, activity="fitting"))
    context.emit(effects.Fit(work.assignment, context.state.boot, work.bytes_down))


def _train(context: StepContext, work: Work) -> None:
    activity: Activity = "evaluating" if work.assignment.mode in MEASURES else "training"
    if work.spec:
        context.update(work=replace(work, activity=activity))
        context.emit(effects.Train(work.assignment, work.spec, context.state.boot, work.bytes_down))


def _give_up(context: StepContext, assignment: Assignment, reason: str) -> None:
    """Report the failure and do not work on the assignment again."""
    context.update(why=reason)
    if assignment.version:  # the id of a refit is never used again
        context.give_up(assignment.id)
    _report_failure(context, assignment, reason)


def _report_failure(context: StepContext, assignment: Assignment, reason: str) -> None:
    state, kind = context.state, KINDS[assignment.mode]
    report = Report(
        assignment.id, kind, state.boot, state.capability.samples, release=assignment.release, error=reason
    )
    parcel = parcel_for(assignment, report, state.limits)
    _add_report(context, parcel)
    context.emit(effects.Keep(parcel))


def _add_report(context: StepContext, parcel: Parcel) -> None:
    """Put a report into the outbox, in place of those on refits that it replaces."""
    if parcel.report.kind == "head":
        for id in outbox.superseded(context.state.outbox, parcel.report):
            context.update(outbox=outbox.remove(context.state.outbox, id))
            context.emit(effects.Forget(id))
    context.update(outbox=outbox.put(context.state.outbox, parcel, context.now_s))


_BEGIN: dict[Mode, Callable[[StepContext, Assignment], None]] = {
    "serve": _begin_serve,
    "train": _begin_training,
    "evaluate": _begin_training,
    "personalise": _begin_training,
    "compare": _begin_training,
    "rest": _begin_rest,
}
