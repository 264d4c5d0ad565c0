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

from devices.machine import effects, events, outbox
from devices.machine.outbox import Parcel
from devices.machine.state import Limits, Phase, Work
from devices.machine.turn import Turn
from edge_fl.capability import Tier
from edge_fl.wire.messages import Activity, Mode, Report, Want

KINDS: dict[Mode, Literal["update", "personal", "evaluation", "head"]] = {
    "serve": "head",
    "train": "update",
    "evaluate": "evaluation",
    "personalise": "personal",
}
"""The kind of report that answers a want."""


def accept(turn: Turn, want: Want | None) -> None:
    """Takes a want from the server unless it is older than one already taken; the same again means that its report got lost."""
    state = turn.state
    if want is None:
        turn.set(want=None)
    elif want.version < state.memory.version:
        pass
    elif state.want and (want.id, want.version) == (state.want.id, state.want.version):
        turn.set(outbox=tuple(replace(w, next_s=turn.now_s) if w.id == want.id else w for w in state.outbox))
    else:
        if want.version > state.memory.version and want.id in state.memory.given_up:
            turn.reconsider(want.id)
        turn.remember(version=want.version)
        if state.want and state.want.why == state.why:
            turn.set(why="")
        due_s = math.inf if want.mode in ("serve", "rest") else turn.now_s + want.deadline_s
        turn.set(want=want, want_due_s=due_s, tries=0, not_before_s=-math.inf)
        if state.work and state.work.want.id != want.id and state.work.activity != "fitting":
            drop(turn)


def begin(turn: Turn) -> None:
    """Starts what is wanted, if nothing is under way and nothing speaks against it."""
    state = turn.state
    if state.phase is not Phase.UP or state.work or state.rationed or state.why == "unsupported_proto":
        return
    if state.pending:
        if turn.now_s >= state.not_before_s:
            turn.set(not_before_s=-math.inf)
            _BEGIN[state.pending.mode](turn, state.pending)
    elif state.refit and state.tier is Tier.HEAD:
        _begin_refit(turn)


def _begin_serve(turn: Turn, want: Want) -> None:
    if turn.state.tier is Tier.HEAD:  # a full device has no head to serve
        turn.reconsider(want.id)
        turn.set(work=Work(want, "fetching"), refit=False)
        turn.do(effects.Refresh(want.release))


def _begin_training(turn: Turn, want: Want) -> None:
    state, round = turn.state, turn.state.rounds.get(want.task)
    if state.tier is not Tier.FULL:
        _give_up(turn, want, "unsupported_tier")
    elif state.server_online and round and round.round <= want.round:
        work = Work(want, "fetching", state.want_due_s, round.spec, fetching=want.down)
        turn.set(work=work)
        if want.down:
            turn.do(effects.Fetch(want.down, keep=False))
        else:
            _train(turn, work)


def _begin_nothing(turn: Turn, want: Want) -> None:
    """Rest is what is wanted; if the server says why, the device says so too."""
    if want.why:
        turn.set(why=want.why)


def _begin_refit(turn: Turn) -> None:
    """The device's data changed: a release that could not be fitted gets another chance, one that serves a new head."""
    state = turn.state
    turn.set(refit=False)
    if state.want and state.want.mode == "serve" and state.want.release != state.release:
        turn.reconsider(state.want.id)
        turn.set(tries=0)
        begin(turn)
    elif state.release:
        want = Want(0, "serve", id=f"refit-{state.boot}-{state.sequence}", release=state.release)
        turn.set(work=Work(want, "fitting"))
        turn.do(effects.Fit(want, state.boot, 0))


def refreshed(turn: Turn, event: events.Refreshed) -> None:
    """The release is authentic: fetch what is missing of it."""
    if work := _at_work(turn):
        came = work.bytes_down + event.bytes
        work = replace(work, manifest=event.manifest, to_fetch=event.missing, bytes_down=came)
        _fit(turn, work) if event.installed else _fetch_next(turn, work)


def fetched(turn: Turn, event: events.Fetched) -> None:
    """A blob is here: the next one, or on with the work."""
    work = _at_work(turn)
    if work is None or work.fetching is None or work.fetching.sha256 != event.sha256:
        return
    work = replace(work, fetching=None, bytes_down=work.bytes_down + event.bytes)
    _train(turn, work) if work.spec else _fetch_next(turn, work)


def installed(turn: Turn, event: events.Installed) -> None:
    """The extractor runs here: fit a head on it."""
    if work := _at_work(turn):
        turn.log("info", f"release {work.want.release} is installed")
        _fit(turn, work)


