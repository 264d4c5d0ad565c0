"""Tables of a comparison, one per dataset and partition, with notes on the columns and on unequal settings.

That of a tuned comparison has the chosen values, and tuned and untuned accuracy, of each method.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from edge_fl import metrics
from edge_fl.config import MethodConfig, Option
from edge_fl.console.tables import Table
from edge_fl.console.units import counted, difference
from edge_fl_lab.compare.grid import Cell, blocks
from edge_fl_lab.compare.summary import (
    BYTES,
    BYTES_DOWN,
    BYTES_UP,
    DEVICE_SECONDS,
    MEGABYTE,
    SECONDS,
    UNTIL_BYTES,
    UNTIL_BYTES_EACH,
    UNTIL_ROUNDS,
    UNTIL_SECONDS,
    MeanStd,
    MethodRow,
    baselines,
)
from edge_fl_lab.compare.tuning import Tuning, Values
from edge_fl_server.recipes import partition_label
from edge_fl_server.recipes.recipe import Recipe

Write = Callable[[MeanStd, int], str]


@dataclass(frozen=True)
class NumberColumn:
    """A column: heading, the name of its number in `summary`, format, and meaning."""

    heading: str
    number: str
    write: Write
    meaning: str


def percent(value: MeanStd, seeds: int) -> str:
    """Format as "94.12±0.31", without ± for a single seed; "(2)" is appended if only two of more seeds have the number."""
    around = f"±{value.std * 100:.2f}" if seeds > 1 else ""
    return f"{value.mean * 100:.2f}{around}{_seeds_note(value, seeds)}"


def megabytes(value: MeanStd, seeds: int) -> str:
    """Format mean bytes in units of 10^6; the deviation over seeds is in the CSV."""
    return plain(MeanStd(value.mean / MEGABYTE, value.std, value.count), seeds)


def plain(value: MeanStd, seeds: int) -> str:
    """Format the mean to about three digits."""
    digits = next((d for d, limit in ((3, 1), (2, 10), (1, 100)) if abs(value.mean) < limit), 0)
    return f"{value.mean:.{digits}f}{_seeds_note(value, seeds)}"


PARTICIPANTS = f"{metrics.PERSONAL_AFTER}.{metrics.PARTICIPANTS}"
AFTER = NumberColumn("after", metrics.PERSONAL_AFTER, percent, "the client's own model, after it")
COLUMNS = (
    NumberColumn("global", metrics.GLOBAL_TEST, percent, "the global model on every client's test set"),
    NumberColumn("post-local", metrics.PERSONAL_LOCAL, percent, "the client's own model after its last local update, before aggregation"),
    NumberColumn("before", metrics.PERSONAL_BEFORE, percent, "the client's own model, before the final personalisation"),
    AFTER,
    NumberColumn("weighted", f"{metrics.PERSONAL_AFTER}.weighted_mean", percent, "'after', clients weighted by test samples"),
    NumberColumn("participants", PARTICIPANTS, percent, "'after', only clients that ever took part"),
    NumberColumn("best by val.", metrics.at_best_round(metrics.PERSONAL_BEFORE), percent, "'before' in the round of best validation"),
    NumberColumn("local only", metrics.LOCAL_ONLY, percent, "'after' of the same clients under Local"),
    NumberColumn("unseen", metrics.UNSEEN_TEST, percent, "the global model, as it is, on clients that never trained"),
    NumberColumn("unseen tuned", metrics.UNSEEN_AFTER, percent, "the same clients, after fine-tuning a head on the frozen extractor"),
    NumberColumn("std", f"{metrics.PERSONAL_AFTER}.std", percent, "standard deviation of 'after' over clients"),
    NumberColumn("bottom decile", f"{metrics.PERSONAL_AFTER}.bottom_decile", percent, "mean 'after' of the lowest 10 % of the clients"),
    NumberColumn("MB down", BYTES_DOWN, megabytes, "tensors sent to the whole cohort in a round, in 10^6 bytes"),
    NumberColumn("MB up", BYTES_UP, megabytes, "tensors sent by the whole cohort in a round"),
    NumberColumn("device s", DEVICE_SECONDS, plain, "processor time of a client in all: local updates and final personalisation"),
    NumberColumn("rounds to target", UNTIL_ROUNDS, plain, "rounds until the mean accuracy reaches the target"),
    NumberColumn("MB to target", UNTIL_BYTES, megabytes, "MB down and up of these rounds"),
    NumberColumn("device s to target", UNTIL_SECONDS, plain, "processor time of a client until then"),
    NumberColumn("epsilon", metrics.EPSILON, plain, "epsilon spent, mean over clients"),
    NumberColumn("seconds", SECONDS, plain, "duration of the whole run on one thread"),
)  # fmt: skip
TUNED_COLUMNS = (
    NumberColumn("global", metrics.GLOBAL_TEST, percent, "the tuned method's global model on every client's test set"),
    NumberColumn("bottom decile", f"{metrics.PERSONAL_AFTER}.bottom_decile", percent, "mean 'tuned' of the lowest 10 % of the clients"),
    NumberColumn("MB", BYTES, megabytes, "tensors to and from a client in all rounds, in 10^6 bytes"),
    NumberColumn("device s", DEVICE_SECONDS, plain, "processor time of a client: local updates and final personalisation"),
    NumberColumn("rounds to target", UNTIL_ROUNDS, plain, "rounds until the mean accuracy reaches the target"),
    NumberColumn("MB to target", UNTIL_BYTES_EACH, megabytes, "MB in these rounds"),
    NumberColumn("device s to target", UNTIL_SECONDS, plain, "processor time in these rounds"),
)  # fmt: skip


@dataclass(frozen=True)
class TunedRow:
    """A method on one dataset and partition: its tuning, and its numbers with the chosen and with the default values."""

    tuning: Tuning
    tuned: MethodRow
    untuned: MethodRow


def tables(rows: Sequence[MethodRow], cells: Sequence[Cell], target: float | None = None) -> list[Table]:
    """Lay out one table per block, with the meaning of the columns below the last. Columns without any number are left out."""
    *others, last = [
        _table([row for row in rows if row.block == block], inside) for block, inside in blocks(cells)
    ]
    return [*others, replace(last, notes=[*last.notes, *_legend([*others, last], target)])]


def tuned_tables(rows: Sequence[TunedRow], cells: Sequence[Cell], target: float | None = None) -> list[Table]:
    """Lay out one table of a tuned comparison per block; `cells` are the untuned ones."""
    return [
        _tuned_table([row for row in rows if row.tuned.block == block], inside[0].recipe, target)
        for block, inside in blocks(cells)
    ]


def record(row: MethodRow) -> dict[str, object]:
    """Flatten a row for CSV: each mean under the number's name, the deviation over seeds under "<name>.over_seeds"."""
    flat: dict[str, object] = {
        "method": row.method,
        "dataset": row.dataset,
        "partition": row.partition,
        "seeds": " ".join(map(str, row.keys)),
        "failures": "; ".join(f"seed {seed}: {reason}" for seed, reason in row.failures.items()),
    }
    for name, value in row.numbers.items():
        flat |= {name: value.mean, f"{name}.over_seeds": value.std} if value.count else {}
    for baseline, found in row.differences.items():
        names = ("mean", "low", "high", "over", "seeds", "pairs")
        flat |= {f"difference.{baseline}.{name}": getattr(found, name) for name in names}
    return flat


