"""Releases: what runs where, the roll-out under way with its stages, and the buttons that steer it."""

from __future__ import annotations

from server.dashboard.pages.parts import empty, facts, table, word
from server.dashboard.queries.releases import Answers, ReleasesPage
from server.registry.records import RolloutRecord
from server.report.formatting import NOTHING, clock, escape, number, share, size

BUTTONS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "running": (("pause", "Pause", ""), ("abort", "Abort", "danger"), ("rollback", "Roll back", "danger")),
    "paused": (
        ("resume", "Go on", "primary"),
        ("abort", "Abort", "danger"),
        ("rollback", "Roll back", "danger"),
    ),
}
"""Action, its button, its look: by the state of a roll-out."""


def current(page: ReleasesPage) -> str:
    """The roll-out under way, or that there is none."""
    record = page.current
    if record is None:
        if not page.releases:
            return ""
        last = page.rollouts[0] if page.rollouts else None
        said = (
            f"The last roll-out, of release {last.release}, ended {word(last.state)}"
            if last
            else "There was none yet."
        )
        why = f' <span class="quiet">{escape(last.reason)}</span>' if last and last.reason else ""
        return f'<h2>No roll-out is under way</h2><p class="quiet">{said}{why}</p>'
    shares = [float(share) for share in record.plan.get("stages", [1.0])]
    heard = page.answers.get(record.release, Answers())
    steps = "".join(
        f'<i class="{_step(place, record)}" style="flex:{part:.4f}"></i>'
        for place, part in enumerate(_widths(shares))
    )
    waits = record.desired != record.state and record.desired != "running"
    note = f'<span class="text-warn">asked to be {record.desired.replace("_", " ")}</span>' if waits else ""
    buttons = "".join(
        f'<button class="{look}" data-key="{action}" data-act="{action}:{record.number}">{label}</button>'
        for action, label, look in ([] if waits else BUTTONS.get(record.state, ()))
    )
    upto = shares[min(record.stage, len(shares) - 1)]
    stage = f"stage {min(record.stage + 1, len(shares))} of {len(shares)}, up to {upto:.0%} of the fleet"
    shown = facts(
        {
            "Release": number(record.release),
            "Instead of": number(record.previous) if record.previous else NOTHING,
            "Running it": f"{page.running.get(record.release, 0):,} of {page.heads:,}",
            "Could not": number(heard.failed),
            "Before, %": share(heard.before),
            "After, %": share(heard.after),
        },
        big=True,
    )
    reason = f'<p class="quiet">{escape(record.reason)}</p>' if record.reason else ""
    return (
        f'<div class="sheet padded" id="rollout"><div class="head"><h2 style="margin:0">Roll-out of release {record.release}</h2>'
        f'{word(record.state)}{note}<span class="quiet">{stage}</span><span class="actions">{buttons}</span></div>'
        f'{reason}<div class="steps" aria-hidden="true">{steps}</div>{shown}</div>'
    )


def releases(page: ReleasesPage) -> str:
    """Every release and how many devices run it."""
    if not page.releases:
        return empty(
            "Nothing has been released",
            "The first extractor is released after round 1.",
            "edge-fl server run demo",
        )
    everybody = max(sum(page.running.values()), 1)
    numbers = ("Round", "Size", "Running it", "Could not", "Before %", "After %")
    names = ("Release", "Method", "Run", *numbers, "Published, UTC", "")
    rows = []
    for record in page.releases:
        runs, heard = page.running.get(record.release, 0), page.answers.get(record.release, Answers())
        meter = f'<span class="meter"><i style="width:{100 * runs / everybody:.1f}%"></i></span>'
        rows.append(
            (
                number(record.release),
                escape(record.method),
                f'<a href="/run/{escape(record.run)}">{escape(record.run)}</a>',
                number(record.round),
                size(record.bytes),
                f"{number(runs)}{meter}",
                number(heard.failed) if heard.heard else NOTHING,
                share(heard.before),
                share(heard.after),
                clock(record.published_at),
                _start(page, record.release),
            )
        )
    return "<h2>Releases</h2>" + table(names, rows, ("Release", *numbers))


def history(page: ReleasesPage) -> str:
    """The roll-outs so far."""
    if not page.rollouts:
        return ""
    rows = (
        (
            number(record.number),
            number(record.release),
            number(record.previous) if record.previous else NOTHING,
            word(record.state),
            f"{record.stage + 1} of {len(record.plan.get('shares', [1.0]))}",
            clock(record.created_at),
            clock(record.changed_at),
            escape(record.reason),
        )
        for record in page.rollouts
    )
    numbers = ("No.", "Release", "Instead of")
    names = (*numbers, "State", "Stage", "Began, UTC", "Changed, UTC", "Reason")
    return "<h2>Roll-outs</h2>" + table(names, rows, numbers)


def _start(page: ReleasesPage, release: int) -> str:
    """The button that starts a roll-out, where one may be started."""
    if page.current or (page.kept is not None and release not in page.kept):
        return ""
    label = "Roll back to this" if release < page.serving else "Roll out"
    return f'<button data-key="start-{release}" data-act="start:{release}">{label}</button>'


def _widths(shares: list[float]) -> list[float]:
    """How long each stage is drawn: by its share, but never so short that it cannot be seen."""
    return [max(here - before, 0.08) for before, here in zip([0.0, *shares], shares, strict=False)]


def _step(place: int, record: RolloutRecord) -> str:
    if place < record.stage or record.state == "completed":
        return "done"
    return ("stopped" if record.state == "paused" else "now") if place == record.stage else ""