def finished(turn: Turn, event: events.Finished) -> None:
    """The work is done and its results are in the store: report, unless nobody wants it any more."""
    work = turn.state.work
    if work is None:
        return
    report = event.report
    turn.set(work=None, release=report.release if report.kind == "head" else turn.state.release)
    if work.dropped:
        turn.do(effects.Forget(report.id))
    else:
        turn.set(why="", tries=0)
        turn.post(parcel_for(work.want, report, turn.state.limits))


def failed(turn: Turn, event: events.Failed) -> None:
    """Tries again later, or says that it will not be."""
    state, work = turn.state, turn.state.work
    if work is None:
        return
    turn.set(work=None)
    if work.dropped:
        return
    tries, limits = state.tries + 1, state.limits
    turn.set(why=event.reason, tries=tries)
    turn.log("warning", f"{work.want.mode} for {work.want.id} failed, try {tries}: {event.reason}")
    if event.final or (tries >= limits.max_tries and work.want.mode != "serve"):
        _give_up(turn, work.want, event.reason)
    else:
        pause_s = min(limits.retry_s * 2.0 ** (tries - 1), limits.max_retry_s)
        turn.set(
            not_before_s=turn.now_s + pause_s * (0.75 + 0.5 * outbox.jitter(state.boot, work.want.id, tries))
        )


def drop(turn: Turn) -> None:
    """Nobody wants the work's result: a fetch ends here; a worker cannot be stopped, what it brings will be thrown away."""
    work = turn.state.work
    if work and work.fetching:
        turn.do(effects.Abandon())
        turn.set(work=None)
    elif work:
        turn.set(work=replace(work, dropped=True))


def end_overdue(turn: Turn) -> None:
    """Ends what is past its deadline: the work, the want that could not be begun, reports that nobody acknowledged."""
    work, pending = turn.state.work, turn.state.pending
    if work and not work.dropped and turn.now_s >= work.due_s:
        turn.set(why="deadline")
        turn.give_up(work.want.id)
        drop(turn)
    if pending and turn.now_s >= turn.state.want_due_s:
        turn.set(why="deadline")
        turn.give_up(pending.id)
    for waiting in outbox.overdue(turn.state.outbox, turn.now_s):
        turn.set(why="deadline", outbox=outbox.drop(turn.state.outbox, waiting.id))
        turn.give_up(waiting.id)
        turn.do(effects.Forget(waiting.id))


def parcel_for(want: Want, report: Report, limits: Limits) -> Parcel:
    """The report on `want`, addressed; a head's report is worth sending for long, any other until its round's deadline."""
    return Parcel(
        want.task, want.round, report, limits.head_report_s if want.mode == "serve" else want.deadline_s
    )


def _at_work(turn: Turn) -> Work | None:
    """The work under way; None, and free for the next, when nobody wants its result any more."""
    work = turn.state.work
    if work and work.dropped:
        turn.set(work=None)
        return None
    return work


def _fetch_next(turn: Turn, work: Work) -> None:
    if work.manifest and not work.to_fetch:
        turn.set(work=replace(work, activity="installing"))
        turn.do(effects.Install(work.manifest))
    elif work.to_fetch:
        turn.set(work=replace(work, fetching=work.to_fetch[0], to_fetch=work.to_fetch[1:]))
        turn.do(effects.Fetch(work.to_fetch[0], keep=True))


def _fit(turn: Turn, work: Work) -> None:
    turn.set(work=replace(work, activity="fitting"))
    turn.do(effects.Fit(work.want, turn.state.boot, work.bytes_down))


def _train(turn: Turn, work: Work) -> None:
    activity: Activity = "evaluating" if work.want.mode == "evaluate" else "training"
    if work.spec:
        turn.set(work=replace(work, activity=activity))
        turn.do(effects.Train(work.want, work.spec, turn.state.boot, work.bytes_down))


def _give_up(turn: Turn, want: Want, reason: str) -> None:
    samples = turn.state.capability.samples
    report = Report(want.id, KINDS[want.mode], turn.state.boot, samples, release=want.release, error=reason)
    parcel = parcel_for(want, report, turn.state.limits)
    turn.set(why=reason)
    turn.give_up(want.id)
    turn.post(parcel)
    turn.do(effects.Keep(parcel))


_BEGIN: dict[Mode, Callable[[Turn, Want], None]] = {
    "serve": _begin_serve,
    "train": _begin_training,
    "evaluate": _begin_training,
    "personalise": _begin_training,
    "rest": _begin_nothing,
}