def tuned_record(row: TunedRow) -> dict[str, object]:
    """Flatten a row of a tuned comparison for CSV."""
    return {
        **record(row.tuned),
        "chosen": values_text(row.tuning.chosen),
        "default": values_text(row.tuning.default),
        "trials": len(row.tuning.trials),
        "untuned": row.untuned.accuracy.mean,
        "untuned.over_seeds": row.untuned.accuracy.std,
    }


def values_text(values: Values) -> str:
    """Format as "lr 0.05, tau 0.99"."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in values.items())


def value_text(value: Option) -> str:
    """Format a value as one writes it in a label: "0.05", "false"."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def conditions(recipe: Recipe) -> str:
    """Describe in one line what all methods of a block have in common."""
    data, method, cohort = recipe.data, recipe.method, recipe.cohort
    least, most = cohort.participation_from, cohort.participation
    return ", ".join(filter(None, [
        f"{data.dataset}" + (data.fraction < 1) * f" ({data.fraction:.2%} of the data)",
        f"{partition_label(data)}: {data.clients} clients" if not data.split else partition_label(data),
        (most < 1 or least > 0) * f"{(least > 0) * f'{least:.0%} to '}{most:.0%} of them in a round",
        (data.unseen > 0) * f"{data.unseen} of them unseen",
        recipe.model.name,
        f"{counted(recipe.rounds, 'round')} of {counted(method.epochs, 'epoch')}",
        f"batches of {method.batch_size}",
        _optimiser(method),
    ]))  # fmt: skip


