"""What a run measured, round by round: the lines of round_metrics.jsonl, whoever wrote them, as one kind of value.

A simulated run writes every client's metrics, a run against a fleet their summary; either way a `RoundLine` has its line number and a
`Summary` per metric, so that everything that is shown of a run can say where it stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from edge_fl import metrics
from edge_fl.metrics import Summary

FILE = "round_metrics.jsonl"
_FIELDS = frozenset(Summary.__struct_fields__)


class RoundLine(Struct, frozen=True):
    """One line of round_metrics.jsonl. `line` counts from 1; `clients` holds each client's metrics where the line has them."""

    line: int
    round: int
    closing: bool = False
    asked: int = 0
    answered: int = 0
    seconds: float | None = None
    bytes_down: int | None = None
    bytes_up: int | None = None
    summaries: dict[str, Summary] = {}
    clients: dict[str, dict[str, float]] = {}


def lines(path: Path) -> list[RoundLine]:
    """The lines of a file that are whole, in order; none for a file that is not there."""
    try:
        found = path.read_bytes().splitlines()
    except OSError:
        return []
    return [line for number, text in enumerate(found, 1) if (line := read(number, text)) is not None]


def latest(found: Sequence[RoundLine]) -> list[RoundLine]:
    """One line per round: a round that was repeated after a resume counts as it was last."""
    by_round = {(line.round, line.closing): line for line in found}
    return [by_round[key] for key in sorted(by_round)]


def read(number: int, text: bytes) -> RoundLine | None:
    """One line of the file, as it stands there; None when it is no round's."""
    try:
        record = json.loads(text)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("round"), int):
        return None
    clients = _clients(record.get("metrics"))
    return RoundLine(
        number,
        record["round"],
        bool(record.get("closing")),
        _count(record.get("asked")),
        _count(record.get("answered")),
        record.get("seconds"),
        record.get("bytes_down"),
        record.get("bytes_up"),
        metrics.summarise_reports(list(clients.values())) if clients else _summaries(record),
        clients,
    )


def _count(value: Any) -> int:
    """Of clients that are counted, or named."""
    return len(value) if isinstance(value, list) else int(value or 0)


def _clients(value: Any) -> dict[str, dict[str, float]]:
    if not isinstance(value, Mapping):
        return {}
    return {
        client: {name: float("nan") if v is None else float(v) for name, v in found.items()}
        for client, found in value.items()
        if isinstance(found, Mapping)
    }


def _summaries(record: Mapping[str, Any]) -> dict[str, Summary]:
    found = {name: value for name, value in record.items() if isinstance(value, Mapping)}
    return {
        name: msgspec.convert({k: float("nan") if v is None else v for k, v in value.items()}, Summary)
        for name, value in found.items()
        if set(value) == _FIELDS
    }
