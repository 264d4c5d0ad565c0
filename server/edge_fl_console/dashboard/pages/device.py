"""One device: its description, commands on it, its accuracy over time, its requests, reports and rejections."""

import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any

from msgspec import Struct
from scipy.special import bdtr  # binomial distribution; comes with scikit-learn
from sqlalchemy import func, select

from edge_fl.console.units import (
    NOTHING,
    clock,
    counted,
    cut,
    escape,
    mean,
    number,
    percent,
    positive,
    seconds,
    share,
    since,
    size,
)
from edge_fl.failures import Failure
from edge_fl.files.paths import text
from edge_fl.heads.wording import DeviceWords, MeasuredAccuracy
from edge_fl.metrics import TEST_SAMPLES, by_labels
from edge_fl_console import failure_texts
from edge_fl_console.accuracy import HeadReports, head_reports
from edge_fl_console.dashboard import charts
from edge_fl_console.dashboard.charts import Chart, ChartCurve
from edge_fl_console.dashboard.context import IDENTITIES, PageContext
from edge_fl_console.dashboard.live import Address, PageBoard
from edge_fl_console.dashboard.parts import (
    PageColumn,
    button,
    cut_text,
    empty,
    facts,
    heading,
    outlier,
    tags,
    version,
    word,
)
from edge_fl_server.mqtt.devices import remote_settings
from edge_fl_server.mqtt.devices.remote_settings import SettingRow, shown
from edge_fl_server.registry import Database, registered_tags
from edge_fl_server.registry.registered_devices import desired_settings, of_fleet
from edge_fl_server.registry.rollouts import NO_RUN
from edge_fl_server.registry.tables import (
    DeviceRecord,
    RejectionRecord,
    ReportRecord,
    RequestRecord,
    devices,
    rejections,
    reports,
    requests,
)

NEWEST = 60
MOST_NOTES = 12
"""Notes of a device that its page shows; one that is well has about three."""


class DevicePage(Struct, frozen=True):
    """A device and up to `NEWEST` reports, requests and rejected reports, each the newest first; `fleet` are all reports on its release.

    `median_samples` is that of the fleet's devices with data (0: none). `settings`: those that were set, or are not at their defaults.
    """

    record: DeviceRecord
    reports: tuple[ReportRecord, ...] = ()
    requests: tuple[RequestRecord, ...] = ()
    rejections: tuple[RejectionRecord, ...] = ()
    fleet: HeadReports = HeadReports()
    median_samples: int = 0
    settings: tuple[SettingRow, ...] = ()
    tags: Mapping[str, str] = {}

    @property
    def able(self) -> dict[str, Any]:
        """The capability of the device; empty if it has sent none."""
        return self.record.capability or {}

    @property
    def measured(self) -> ReportRecord | None:
        """The newest report with an accuracy."""
        return next((report for report in self.reports if report.after is not None), None)

    @property
    def fitted(self) -> ReportRecord | None:
        """The newest report on a head; None for a full device."""
        if self.able.get("tier") == "full":
            return None
        return next((report for report in self.reports if report.kind == "head" and not report.error), None)


def read(db: Database, fleet: str, device: str) -> DevicePage | None:
    """A device of the fleet; None if it never connected."""
    records = db.find(_of(devices, fleet, device), DeviceRecord)
    if not records:
        return None
    desired = desired_settings(db, fleet, device=device).get(device, remote_settings.NO_SETTINGS)
    return DevicePage(
        records[0],
        tuple(db.find(_of(reports, fleet, device, "received_at"), ReportRecord)),
        tuple(db.find(_of(requests, fleet, device, "requested_at"), RequestRecord)),
        tuple(db.find(_of(rejections, fleet, device, "number"), RejectionRecord)),
        head_reports(db, fleet).get(records[0].release, HeadReports()),
        _median_samples(db, fleet),
        tuple(remote_settings.rows(desired, records[0].capability)),
        registered_tags.of_devices(db, fleet, devices=[device]).get(device, {}),
    )