def _columns(rows: Sequence[MethodRow]) -> list[NumberColumn]:
    """All columns, with one for each head of the recipe."""
    numbers = dict.fromkeys(number for row in rows for number in row.numbers)
    found = {metrics.head_of(number): number for number in numbers}
    return [
        *COLUMNS,
        *(NumberColumn(f"head {kind}", number, percent, "") for kind, number in found.items() if kind),
    ]


def _table(rows: Sequence[MethodRow], cells: Sequence[Cell]) -> Table:
    shown = [column for column in _columns(rows) if _is_shown(column.number, rows)]
    seeds = _seeds(rows)
    place = 2 + [column.number for column in shown].index(metrics.PERSONAL_AFTER)
    labels = baselines(rows)
    body = []
    for row in rows:
        line = [row.method, *(_cell(row, column, seeds) for column in shown)]
        body.append([*line[:place], *(_difference(row, label) for label in labels), *line[place:]])
    headings = ["method", *(column.heading for column in shown)]
    headings[place:place] = [f"minus {label}" for label in labels]
    first = cells[0].recipe
    notes = [*_unequal(cells, first), *_failures(rows), *_compared(rows, "'after'")]
    return Table(headings, body, _title(first, seeds), notes, headings[1:])


def _tuned_table(rows: Sequence[TunedRow], first: Recipe, target: float | None) -> Table:
    tuned = [row.tuned for row in rows]
    shown = [column for column in TUNED_COLUMNS if any(column.number in row.numbers for row in tuned)]
    seeds, labels = _seeds(tuned), baselines(tuned)
    body = [
        [
            row.tuned.method,
            values_text(row.tuning.chosen),
            _cell(row.tuned, AFTER, seeds),
            _cell(row.untuned, AFTER, seeds),
            *(_difference(row.tuned, label) for label in labels),
            *(_cell(row.tuned, column, seeds) for column in shown),
        ]
        for row in rows
    ]
    differences = [f"minus {label}" for label in labels]
    headings = ["method", "tuned to", "tuned", "untuned", *differences, *(column.heading for column in shown)]
    trials = max(len(row.tuning.trials) for row in rows)
    notes = [
        *_failures(tuned),
        "Accuracies are in per cent, of the client's own model after the final personalisation, means over clients:",
        f"- tuned: with the best of {trials} configurations by validation accuracy with seed {rows[0].tuning.seed},"
        " equally many for every method",
        "- untuned: with the settings above, and the method's default hyper-parameters and usual optimiser",
        *(f"- {note}" for note in _compared(tuned, "tuned", ", which is tuned too,")),
        *(f"- {column.heading}: {column.meaning}" for column in shown),
        *_target(target),
    ]
    return Table(headings, body, _title(first, seeds), notes, headings[2:])


def _title(first: Recipe, seeds: int) -> str:
    return f"{conditions(first)}; {f'mean±std over {seeds} seeds' if seeds > 1 else 'one seed'}"


def _seeds(rows: Sequence[MethodRow]) -> int:
    return max((len(row.keys) + len(row.failures) for row in rows), default=0)


