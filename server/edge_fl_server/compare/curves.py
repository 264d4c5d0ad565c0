"""Accuracy of a cell against rounds, bytes and processor time."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from edge_fl import metrics
from edge_fl_server.compare.cell import CellResult
from edge_fl_server.compare.grid import Cell

MEGABYTE = 1e6
FINAL = "final"
"""In place of a round: after the final personalisation."""


class Cost(Struct, frozen=True):
    """What a client has received, sent and computed so far, if it took part in every round."""

    bytes_down: float = 0.0
    bytes_up: float = 0.0
    device_seconds: float = 0.0


def cumulative(result: CellResult) -> list[Cost]:
    """The cost after each round, and after the final personalisation; its bytes are not counted."""
    costs = [Cost()]
    for point in result.curve:
        before, clients = costs[-1], max(point.clients, 1)
        costs.append(
            Cost(
                before.bytes_down + point.bytes_down / clients,
                before.bytes_up + point.bytes_up / clients,
                before.device_seconds + point.device_seconds,
            )
        )
    last = costs[-1]
    final = msgspec.structs.replace(last, device_seconds=last.device_seconds + result.final_seconds)
    return [*costs[1:], final]


def lines(cell: Cell, result: CellResult) -> Iterator[dict[str, object]]:
    """One record per round, and one after the final personalisation; costs are cumulative and per client."""
    costs = cumulative(result)
    rounds = [(point.round, point.means) for point in result.curve]
    last = {name: summary.mean for name, summary in result.last.items()}
    for (number, means), cost in zip([*rounds, (FINAL, last)] if rounds else [], costs, strict=False):
        yield {
            "method": cell.label,
            "dataset": cell.block[0],
            "partition": cell.block[1],
            "seed": cell.recipe.seed,
            "key": cell.key,
            "round": number,
            "down_mb": cost.bytes_down / MEGABYTE,
            "up_mb": cost.bytes_up / MEGABYTE,
            "device_seconds": cost.device_seconds,
            **{name: mean for name, mean in means.items() if metrics.ACCURACY in name},
        }
