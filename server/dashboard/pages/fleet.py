"""The fleet: every device in one table that is sorted, searched and paged by clicks that are also addresses."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import msgspec
from msgspec.structs import replace

from server.dashboard.pages.parts import device_link, empty, pager, query, word
from server.dashboard.queries.fleet import PER_PAGE, FleetPage, FleetQuery, FleetRow
from server.report import svg
from server.report.formatting import NOTHING, ago, escape, number, share, size

COLUMNS: tuple[tuple[str, str, bool], ...] = (
    ("device", "Device", False),
    ("status", "Status", False),
    ("tier", "Tier", False),
    ("method", "Method", False),
    ("release", "Release", True),
    ("head", "Head", False),
    ("head_at", "Head age", True),
    ("samples", "Samples", True),
    ("", "By class", False),
    ("before", "Before %", True),
    ("after", "After %", True),
    ("seen", "Last seen", True),
    ("bytes_today", "Bytes today", True),
    ("drift", "Drift", True),
    ("epsilon", "Epsilon", True),
)
"""Sort key ("" for none), heading, whether it is a number."""
USUAL = FleetQuery()
EMPTY = "edge-fl device run --host BROKER --id pi-07 --data folder:/srv/images\nedge-fl fleet up --devices 12"


def query_of(address: Mapping[str, str]) -> FleetQuery:
    """What an address asks for; what it says wrongly is as usual."""
    try:
        return msgspec.convert(dict(address), FleetQuery, strict=False)
    except msgspec.ValidationError:
        return USUAL


def address_of(wanted: FleetQuery) -> str:
    """The address that asks for it."""
    fields = msgspec.structs.asdict(wanted)
    return query({name: value for name, value in fields.items() if value != getattr(USUAL, name)})


def filters(page: FleetPage, wanted: FleetQuery) -> str:
    """How many devices there are by status; a click shows only those."""
    chips = [_chip("all", page.total, replace(wanted, status="", page=0), not wanted.status)]
    for status, count in page.by_status.items():
        chosen = wanted.status == status
        chips.append(_chip(status, count, replace(wanted, status="" if chosen else status, page=0), chosen))
    chips.append('<span class="gap"></span>')
    for tier in ("head", "full"):
        chosen = wanted.tier == tier
        chips.append(_chip(tier, None, replace(wanted, tier="" if chosen else tier, page=0), chosen))
    return f'<div class="chips" role="group" aria-label="Show only">{"".join(chips)}</div>'


def table(page: FleetPage, wanted: FleetQuery, now: datetime) -> str:
    """The devices of a page, or why there are none."""
    if not page.total:
        return empty(
            "No device has spoken yet", "Devices appear here as soon as they say what they are.", EMPTY
        )
    if not page.rows:
        return empty("No device is like that", "Nothing matches what you are looking for.")
    private = any(row.epsilon is not None for row in page.rows)
    columns = COLUMNS if private else COLUMNS[:-1]
    head = "".join(_heading(*column, wanted) for column in columns)
    body = "".join(_row(row, now, len(columns)) for row in page.rows)
    to = {p: address_of(replace(wanted, page=p)) for p in (page.page - 1, page.page + 1)}
    below = pager(page.page, page.pages, page.found, PER_PAGE, to, "devices")
    return f'<div class="sheet named"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{below}'


def _chip(name: str, count: int | None, wanted: FleetQuery, pressed: bool) -> str:
    shown = f"<b>{count:,}</b>" if count is not None else ""
    return (
        f'<button data-key="chip-{escape(name)}" data-go="{escape(address_of(wanted))}" aria-pressed="{str(pressed).lower()}">'
        f"{escape(name)}{shown}</button>"
    )


def _heading(key: str, text: str, right: bool, wanted: FleetQuery) -> str:
    side = ' class="n"' if right else ""
    if not key:
        return f'<th scope="col"{side}>{text}</th>'
    here = wanted.sort == key
    order = f' aria-sort="{"descending" if wanted.down else "ascending"}"' if here else ""
    down = not wanted.down if here else right and key != "seen"
    to = address_of(replace(wanted, sort=key, down=down, page=0))
    arrow = (" ↓" if wanted.down else " ↑") if here else ""
    button = f'<button data-key="sort-{key}" data-go="{escape(to)}">{text}{arrow}</button>'
    return f'<th scope="col"{side}{order}>{button}</th>'


def _row(row: FleetRow, now: datetime, columns: int) -> str:
    busy = f' <span class="quiet">{escape(row.activity)}</span>' if row.activity not in ("", "idle") else ""
    why = f' title="{escape(row.why)}"' if row.why else ""
    standing = f' <span class="tag bad">{row.standing}</span>' if row.standing else ""
    cells = (
        ("", device_link(row.device)),
        (why, word(row.status) + busy + standing),
        ("", escape(row.tier) or NOTHING),
        ("", escape(row.method) or NOTHING),
        (' class="n"', number(row.release) if row.release else NOTHING),
        ("", escape(row.head) or NOTHING),
        (' class="n"', ago(row.head_at, now)),
        (' class="n"', number(row.samples)),
        ("", svg.bars(row.samples_per_class)),
        (' class="n"', share(row.before)),
        (' class="n"', share(row.after)),
        (' class="n"', ago(row.seen_at, now)),
        (' class="n"', size(row.bytes_today) if row.bytes_today else NOTHING),
        (' class="n"', f'<span class="text-warn">{row.drift:.1f} σ</span>' if row.drift else NOTHING),
        (' class="n"', NOTHING if row.epsilon is None else f"{row.epsilon:.3g}"),
    )
    return "<tr>" + "".join(f"<td{attributes}>{cell}</td>" for attributes, cell in cells[:columns]) + "</tr>"
