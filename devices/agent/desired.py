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
from devices.agent.state import Limits, Phase, Work
from devices.agent.transition import Transition
from edge_fl.capability import Tier
from edge_fl.wire.messages import Activity, Assignment, Mode, Report

KINDS: dict[Mode, Literal["update", "personal", "evaluation", "head"]] = {
    "serve": "head",
    "train": "update",
    "evaluate": "evaluation",
    "personalise": "personal",
}
"""The kind of report that answers a want."""


def accept(transition: Transition, assignment: Assignment | None) -> None:
    """Takes a want from the server unless it is older than one already taken; the same again means that its report got lost."""
    state = transition.state
    if assignment is None:
        transition.set(assignment=None)
    elif assignment.version < state.memory.version:
        pass
    elif state.assignment and (assignment.id, assignment.version) == (
        state.assignment.id,
        state.assignment.version,
    ):
        transition.set(
            outbox=tuple(
                replace(w, next_s=transition.now_s) if w.id == assignment.id else w for w in state.outbox
            )
        )
    else:
        if assignment.version > state.memory.version and assignment.id in state.memory.given_up:
            transition.reconsider(assignment.id)
        transition.remember(version=assignment.version)
        if state.assignment and state.assignment.why == state.why:
            transition.set(why="")
        due_s = math.inf if assignment.mode in ("serve", "rest") else transition.now_s + assignment.deadline_s
        transition.set(assignment=assignment, assignment_due_s=due_s, tries=0, not_before_s=-math.inf)
        if state.work and state.work.assignment.id != assignment.id and state.work.activity != "fitting":
            drop(transition)


def begin(transition: Transition) -> None:
    """Starts what is wanted, if nothing is under way and nothing speaks against it."""
    state = transition.state
    if state.phase is not Phase.UP or state.work or state.rationed or state.why == "unsupported_proto":
        return
    if state.pending:
        if transition.now_s >= state.not_before_s:
            transition.set(not_before_s=-math.inf)
            _BEGIN[state.pending.mode](transition, state.pending)
    elif state.refit and state.tier is Tier.HEAD:
        _begin_refit(transition)


def _begin_serve(transition: Transition, assignment: Assignment) -> None:
    if transition.state.tier is Tier.HEAD:  # a full device has no head to serve
        transition.reconsider(assignment.id)
        transition.set(work=Work(assignment, "fetching"), refit=False)
        transition.do(effects.Refresh(assignment.release))


def _begin_training(transition: Transition, assignment: Assignment) -> None:
    state, round = transition.state, transition.state.rounds.get(assignment.run_id)
    if state.tier is not Tier.FULL:
        _give_up(transition, assignment, "unsupported_tier")
    elif state.server_online and round and round.round <= assignment.round:
        work = Work(assignment, "fetching", state.assignment_due_s, round.spec, fetching=assignment.down)
        transition.set(work=work)
        if assignment.down:
            transition.do(effects.Fetch(assignment.down, keep=False))
        else:
            _train(transition, work)


def _begin_nothing(transition: Transition, assignment: Assignment) -> None:
    """Rest is what is wanted; if the server says why, the device says so too."""
    if assignment.why:
        transition.set(why=assignment.why)


def _begin_refit(transition: Transition) -> None:
    """The device's data changed: a release that could not be fitted gets another chance, one that serves a new head."""
    state = transition.state
    transition.set(refit=False)
    if state.assignment and state.assignment.mode == "serve" and state.assignment.release != state.release:
        transition.reconsider(state.assignment.id)
        transition.set(tries=0)
        begin(transition)
    elif state.release:
        assignment = Assignment(0, "serve", id=f"refit-{state.boot}-{state.sequence}", release=state.release)
        transition.set(work=Work(assignment, "fitting"))
        transition.do(effects.Fit(assignment, state.boot, 0))


def refreshed(transition: Transition, event: events.Refreshed) -> None:
    """The release is authentic: fetch what is missing of it."""
    if work := _at_work(transition):
        came = work.bytes_down + event.bytes
        work = replace(work, manifest=event.manifest, to_fetch=event.missing, bytes_down=came)
        _fit(transition, work) if event.installed else _fetch_next(transition, work)


def fetched(transition: Transition, event: events.Fetched) -> None:
    """A blob is here: the next one, or on with the work."""
    work = _at_work(transition)
    if work is None or work.fetching is None or work.fetching.sha256 != event.sha256:
        return
    work = replace(work, fetching=None, bytes_down=work.bytes_down + event.bytes)
    _train(transition, work) if work.spec else _fetch_next(transition, work)


def installed(transition: Transition, event: events.Installed) -> None:
    """The extractor runs here: fit a head on it."""
    if work := _at_work(transition):
        transition.log("info", f"release {work.assignment.release} is installed")
        _fit(transition, work)


