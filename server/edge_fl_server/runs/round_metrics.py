"""round_metrics.jsonl: one line per round and one for the final personalisation, written and read as the same type by every run."""

import json
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from edge_fl.metrics import Summary
from edge_fl_server.training.verdict import RoundVerdict

FILE = "round_metrics.jsonl"


class RoundMetrics(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One round, or the `final` personalisation after round `round`. Clients are named by their ids.

    `selected` are the clients whose update could count, `responded` those whose update arrived in time, `head_updates` the head-only
    devices that contributed. `staleness` maps late clients to the age of their update in rounds. `rejected` counts rejected reports by
    reason (`outlier`: updates that arrived but were dropped). `budget_exhausted` are the clients without privacy budget. `verdict` is that
    of the round gate, None if the round was not compared. `metrics` summarises each metric over the clients in `clients`, which holds each
    client's own values; both are empty in rounds without evaluation. NaN is null in the file. `seconds` is wall time, None for the final
    line; bytes count tensors, not framing.
    """

    round: int
    final: bool = False
    selected: tuple[str, ...] = ()
    responded: tuple[str, ...] = ()
    head_updates: tuple[str, ...] = ()
    attempts: int = 1
    staleness: Mapping[str, int] = {}
    rejected: Mapping[str, int] = {}
    budget_exhausted: tuple[str, ...] = ()
    verdict: RoundVerdict | None = None
    seconds: float | None = None
    bytes_down: int = 0
    bytes_up: int = 0
    metrics: Mapping[str, Summary] = {}
    clients: Mapping[str, Mapping[str, float]] = {}


class RoundLine(RoundMetrics, frozen=True, kw_only=True):
    """A `RoundMetrics` read from a file, with its line number, counted from 1."""

    line: int


def encode(record: RoundMetrics) -> bytes:
    """The record as one line of JSON, every key written, with a newline."""
    return msgspec.json.encode(record) + b"\n"


def lines(path: Path) -> list[RoundLine]:
    """The complete lines of a file, in order; empty if the file does not exist. A line cut short by a crash is skipped."""
    try:
        texts = path.read_bytes().splitlines()
    except OSError:
        return []
    return [line for number, text in enumerate(texts, 1) if (line := decode(text, number)) is not None]


def decode(text: bytes, number: int) -> RoundLine | None:
    """Line `number` of the file; None if it is not a record."""
    try:
        record = json.loads(text)
        for name in ("metrics", "clients"):
            record[name] = {key: with_nan(values) for key, values in record.get(name, {}).items()}
        return msgspec.convert({**record, "line": number}, RoundLine)
    except (ValueError, TypeError, AttributeError):  # msgspec.ValidationError is a ValueError
        return None


def latest(found: Sequence[RoundLine]) -> list[RoundLine]:
    """One line per round, in order: of a round repeated after a resume the last one."""
    by_round = {(line.round, line.final): line for line in found}
    return [by_round[key] for key in sorted(by_round)]


def with_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values read from JSON, where NaN is null."""
    return {name: nan if value is None else value for name, value in values.items()}
