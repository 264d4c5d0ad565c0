"""The outcome of a tuned comparison: chosen values, tuned and untuned accuracy, and the difference to the best baseline, by method."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from edge_fl import metrics
from edge_fl.config import Option
from edge_fl.console.tables import Table
from edge_fl_lab.compare import paired
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import Cell, blocks
from edge_fl_lab.compare.paired import PairedDifference
from edge_fl_lab.compare.summary import (
    BYTES,
    DEVICE_SECONDS,
    UNTIL_BYTES_EACH,
    UNTIL_ROUNDS,
    UNTIL_SECONDS,
    MeanStd,
    MethodRow,
    mean_std,
)
from edge_fl_lab.compare.tables import NumberColumn, conditions, megabytes, percent, plain
from edge_fl_lab.compare.tuning import Trial, Tuning, Values

COLUMNS = (
    NumberColumn("global", metrics.GLOBAL_TEST, percent, "the tuned method's global model on every client's test set"),
    NumberColumn("bottom decile", f"{metrics.PERSONAL_AFTER}.bottom_decile", percent, "mean 'tuned' of the lowest 10 % of the clients"),
    NumberColumn("MB", BYTES, megabytes, "tensors to and from a client in all rounds, in 10^6 bytes"),
    NumberColumn("device s", DEVICE_SECONDS, plain, "processor time of a client: local updates and final personalisation"),
    NumberColumn("rounds to target", UNTIL_ROUNDS, plain, "rounds until the mean accuracy reaches the target"),
    NumberColumn("MB to target", UNTIL_BYTES_EACH, megabytes, "MB in these rounds"),
    NumberColumn("device s to target", UNTIL_SECONDS, plain, "processor time in these rounds"),
)  # fmt: skip


class TunedOutcome(Struct, frozen=True):
    """Accuracy after the final personalisation: mean over clients, then over seeds; and mean validation accuracy."""

    mean: float
    std: float
    validation: float
    by_seed: dict[int, float]
    by_client: dict[int, dict[str, float]]
    keys: dict[int, str]


class TunedRow(Struct, frozen=True):
    """A method on one dataset and partition. `seed` is that of the trials; `difference` is None for the baseline itself."""

    method: str
    dataset: str
    partition: str
    seed: int
    trials: list[Trial]
    chosen: Values
    default: Values
    tuned: TunedOutcome
    untuned: TunedOutcome
    difference: PairedDifference | None


def rows(
    tunings: Sequence[Tuning],
    untuned: Sequence[Cell],
    tuned: Sequence[Cell],
    results: Mapping[str, CellResult],
) -> list[TunedRow]:
    """One row per tuning. The baseline is the tuned one of ALWAYS with the highest validation accuracy."""
    table = []
    for tuning in tunings:
        block = (tuning.dataset, tuning.partition)
        ours, before = (paired.of_method(tuning.method, block, cells, results) for cells in (tuned, untuned))
        best = paired.best_baseline(block, tuned, results)
        baseline = paired.of_method(best, block, tuned, results)
        table.append(
            TunedRow(
                tuning.method,
                *block,
                tuning.seed,
                tuning.trials,
                tuning.chosen,
                tuning.default,
                _outcome(ours),
                _outcome(before),
                None if tuning.method == best else paired.difference(best, baseline, ours),
            )
        )
    return table


def tables(
    tuned_rows: Sequence[TunedRow],
    rows: Sequence[MethodRow],
    untuned: Sequence[Cell],
    target: float | None = None,
) -> list[Table]:
    """Lay out one table per dataset and partition; `rows` hold the numbers of the tuned methods, `untuned` names the settings."""
    numbers = {(row.method, row.dataset, row.partition): row.numbers for row in rows}
    failures = {(row.method, row.dataset, row.partition): row.failures for row in rows}
    return [
        _table(
            [
                (row, numbers.get(place, {}), failures.get(place, {}))
                for row in tuned_rows
                if (place := (row.method, row.dataset, row.partition))[1:] == block
            ],
            cells[0],
            target,
        )
        for block, cells in blocks(untuned)
    ]


def record(row: TunedRow) -> dict[str, object]:
    """Flatten the own numbers of a tuned row for CSV."""
    flat: dict[str, object] = {
        "chosen": values_text(row.chosen),
        "default": values_text(row.default),
        "trials": len(row.trials),
        "untuned": row.untuned.mean,
        "untuned.over_seeds": row.untuned.std,
    }
    if found := row.difference:
        flat |= paired.record(found)
    return flat


def values_text(values: Values) -> str:
    """Format as "lr 0.05, tau 0.99"."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in values.items())


def value_text(value: Option) -> str:
    """Format a value: "0.05"."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _outcome(found: Mapping[int, CellResult]) -> TunedOutcome:
    clients = {seed: paired.by_client(result) for seed, result in found.items()}
    by_seed = {seed: float(np.mean(list(each.values()))) for seed, each in clients.items() if each}
    over = mean_std(by_seed.values())
    keys = {seed: result.key for seed, result in found.items()}
    return TunedOutcome(over.mean, over.std, paired.score(found), by_seed, clients, keys)


def _table(
    rows: Sequence[tuple[TunedRow, Mapping[str, MeanStd], Mapping[int, str]]],
    first: Cell,
    target: float | None,
) -> Table:
    shown = [column for column in COLUMNS if any(column.number in numbers for _, numbers, _ in rows)]
    seeds = max((len(row.tuned.by_seed) + len(failures) for row, _, failures in rows), default=0)
    body = [
        [
            row.method,
            values_text(row.chosen),
            _accuracy(row.tuned, seeds),
            _accuracy(row.untuned, seeds),
            _difference(row),
            *(column.write(numbers[column.number], seeds) if column.number in numbers else "-" for column in shown),
        ]
        for row, numbers, failures in rows
    ]  # fmt: skip
    over = f"mean±std over {seeds} seeds" if seeds > 1 else "one seed"
    headings = ["method", "tuned to", "tuned", "untuned", "difference", *(column.heading for column in shown)]
    notes = list(_notes([row for row, _, _ in rows], shown, target))
    failed = [
        f"{row.method} FAILED with seed {seed}: {reason}"
        for row, _, failures in rows
        for seed, reason in failures.items()
    ]
    return Table(headings, body, f"{conditions(first.recipe)}; {over}", [*failed, *notes], headings[2:])


def _notes(rows: Sequence[TunedRow], shown: Sequence[NumberColumn], target: float | None) -> Iterator[str]:
    trials = max(len(row.trials) for row in rows)
    yield "Accuracies are in per cent, of the client's own model after the final personalisation, means over clients:"
    yield (
        f"- tuned: with the best of {trials} configurations by validation accuracy with seed {rows[0].seed},"
        " equally many for every method"
    )
    yield "- untuned: with the settings above, and the method's default hyper-parameters and usual optimiser"
    if found := next((row.difference for row in rows if row.difference), None):
        yield f"- {paired.meaning(found, 'tuned', ', also tuned')}"
    for column in shown:
        yield f"- {column.heading}: {column.meaning}"
    if target is not None:
        yield f"- the target is {target:.0%}"


def _accuracy(outcome: TunedOutcome, seeds: int) -> str:
    if not outcome.by_seed:
        return "failed"
    return percent(MeanStd(outcome.mean, outcome.std, len(outcome.by_seed)), seeds)


def _difference(row: TunedRow) -> str:
    found = row.difference
    if found is None:
        return "baseline" if row.tuned.by_seed else "-"
    return paired.text(found)
