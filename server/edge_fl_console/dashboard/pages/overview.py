"""The overview: what needs attention, what personalisation gains, what changed last."""

from collections.abc import Iterator
from functools import partial
from itertools import groupby

from msgspec import Struct
from nicegui import ui

from edge_fl import metrics
from edge_fl.console.formatting import NOTHING, clock, escape, mean, number, share
from edge_fl.console.units import counted
from edge_fl_console.dashboard.live import Address, PageBoard
from edge_fl_console.dashboard.pages import fleet as fleets
from edge_fl_console.dashboard.pages import log
from edge_fl_console.dashboard.parts import empty, facts, gain, heading, meaning, run_link, word
from edge_fl_console.dashboard.queries import overview
from edge_fl_console.dashboard.queries.overview import FleetGain, FullDevices, Overview
from edge_fl_console.dashboard.reasons import alerted
from edge_fl_server.registry.tables import AlertRecord

BASELINES = {
    metrics.LOCAL_ONLY: "training on the device's own data alone",
    metrics.GLOBAL_TEST: "the shared model",
    metrics.PERSONAL_BEFORE: "the same models before the final personalisation",
}
GROUPS = {
    "quarantined": ("bad", "in quarantine, whose reports do not count", "/fleet?only=quarantined"),
    "alert": ("warn", "in alert", "/fleet?status=alert"),
    "lost": ("bad", "lost: power, network or memory", "/fleet?status=lost"),
    "outlier": (
        "warn",
        "with an update that differs strongly from the others'",
        "/fleet?sort=outlier_score&down=1",
    ),
    "drift": ("warn", "with images that have changed since the head was fitted", "/fleet?sort=drift&down=1"),
}
"""Group of devices that need attention -> its colour, what is wrong, and the list of them."""
OTHERWISE_SHOWN = frozenset({"silent", "drift", "quarantine", "rollout"})
"""Rules of alerts whose conditions have items of their own."""


class Item(Struct, frozen=True):
    """Something that needs attention: its colour, a sentence, the page about it, and a further line as markup."""

    tone: str
    text: str
    link: str
    detail: str = ""


def items(page: Overview, server_up: str = "edge-fl server up", *, elsewhere: bool = False) -> Iterator[Item]:
    """Everything that needs attention, the most urgent first; `elsewhere`: the files of its releases are not on this machine."""
    if not page.server.online:
        what = (
            f"No server is online since {clock(page.server.since)[:16]} UTC"
            if page.server.since
            else "No server seen yet"
        )
        detail = f"Devices keep their reports, and nothing is rolled out. Start one: <code>{escape(server_up)}</code>"
        if elsewhere and page.served:
            detail += (
                ", on the machine with the releases; a demo that has ended has none and cannot be continued"
            )
        waiting = page.rollout or (page.run and page.run.state == "running")
        yield Item("bad" if waiting else "warn", what, "/log", detail)
    if page.run and page.run.state == "failed":
        yield Item("bad", f"Run {page.run.run} failed", f"/run/{page.run.run}", escape(page.run.reason))
    if (rollout := page.rollout) and "paused" in (rollout.state, rollout.desired):
        text = f"The roll-out of release {rollout.release} is paused"
        yield Item("warn", text, "/releases", escape(rollout.reason))
    if (rollout := page.agents) and rollout.state in ("paused", "aborted"):
        text = f"The roll-out of agent release {rollout.release} is {rollout.state}"
        yield Item("warn", text, "/releases", escape(rollout.reason))
    for group, (tone, what, link) in GROUPS.items():
        if count := page.health[group]:
            reasons = (f"{many:,} × {escape(alerted(why))}" for why, many in page.whys.items() if why)
            detail = "; ".join(reasons) if group == "alert" else ""
            yield Item(tone, f"{counted(count, 'device')} {what}", link, detail)
    if failed := page.heads.failed:
        text = f"{counted(failed, 'device')} could not fit a head on release {page.served}"
        yield Item("bad", text, "/fleet?only=attention")
    if (change := page.change).found and change.found.high < 0 and not change.rolled_back:
        text = f"Release {page.served} is worse than release {change.other}"
        yield Item("warn", text, "/releases", f"{gain(change.found)} on the same devices, beyond chance")
    raised = sorted(page.raised, key=lambda alert: alert.rule)
    for rule, same in groupby(raised, lambda alert: alert.rule):
        if rule not in OTHERWISE_SHOWN:
            yield _alert(rule, list(same))


def _alert(rule: str, found: list[AlertRecord]) -> Item:
    """The active alerts of one rule."""
    subject = found[0].subject
    if subject.startswith("release "):
        link = "/releases"
    elif subject in ("server", "fleet"):
        link = "/log"
    else:
        link = f"/device/{subject}" if len(found) == 1 else "/fleet"
    of = subject if len(found) == 1 else f"{subject} and {len(found) - 1:,} more"
    return Item("warn", f"Alert {rule}: {of}", link, escape(found[0].text))


