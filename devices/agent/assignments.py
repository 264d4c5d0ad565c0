"""From a want to its report: what an agent does, one thing at a time, about the latest thing that the server wants of it.

"serve" reads the signed metadata, fetches what is missing, installs and fits; it is tried again until it works or a newer release
is wanted. "train", "evaluate" and "personalise" fetch the broadcast and run the method; they end at their deadline. Either way the
server gets one report, or one that names the failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from devices.agent import effects, events, outbox
from devices.agent.outbox import Parcel
from devices.agent.state import AgentLimits, Phase, Work
from devices.agent.step_context import StepContext
from edge_fl.capability import Tier
from edge_fl.wire.messages import Activity, Assignment, Mode, Report

KINDS: dict[Mode, Literal["update", "personal", "evaluation", "head"]] = {
    "serve": "head",
    "train": "update",
    "evaluate": "evaluation",
    "personalise": "personal",
}
"""The kind of report that answers a want."""


def accept(context: StepContext, assignment: Assignment | None) -> None:
    """Takes a want from the server unless it is older than one already taken; the same again means that its report got lost."""
    state = context.state
    if assignment is None:
        context.set(assignment=None)
    elif assignment.version < state.memory.version:
        pass
    elif state.assignment and (assignment.id, assignment.version) == (
        state.assignment.id,
        state.assignment.version,
    ):
        context.set(
            outbox=tuple(
                replace(w, next_s=context.now_s) if w.id == assignment.id else w for w in state.outbox
            )
        )
    else:
        if assignment.version > state.memory.version and assignment.id in state.memory.given_up:
            context.reconsider(assignment.id)
        context.remember(version=assignment.version)
        if state.assignment and state.assignment.why == state.why:
            context.set(why="")
        due_s = math.inf if assignment.mode in ("serve", "rest") else context.now_s + assignment.deadline_s
        context.set(assignment=assignment, assignment_due_s=due_s, tries=0, not_before_s=-math.inf)
        if state.work and state.work.assignment.id != assignment.id and state.work.activity != "fitting":
            drop(context)


def begin(context: StepContext) -> None:
    """Starts what is wanted, if nothing is under way and nothing speaks against it."""
    state = context.state
    if state.phase is not Phase.UP or state.work or state.over_budget or state.why == "unsupported_proto":
        return
    if state.pending:
        if context.now_s >= state.not_before_s:
            context.set(not_before_s=-math.inf)
            _BEGIN[state.pending.mode](context, state.pending)
    elif state.refit and state.tier is Tier.HEAD:
        _begin_refit(context)


def _begin_serve(context: StepContext, assignment: Assignment) -> None:
    if context.state.tier is Tier.HEAD:  # a full device has no head to serve
        context.reconsider(assignment.id)
        context.set(work=Work(assignment, "fetching"), refit=False)
        context.do(effects.Refresh(assignment.release))


def _begin_training(context: StepContext, assignment: Assignment) -> None:
    state, round = context.state, context.state.rounds.get(assignment.run_id)
    if state.tier is not Tier.FULL:
        _give_up(context, assignment, "unsupported_tier")
    elif state.server_online and round and round.round <= assignment.round:
        work = Work(assignment, "fetching", state.assignment_due_s, round.spec, fetching=assignment.down)
        context.set(work=work)
        if assignment.down:
            context.do(effects.Fetch(assignment.down, keep=False))
        else:
            _train(context, work)


def _begin_nothing(context: StepContext, assignment: Assignment) -> None:
    """Rest is what is wanted; if the server says why, the device says so too."""
    if assignment.why:
        context.set(why=assignment.why)


def _begin_refit(context: StepContext) -> None:
    """The device's data changed: a release that could not be fitted gets another chance, one that serves a new head."""
    state = context.state
    context.set(refit=False)
    if state.assignment and state.assignment.mode == "serve" and state.assignment.release != state.release:
        context.reconsider(state.assignment.id)
        context.set(tries=0)
        begin(context)
    elif state.release:
        assignment = Assignment(0, "serve", id=f"refit-{state.boot}-{state.sequence}", release=state.release)
        context.set(work=Work(assignment, "fitting"))
        context.do(effects.Fit(assignment, state.boot, 0))


def refreshed(context: StepContext, event: events.Refreshed) -> None:
    """The release is authentic: fetch what is missing of it."""
    if work := _at_work(context):
        came = work.bytes_down + event.bytes
        work = replace(work, manifest=event.manifest, to_fetch=event.missing, bytes_down=came)
        _fit(context, work) if event.installed else _fetch_next(context, work)


def fetched(context: StepContext, event: events.Fetched) -> None:
    """A blob is here: the next one, or on with the work."""
    work = _at_work(context)
    if work is None or work.fetching is None or work.fetching.sha256 != event.sha256:
        return
    work = replace(work, fetching=None, bytes_down=work.bytes_down + event.bytes)
    _train(context, work) if work.spec else _fetch_next(context, work)