def finished(transition: Transition, event: events.Finished) -> None:
    """The work is done and its results are in the store: report, unless nobody wants it any more."""
    work = transition.state.work
    if work is None:
        return
    report = event.report
    transition.set(work=None, release=report.release if report.kind == "head" else transition.state.release)
    if work.dropped:
        transition.do(effects.Forget(report.id))
    else:
        transition.set(why="", tries=0)
        transition.post(parcel_for(work.assignment, report, transition.state.limits))


def failed(transition: Transition, event: events.Failed) -> None:
    """Tries again later, or says that it will not be."""
    state, work = transition.state, transition.state.work
    if work is None:
        return
    transition.set(work=None)
    if work.dropped:
        return
    tries, limits = state.tries + 1, state.limits
    transition.set(why=event.reason, tries=tries)
    transition.log(
        "warning", f"{work.assignment.mode} for {work.assignment.id} failed, try {tries}: {event.reason}"
    )
    if event.final or (tries >= limits.max_tries and work.assignment.mode != "serve"):
        _give_up(transition, work.assignment, event.reason)
    else:
        pause_s = min(limits.retry_s * 2.0 ** (tries - 1), limits.max_retry_s)
        transition.set(
            not_before_s=transition.now_s
            + pause_s * (0.75 + 0.5 * outbox.jitter(state.boot, work.assignment.id, tries))
        )


def drop(transition: Transition) -> None:
    """Nobody wants the work's result: a fetch ends here; a worker cannot be stopped, what it brings will be thrown away."""
    work = transition.state.work
    if work and work.fetching:
        transition.do(effects.Abandon())
        transition.set(work=None)
    elif work:
        transition.set(work=replace(work, dropped=True))


def end_overdue(transition: Transition) -> None:
    """Ends what is past its deadline: the work, the want that could not be begun, reports that nobody acknowledged."""
    work, pending = transition.state.work, transition.state.pending
    if work and not work.dropped and transition.now_s >= work.due_s:
        transition.set(why="deadline")
        transition.give_up(work.assignment.id)
        drop(transition)
    if pending and transition.now_s >= transition.state.assignment_due_s:
        transition.set(why="deadline")
        transition.give_up(pending.id)
    for waiting in outbox.overdue(transition.state.outbox, transition.now_s):
        transition.set(why="deadline", outbox=outbox.drop(transition.state.outbox, waiting.id))
        transition.give_up(waiting.id)
        transition.do(effects.Forget(waiting.id))


def parcel_for(assignment: Assignment, report: Report, limits: Limits) -> Parcel:
    """The report on `want`, addressed; a head's report is worth sending for long, any other until its round's deadline."""
    return Parcel(
        assignment.run_id,
        assignment.round,
        report,
        limits.head_report_s if assignment.mode == "serve" else assignment.deadline_s,
    )


def _at_work(transition: Transition) -> Work | None:
    """The work under way; None, and free for the next, when nobody wants its result any more."""
    work = transition.state.work
    if work and work.dropped:
        transition.set(work=None)
        return None
    return work


def _fetch_next(transition: Transition, work: Work) -> None:
    if work.manifest and not work.to_fetch:
        transition.set(work=replace(work, activity="installing"))
        transition.do(effects.Install(work.manifest))
    elif work.to_fetch:
        transition.set(work=replace(work, fetching=work.to_fetch[0], to_fetch=work.to_fetch[1:]))
        transition.do(effects.Fetch(work.to_fetch[0], keep=True))


def _fit(transition: Transition, work: Work) -> None:
    transition.set(work=replace(work, activity="fitting"))
    transition.do(effects.Fit(work.assignment, transition.state.boot, work.bytes_down))


def _train(transition: Transition, work: Work) -> None:
    activity: Activity = "evaluating" if work.assignment.mode == "evaluate" else "training"
    if work.spec:
        transition.set(work=replace(work, activity=activity))
        transition.do(effects.Train(work.assignment, work.spec, transition.state.boot, work.bytes_down))


def _give_up(transition: Transition, assignment: Assignment, reason: str) -> None:
    samples = transition.state.capability.samples
    report = Report(
        assignment.id,
        KINDS[assignment.mode],
        transition.state.boot,
        samples,
        release=assignment.release,
        error=reason,
    )
    parcel = parcel_for(assignment, report, transition.state.limits)
    transition.set(why=reason)
    transition.give_up(assignment.id)
    transition.post(parcel)
    transition.do(effects.Keep(parcel))


_BEGIN: dict[Mode, Callable[[Transition, Assignment], None]] = {
    "serve": _begin_serve,
    "train": _begin_training,
    "evaluate": _begin_training,
    "personalise": _begin_training,
    "rest": _begin_nothing,
}