def _failures(rows: Sequence[MethodRow]) -> list[str]:
    return [
        f"{row.method} FAILED with seed {seed}: {reason}"
        for row in rows
        for seed, reason in row.failures.items()
    ]


def _compared(rows: Sequence[MethodRow], ours: str, note: str = "") -> list[str]:
    """The meaning of the columns of differences of `ours`, if there are any."""
    every = [found for row in rows for found in row.differences.values()]
    if not every:
        return []
    found = max(every, key=lambda gain: (gain.seeds, gain.pairs))
    pairs = f"{found.pairs} pairs of client and seed"
    spread = f"{found.seeds} seeds, {pairs}" if found.over == "seeds" else pairs
    return [
        f"minus BASELINE: {ours}, minus that of the baseline{note} on the same clients, in percentage points, with the 95 % confidence"
        f" interval over {spread}"
    ]


def _target(target: float | None) -> list[str]:
    return [] if target is None else [f"- the target is {target:.0%}"]


def _legend(tables: Sequence[Table], target: float | None) -> Iterator[str]:
    yield "Accuracies are in per cent, means over clients after the last round, unless said otherwise:"
    headings = {heading for table in tables for heading in table.headings}
    for column in COLUMNS:
        if column.heading in headings:
            yield f"- {column.heading}: {column.meaning} ({column.number})"
    if any(heading.startswith("head ") for heading in headings):
        yield f"- head KIND: a head of this kind, fitted by each client on the final extractor ({metrics.of_head('KIND')})"
    yield from _target(target)


def _is_shown(number: str, rows: Sequence[MethodRow]) -> bool:
    """Whether a column is shown: "after" always, "participants" if it differs from "after", others if any row has the number."""
    if number == metrics.PERSONAL_AFTER:
        return True
    found = [row.numbers[number] for row in rows if number in row.numbers and row.numbers[number].count]
    if number == PARTICIPANTS:
        return any(
            row.numbers[number].mean != row.numbers[metrics.PERSONAL_AFTER].mean
            for row in rows
            if number in row.numbers
        )
    return bool(found)


def _difference(row: MethodRow, baseline: str) -> str:
    """In percentage points: "+1.20 [-0.31, +2.71]"."""
    if (found := row.differences.get(baseline)) is None:
        return "-"
    mean, low, high = difference(found.mean, found.low, found.high, 2)
    return mean if math.isnan(found.low) else f"{mean} [{low}, {high}]"


def _cell(row: MethodRow, column: NumberColumn, seeds: int) -> str:
    if not row.numbers:
        return "failed"
    value = row.numbers.get(column.number)
    return column.write(value, seeds) if value and value.count else "-"


def _seeds_note(value: MeanStd, seeds: int) -> str:
    return "" if value.count == seeds else f" ({value.count})"


def _unequal(cells: Sequence[Cell], first: Recipe) -> Iterator[str]:
    """Describe the methods whose settings differ from the first one's."""
    methods: Mapping[str, MethodConfig] = {cell.label: cell.recipe.method for cell in cells}
    for label, method in methods.items():
        different = [
            counted(method.epochs, "epoch") * (method.epochs != first.method.epochs),
            f"batches of {method.batch_size}" * (method.batch_size != first.method.batch_size),
            _optimiser(method) * (method.optimiser != first.method.optimiser),
            ", ".join(f"{key} = {value}" for key, value in method.options.items()),
        ]
        if any(different):
            yield f"{label} has {', '.join(filter(None, different))}."


def _optimiser(method: MethodConfig) -> str:
    optimiser = method.optimiser
    extra = [
        f"momentum {optimiser.momentum:g}" * bool(optimiser.momentum),
        f"weight decay {optimiser.weight_decay:g}" * bool(optimiser.weight_decay),
    ]
    return " ".join(
        [
            f"{optimiser.name.upper() if optimiser.name == 'sgd' else 'Adam'} {optimiser.lr:g}",
            *filter(None, extra),
        ]
    )
