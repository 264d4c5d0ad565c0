"""Tables of a comparison, one per dataset and partition, with notes on the columns and on unequal settings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from edge_fl import metrics
from edge_fl.config import MethodConfig
from edge_fl.console.tables import Table
from edge_fl.console.units import counted
from edge_fl_lab.compare import paired
from edge_fl_lab.compare.grid import Cell, blocks
from edge_fl_lab.compare.summary import (
    BYTES_DOWN,
    BYTES_UP,
    DEVICE_SECONDS,
    MEGABYTE,
    SECONDS,
    UNTIL_BYTES,
    UNTIL_ROUNDS,
    UNTIL_SECONDS,
    MeanStd,
    MethodRow,
)
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
COLUMNS = (
    NumberColumn("global", metrics.GLOBAL_TEST, percent, "the global model on every client's test set"),
    NumberColumn("post-local", metrics.PERSONAL_LOCAL, percent, "the client's own model after its last local update, before aggregation"),
    NumberColumn("before", metrics.PERSONAL_BEFORE, percent, "the client's own model, before the final personalisation"),
    NumberColumn("after", metrics.PERSONAL_AFTER, percent, "the client's own model, after it"),
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


def tables(rows: Sequence[MethodRow], cells: Sequence[Cell], target: float | None = None) -> list[Table]:
    """Lay out one table per block, with the meaning of the columns below the last. Columns without any number are left out."""
    *others, last = [
        _table([row for row in rows if (row.dataset, row.partition) == block], inside)
        for block, inside in blocks(cells)
    ]
    return [*others, replace(last, notes=[*last.notes, *_legend([*others, last], target)])]


def record(row: MethodRow) -> dict[str, object]:
    """Flatten a row for CSV: each mean under the number's name, the deviation over seeds under "<name>.over_seeds"."""
    flat: dict[str, object] = {
        "method": row.method,
        "dataset": row.dataset,
        "partition": row.partition,
        "seeds": " ".join(map(str, row.seeds)),
        "failures": "; ".join(f"seed {seed}: {reason}" for seed, reason in row.failures.items()),
    }
    for name, value in row.numbers.items():
        flat |= {name: value.mean, f"{name}.over_seeds": value.std} if value.count else {}
    return {**flat, **(paired.record(row.difference) if row.difference else {})}


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
    seeds = max((len(row.seeds) + len(row.failures) for row in rows), default=0)
    place = 2 + [column.number for column in shown].index(metrics.PERSONAL_AFTER)
    differences = [row.difference for row in rows if row.difference]
    best = differences[0].baseline if differences else ""
    body = []
    for row in rows:
        cells_of_row = [row.method, *(_cell(row, column, seeds) for column in shown)]
        body.append([*cells_of_row[:place], _difference(row, best), *cells_of_row[place:]])
    failures = [
        f"{row.method} FAILED with seed {seed}: {reason}"
        for row in rows
        for seed, reason in row.failures.items()
    ]
    over = f"mean±std over {seeds} seeds" if seeds > 1 else "one seed"
    title = f"{conditions(cells[0].recipe)}; {over}"
    headings = ["method", *(column.heading for column in shown)]
    headings.insert(place, "difference")
    compared = [paired.meaning(found, "'after'") for found in differences[:1]]
    return Table(
        headings, body, title, [*_unequal(cells, cells[0].recipe), *failures, *compared], headings[1:]
    )


def _legend(tables: Sequence[Table], target: float | None) -> Iterator[str]:
    yield "Accuracies are in per cent, means over clients after the last round, unless said otherwise:"
    headings = {heading for table in tables for heading in table.headings}
    for column in COLUMNS:
        if column.heading in headings:
            yield f"- {column.heading}: {column.meaning} ({column.number})"
    if any(heading.startswith("head ") for heading in headings):
        yield f"- head KIND: a head of this kind, fitted by each client on the final extractor ({metrics.of_head('KIND')})"
    if target is not None:
        yield f"- the target is {target:.0%}"


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


def _difference(row: MethodRow, best: str) -> str:
    if row.difference:
        return paired.text(row.difference)
    return "baseline" if row.method == best else "-"


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
