"""A number of a report, and where it comes from."""

from __future__ import annotations

from msgspec import Struct


class Figure(Struct, frozen=True):
    """A number: `field` of `metric` on `lines` of round_metrics.jsonl, "7", or "1,2,3" for a sum over lines.

    With `against` it is over the clients of `group` that have both metrics, which paired differences are about.
    """

    value: float | int | None
    lines: str
    field: str
    metric: str = ""
    client: str = ""
    group: str = ""
    against: str = ""