def _median_samples(db: Database, fleet: str) -> int:
    """The lower median of the samples of a fleet's devices."""
    samples = devices.c.capability["samples"].as_integer()
    mine = of_fleet(fleet) & (samples > 0)
    with db.reading() as connection:
        count = connection.execute(select(func.count()).select_from(devices).where(mine)).scalar_one()
        middle = select(samples).where(mine).order_by(samples).limit(1).offset(max(count - 1, 0) // 2)
        return int(connection.execute(middle).scalar() or 0)


def _of(table: Any, fleet: str, device: str, order: str = "") -> Any:
    query = select(table).where(table.c.fleet == fleet, table.c.device == device)
    return query.order_by(table.c[order].desc()).limit(NEWEST) if order else query


DESCRIPTION = {
    "machine": "Machine",
    "memory_mb": "Memory, MB",
    "disk_free_mb": "Disk free, MB",
    "python": "Python",
    "onnxruntime": "onnxruntime",
    "max_opset": "Largest opset",
    "protocol": "Protocol",
}
"""Field of a capability -> its heading."""


def run_name(run: str) -> str:
    """The name of a run; a dash for none."""
    return NOTHING if run == NO_RUN else escape(run)


CHANCE = 0.025
"""Least probability of so few correct samples at the fleet's mean that may be chance: the end of an exact 95 % interval."""
CHECK = "On the device, 'edge-fl device doctor' checks its data, and 'edge-fl device predict' shows the class of a file that you know."
FEW_SAMPLES = 0.5  # of the fleet's median
REPORTS = (
    PageColumn("Received, UTC", "received_at", clock),
    PageColumn("Kind", "kind"),
    PageColumn("Run", "run", run_name),
    PageColumn("Round", "round", positive),
    PageColumn("Release", "release", positive),
    PageColumn("Before %", "before", share),
    PageColumn("After %", "after", share),
    PageColumn("Took", "seconds", seconds),
    PageColumn("Down", "bytes_down", size),
    PageColumn("Up", "bytes_up", size),
    PageColumn("Error", "error", lambda text: f'<span class="text-bad">{cut_text(text)}</span>'),
)
REQUESTS = (
    PageColumn("Requested, UTC", "requested_at", clock),
    PageColumn("Mode", "mode"),
    PageColumn("Run", "run", run_name),
    PageColumn("Round", "round", positive),
    PageColumn("State", "state", word),
    PageColumn("Reason", "reason"),
)
SETTINGS = (
    PageColumn("Setting", "setting"),
    PageColumn("Desired", "desired", lambda value: cut_text(shown(value))),
    PageColumn("Actual", "actual", lambda value: cut_text(shown(value))),
    PageColumn("Origin", "origin"),
    PageColumn("State", "state"),
)
REJECTIONS = (
    PageColumn("Received, UTC", "received_at", clock),
    PageColumn("Run", "run", run_name),
    PageColumn("Round", "round", positive),
    PageColumn("Reason", "reason", lambda reason: escape(failure_texts.rejected(reason))),
    PageColumn("Detail", "detail"),
)


def title(page: DevicePage) -> str:
    """The device's name and status, why it needs attention, and the remedy."""
    record = page.record
    blocked = f'<span class="tag bad">{record.blocked}</span>' if record.blocked else ""
    known = Failure.of(record.why)
    alarms = [
        f"{failure_texts.alerted(record.why)}. More: edge-fl device status on the device, docs/failure-words.md"
        if known
        else record.why,
        f"{record.blocked.capitalize()} since {clock(record.blocked_at)} UTC: {failure_texts.quarantined(record.blocked_why)}"
        if record.blocked
        else "",
        failure_texts.LOST if record.status == "lost" and not record.revoked else "",
    ]
    kinds = ("quiet" if known and known.calm else "alarm", "alarm", "alarm")
    shown = "".join(
        f'<p class="{kind}">{escape(alarm)}</p>' for kind, alarm in zip(kinds, alarms, strict=True) if alarm
    )
    buttons = button("admit", record.device, "Admit") if record.blocked == "quarantined" else ""
    buttons += "" if record.revoked else button("revoke", record.device, "Revoke", "danger")
    return (
        heading(
            record.device,
            f'{"" if record.revoked else word(record.status)}{blocked}{tags(page.tags)}<span class="actions">{buttons}</span>',
        )
        + shown
    )


def absent(id: str) -> str:
    """The empty state."""
    return heading(id) + empty("Unknown device", f"No device {id!r} has connected to this fleet yet.")


def summary(page: DevicePage) -> str:
    """The device's main figures."""
    able, newest = page.able, page.measured
    fitted = page.fitted
    full = able.get("tier") == "full"
    shown = newest if full else fitted
    head, found = DeviceWords.of_report(
        shown.head if shown else "",
        shown.samples if shown else 0,
        shown.metrics if shown else None,
        full=full,
    )
    return facts(
        {
            "Accuracy after": _measured(found),
            **({"With more labels": escape(found.forecast.words)} if found.forecast else {}),
            "Before, %": share(newest.before if newest else None),
            "All devices on its release, mean %": mean(page.fleet.after, page.fleet.measured),
            "Release": positive(page.record.release),
            "Agent": version(able.get("agent", "")),
            "Tier": escape(able.get("tier", "")),
            "Head": escape(cut(head)),
            "Samples": number(able.get("samples", 0)),
            "Outlier score": outlier(page.record.outlier_score),
            "Last message": since(page.record.seen_at),
        }
    )


def _measured(found: MeasuredAccuracy) -> str:
    """The accuracy, and smaller what it was measured on, or why there is none."""
    figure = "" if found.accuracy is None else percent(found.accuracy)
    return f'{figure}<span class="quiet">{escape(found.words.removeprefix(figure))}</span>'


def comparison(page: DevicePage) -> str:
    """How the device's accuracy compares with that of all devices on its release, and the likely cause where it is lower."""
    newest = page.measured
    if newest is None or newest.after is None or page.fleet.after is None:
        return ""
    if page.fitted and page.fitted.after is None:
        return ""
    able, images = page.able, int(newest.metrics.get(TEST_SAMPLES, 0))
    counts, samples = able.get("samples_per_class") or (), int(able.get("samples", 0))
    of = f" of {number(images)} test samples (one sample is {100 / images:.1f} points)" if images else ""
    said = [
        f"{share(newest.after)} %{of}; mean of all devices on release {page.record.release}:"
        f" {share(page.fleet.after)} % (n = {number(page.fleet.measured)}).",
        f"{number(samples)} samples (median of the fleet: {number(page.median_samples)})"
        + (f" in {sum(map(bool, counts))} of {len(counts)} classes." if counts else "."),
    ]
    if newest.after < page.fleet.after:
        said.append(_cause(page, newest.after, page.fleet.after, images, samples))
    return f'<p class="after">{escape(" ".join(said))}</p>'


def _cause(page: DevicePage, own: float, mean: float, images: int, samples: int) -> str:
    """Why the accuracy may be below the mean, from what the device reports."""
    if page.able.get("drift"):
        return "Likely cause: its samples have changed since its head was fitted."
    if page.able.get("missed"):
        return "Likely cause: its samples have changed: labels are outside their prediction sets more often than promised."
    said = ""
    if images:
        wrong = round((1 - own) * images)
        said = f"{number(wrong)} of {number(images)} samples wrong; "
        if float(bdtr(images - wrong, images, mean)) > CHANCE:
            return f"{said}may be chance."
        said += "more than chance. "
    if samples < FEW_SAMPLES * page.median_samples:
        return f"{said}Likely cause: few samples to fit its head on."
    return f"{said}No likely cause in what it reports. {CHECK}"


def description(page: DevicePage) -> str:
    """The hardware and software of the device, and its notes."""
    able = page.able
    values = {name: able[key] for key, name in DESCRIPTION.items() if able.get(key)}
    shown = {name: number(v) if isinstance(v, int) else escape(v) for name, v in values.items()}
    if update := able.get("update"):
        shown["Agent update"] = escape(": ".join(filter(None, (update["state"], update["why"]))))
    shown |= {
        "Boot": escape(page.record.boot),
        "First seen, UTC": clock(page.record.first_seen_at),
        "Rejections towards quarantine": number(page.record.rejections),
        "Dropped messages": number(page.record.dropped),
    }
    said = able.get("notes", ())
    notes = "".join(f"<li>{cut_text(note)}</li>" for note in said[:MOST_NOTES])
    if len(said) > MOST_NOTES:
        notes += (
            f"<li>{counted(len(said) - MOST_NOTES, 'further note')}: edge-fl fleet list --format json</li>"
        )
    return f"<h2>Description</h2>{facts(shown, big=False)}" + (
        f'<ul class="notes">{notes}</ul>' if notes else ""
    )


COMMANDS = {
    "Its log: warnings and errors": "device logs {device} --level warning",
    "Its checks, versions and recent errors, as a folder": "device diagnose {device}",
    "Its settings": "fleet settings {device}",
    "Set a tag; type its key and value": "fleet tag {device} KEY=VALUE",
    "Rename it; type the new name": "fleet rename {device} NEW",
    "Remove it from the fleet for good": "fleet decommission {device}",
}
"""What a command does -> its words; one that changes the fleet asks first, or has a word to replace."""


def commands(context: PageContext, device: str) -> dict[str, str]:
    """Commands on a device, by what each does, for a shell on the server's machine."""
    folder, found = context.identities, {}
    for what, words in COMMANDS.items():
        rest = ""
        if folder and words.startswith("device ") and (operator := folder / "operator").is_dir():
            rest = f" --identity {shlex.quote(text(operator))}"
        elif folder and folder != IDENTITIES and words.startswith(("fleet rename", "fleet decommission")):
            rest = f" --identities {shlex.quote(text(folder))}"
        found[what] = context.command(words.format(device=shlex.quote(device)) + rest)
    return found


def command_list(context: PageContext, device: str) -> str:
    """The commands on a device, each with a button that copies it."""
    rows = "".join(
        f"<li><span>{escape(what)}</span><code>{escape(command)}</code>"
        f'<button data-copy aria-label="Copy: {escape(what)}"><span aria-live="polite">Copy</span></button></li>'
        for what, command in commands(context, device).items()
    )
    note = "For a shell on the server's machine. For a broker on another machine, the first two need --host HOST."
    return (
        f'<h2>Commands</h2><ul class="sheet padded items copied">{rows}</ul><p class="quiet after">{note}</p>'
    )


def history(page: DevicePage) -> Chart | None:
    """Accuracy by report, from two reports on; a report is named by its release, or its round, and its time."""
    measured = [one for one in reversed(page.reports) if one.after is not None or one.before is not None]
    numbered = dict(enumerate(measured, 1))
    after = {place: one.after for place, one in numbered.items() if one.after is not None}
    before = {place: one.before for place, one in numbered.items() if one.before is not None}
    curves = [ChartCurve("after", after), ChartCurve("before", before, dashed=True)]
    names = {
        place: (f"release {one.release}" if one.release else f"round {one.round}")
        + f"\n{clock(one.received_at)[5:16]}"
        for place, one in numbered.items()
    }
    return charts.lines(curves, "", 200, names) if len(measured) > 1 else None


def cold_start(page: DevicePage) -> Chart | None:
    """Accuracy by labels per class for each kind of head, as a device whose head is `auto` measured it last."""
    measured = filter(None, (by_labels(report.metrics) for report in page.reports))
    newest: dict[str, dict[int, float]] = next(measured, {})
    curves = [ChartCurve(kind, dict(sorted(curve.items()))) for kind, curve in newest.items()]
    return charts.lines(curves, "labels per class", 200)


def spread(page: DevicePage) -> Chart | None:
    """Samples by class."""
    return charts.columns(page.able.get("samples_per_class", ()))


def build(board: PageBoard, address: Address) -> None:
    """Add the page's parts."""
    find = partial(read, board.context.db, board.context.fleet, address["id"])
    board.html(find, title, absent(address["id"]))
    board.html(find, lambda page: summary(page) + comparison(page))
    board.chart(find, history, "Accuracy, % by report (UTC)")
    board.chart(find, cold_start, "Held-out accuracy, % by labels per class")
    board.chart(find, spread, "Samples by class")
    board.html(find, description)
    board.html(find, lambda page: command_list(board.context, page.record.device))
    board.table(find, SETTINGS, lambda page: page.settings, "Settings")
    board.table(find, REPORTS, lambda page: page.reports, "Reports")
    board.table(find, REQUESTS, lambda page: page.requests, "Requests")
    board.table(find, REJECTIONS, lambda page: page.rejections, "Rejected reports")