def installed(context: StepContext, event: events.Installed) -> None:
    """The extractor runs here: fit a head on it."""
    if work := _at_work(context):
        context.log("info", f"release {work.assignment.release} is installed")
        _fit(context, work)


def finished(context: StepContext, event: events.Finished) -> None:
    """The work is done and its results are in the store: report, unless nobody wants it any more."""
    work = context.state.work
    if work is None:
        return
    report = event.report
    context.set(work=None, release=report.release if report.kind == "head" else context.state.release)
    if work.dropped:
        context.do(effects.Forget(report.id))
    else:
        context.set(why="", tries=0)
        context.post(parcel_for(work.assignment, report, context.state.limits))


def failed(context: StepContext, event: events.Failed) -> None:
    """Tries again later, or says that it will not be."""
    state, work = context.state, context.state.work
    if work is None:
        return
    context.set(work=None)
    if work.dropped:
        return
    tries, limits = state.tries + 1, state.limits
    context.set(why=event.reason, tries=tries)
    context.log(
        "warning", f"{work.assignment.mode} for {work.assignment.id} failed, try {tries}: {event.reason}"
    )
    if event.final or (tries >= limits.max_tries and work.assignment.mode != "serve"):
        _give_up(context, work.assignment, event.reason)
    else:
        pause_s = min(limits.retry_s * 2.0 ** (tries - 1), limits.max_retry_s)
        context.set(
            not_before_s=context.now_s
            + pause_s * (0.75 + 0.5 * outbox.jitter(state.boot, work.assignment.id, tries))
        )


def drop(context: StepContext) -> None:
    """Nobody wants the work's result: a fetch ends here; a worker cannot be stopped, what it brings will be thrown away."""
    work = context.state.work
    if work and work.fetching:
        context.do(effects.CancelFetch())
        context.set(work=None)
    elif work:
        context.set(work=replace(work, dropped=True))


def end_overdue(context: StepContext) -> None:
    """Ends what is past its deadline: the work, the want that could not be begun, reports that nobody acknowledged."""
    work, pending = context.state.work, context.state.pending
    if work and not work.dropped and context.now_s >= work.due_s:
        context.set(why="deadline")
        context.give_up(work.assignment.id)
        drop(context)
    if pending and context.now_s >= context.state.assignment_due_s:
        context.set(why="deadline")
        context.give_up(pending.id)
    for waiting in outbox.overdue(context.state.outbox, context.now_s):
        context.set(why="deadline", outbox=outbox.drop(context.state.outbox, waiting.id))
        context.give_up(waiting.id)
        context.do(effects.Forget(waiting.id))


def parcel_for(assignment: Assignment, report: Report, limits: AgentLimits) -> Parcel:
    """The report on `want`, addressed; a head's report is worth sending for long, any other until its round's deadline."""
    return Parcel(
        assignment.run_id,
        assignment.round,
        report,
        limits.head_report_s if assignment.mode == "serve" else assignment.deadline_s,
    )


def _at_work(context: StepContext) -> Work | None:
    """The work under way; None, and free for the next, when nobody wants its result any more."""
    work = context.state.work
    if work and work.dropped:
        context.set(work=None)
        return None
    return work


def _fetch_next(context: StepContext, work: Work) -> None:
    if work.manifest and not work.to_fetch:
        context.set(work=replace(work, activity="installing"))
        context.do(effects.Install(work.manifest))
    elif work.to_fetch:
        context.set(work=replace(work, fetching=work.to_fetch[0], to_fetch=work.to_fetch[1:]))
        context.do(effects.Fetch(work.to_fetch[0], keep=True))


def _fit(context: StepContext, work: Work) -> None:
    context.set(work=replace(work, activity="fitting"))
    context.do(effects.Fit(work.assignment, context.state.boot, work.bytes_down))


def _train(context: StepContext, work: Work) -> None:
    activity: Activity = "evaluating" if work.assignment.mode == "evaluate" else "training"
    if work.spec:
        context.set(work=replace(work, activity=activity))
        context.do(effects.Train(work.assignment, work.spec, context.state.boot, work.bytes_down))


def _give_up(context: StepContext, assignment: Assignment, reason: str) -> None:
    samples = context.state.capability.samples
    report = Report(
        assignment.id,
        KINDS[assignment.mode],
        context.state.boot,
        samples,
        release=assignment.release,
        error=reason,
    )
    parcel = parcel_for(assignment, report, context.state.limits)
    context.set(why=reason)
    context.give_up(assignment.id)
    context.post(parcel)
    context.do(effects.Keep(parcel))


_BEGIN: dict[Mode, Callable[[StepContext, Assignment], None]] = {
    "serve": _begin_serve,
    "train": _begin_training,
    "evaluate": _begin_training,
    "personalise": _begin_training,
    "rest": _begin_nothing,
}