def health(page: Overview, server_up: str = "edge-fl server up", *, elsewhere: bool = False) -> str:
    """The list of items that need attention, as links."""
    found = list(items(page, server_up, elsewhere=elsewhere))
    if not found:
        text = f"Nothing needs attention: {counted(page.total, 'device')}, and a server is online."
        return f'<h2>Health</h2><div class="sheet padded"><p class="word good">{text}</p></div>'
    rows = "".join(
        f'<li><a class="word {item.tone}" href="{escape(item.link)}">{escape(item.text)}</a>'
        + (f'<div class="quiet">{item.detail}</div>' if item.detail else "")
        + "</li>"
        for item in found
    )
    return f'<h2>Health</h2><ul class="sheet padded items">{rows}</ul>'


def gained(page: Overview) -> str:
    """What personalisation gains over baselines, each on the same devices with its interval."""
    rows = [_gain("Full devices", one, page.full) for one in page.full.gains] if page.full else []
    if page.full and not rows:
        personal = f'{share(page.full.personal)} % <span class="quiet">(n = {number(page.full.n)})</span>'
        rows.append(
            f"<li><p>Full devices: {personal}, mean accuracy of their personal models.</p>"
            '<p class="quiet">Gain not measured: this method has no shared model to compare them with.</p></li>'
        )
    if page.full and page.full.heads:
        rows.append(_gain("Head-only devices", page.full.heads, page.full))
    local = page.full and (page.full.heads or any(_is_local(one) for one in page.full.gains))
    if not rows:
        rows.append(
            "<li>Not measured yet: it takes devices that measured their personal model and a baseline on the same images.</li>"
        )
    if not local:
        rows.append(
            '<li class="quiet">Local-only baseline: not measured on devices; in a simulation of your data'
            " <code>edge-fl compare</code> measures it.</li>"
        )
    return f'<h2>Personalisation gain</h2><ul class="sheet padded items">{"".join(rows)}</ul>'


def _is_local(one: FleetGain) -> bool:
    return one.baseline == metrics.LOCAL_ONLY


def _gain(who: str, one: FleetGain, full: FullDevices) -> str:
    means = f"{share(one.before)} → {mean(one.after, one.found.n)}"
    baseline = BASELINES[one.baseline] + (" (simulated)" if one.simulated else "")
    return (
        f'<li><p class="big">{gain(one.found)}</p><p>{who}: personal models compared with {baseline},'
        f" same devices: {meaning(one.found)}.</p>"
        f'<p class="quiet">{means}, mean accuracy in %; run {run_link(full.run)}, round {full.round}</p></li>'
    )


def changed(page: Overview) -> str:
    """How the release in service compares with the one before, or with the one that a roll-back left; "" without a release."""
    change, found = page.change, page.change.found
    if not page.served:
        return ""
    back = f"rolled back from release {change.other} to {page.served}" if change.rolled_back else ""
    other = f"release {change.other}" if change.other else "the model served before"
    if found is None:
        text = f"{back[:1].upper()}{back[1:]}. " if back else ""
        rows = f"<li>{text}Not measured yet: it takes devices with an accuracy on release {page.served} and on {other}.</li>"
    else:
        means = f"{share(change.before)} → {mean(change.after, found.n)}"
        how = f"; {back}, last accuracy on each" if back else ""
        rows = (
            f'<li><p class="big">{gain(found)}</p><p>Head-only devices: release {page.served} compared with {other},'
            f' same devices: {meaning(found)}.</p><p class="quiet">{means}, mean accuracy in %{how}</p></li>'
        )
    return f'<h2>Change by the release in service</h2><ul class="sheet padded items">{rows}</ul>'


def summary(page: Overview, fleet: str) -> str:
    """The main figures, or the empty state."""
    if not page.total and page.run is None:
        others = f" This registry has devices of: {', '.join(page.fleets)} (--fleet)." if page.fleets else ""
        text = f"Fleet {fleet} has no device and no run.{others} Start with one of these:"
        return empty("Nothing here yet", text, fleets.COMMANDS)
    states = ", ".join(f"{count:,} {escape(status)}" for status, count in page.by_status.items())
    attention = sum(page.health.values())
    return facts(
        {
            "Devices": f'<a href="/fleet">{number(page.total)}</a><div class="quiet">{states}</div>',
            "Need attention": f'<a href="/fleet?only=attention">{number(attention)}</a>',
            "Release in service": _release(page),
            "Newest run": _run(page),
        },
        big=True,
    )


def _release(page: Overview) -> str:
    if not page.served:
        return NOTHING
    runs = f"{page.running:,} of {page.head_devices:,} head-only devices run it"
    return f'<a href="/releases">{page.served}</a><div class="quiet">{runs}</div>'


def _run(page: Overview) -> str:
    if page.run is None:
        return NOTHING
    reached = f"round {page.reached.round if page.reached else 0} of {page.run.rounds}"
    return f'{run_link(page.run.run)}<div class="quiet">{word(page.run.state)}, {reached}</div>'


def build(board: PageBoard, _: Address) -> None:
    """Add the page's parts."""
    context = board.context
    find = partial(overview.page, context.db, context.fleet)
    server_up = context.command("server up")
    elsewhere = context.kept() is None
    ui.html(heading("Overview"), sanitize=False)
    board.html(find, lambda page: summary(page, context.fleet))
    with ui.element("div").classes("halves"):
        board.html(
            find, lambda page: health(page, server_up, elsewhere=elsewhere) if page.total or page.run else ""
        )
        board.html(find, lambda page: gained(page) + changed(page) if page.total or page.run else "")
    board.table(find, log.COLUMNS, lambda page: page.events, "Recent changes")
