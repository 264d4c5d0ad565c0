"""A comparison as one self-contained page: verdict, paired differences, figures and tables by dataset and partition.

The figures are also those of FOLDER/plots/. One method or one point makes no figure.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path

import numpy as np
from msgspec import Struct

from edge_fl import metrics
from edge_fl.console import units
from edge_fl.console.progress import Count, Watch, unwatched
from edge_fl.console.tables import Table
from edge_fl.files import atomic
from edge_fl_lab import features
from edge_fl_lab.compare import cell_runs, summary
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import ALWAYS, Cell, blocks
from edge_fl_lab.compare.summary import (
    FINAL,
    MEGABYTE,
    Cost,
    MethodRow,
    PairedDifference,
    cumulative,
    mean_std,
)
from edge_fl_lab.compare.tables import conditions
from edge_fl_lab.features import FeatureProbe, Features
from edge_fl_lab.report import facts, page, plots, style
from edge_fl_lab.report.plots import Curve, Drawn, Mark, Points
from edge_fl_lab.report.run_plots import labels_by_client, similarities
from edge_fl_server.training import studies

NAME = "comparison.html"
Runs = Mapping[str, Sequence[tuple[Cell, CellResult]]]
"""The complete cells of each method."""
CURVES = (metrics.PERSONAL_BEFORE, metrics.GLOBAL_TEST)
AFTER = metrics.PERSONAL_AFTER
COSTS: dict[str, tuple[str, Callable[[Cost], float]]] = {
    "megabytes": (
        "MB to and from a client so far",
        lambda cost: (cost.bytes_down + cost.bytes_up) / MEGABYTE,
    ),
    "device-seconds": ("processor seconds of a client so far", lambda cost: cost.device_seconds),
}


class Block(Struct, frozen=True):
    """The methods on one dataset and partition, and the `baselines` among them; `chosen` has the highest validation accuracy."""

    where: str
    conditions: str
    rows: list[MethodRow]
    chosen: MethodRow | None
    baselines: list[str]


def write(
    folder: Path,
    tables: Sequence[Table],
    cells: Sequence[Cell],
    results: Mapping[str, CellResult],
    watch: Watch = unwatched,
) -> Path:
    """Write the page of a comparison and return its path. Raises RunError if it cannot be written."""
    figures = [(drawn, page.inlined(drawn)) for drawn in of_cells(cells, results, folder, watch)]
    found = [block(cells, results, where) for where, _ in blocks(cells)]
    drawn = (
        page.templates()
        .get_template("comparison.html.j2")
        .render(
            name=folder.name,
            blocks=found,
            verdict=verdict,
            figures=figures,
            tables=tables,
            failures=[
                (cell, results[cell.key].failure)
                for cell in cells
                if cell.key in results and results[cell.key].failure
            ],
            cells=[(cell, results[cell.key]) for cell in cells if cell.key in results],
            percent=units.percent,
            difference=difference_text,
        )
    )
    return atomic.save(folder / NAME, drawn, style.UNCHANGED)


def block(cells: Sequence[Cell], results: Mapping[str, CellResult], where: tuple[str, str]) -> Block:
    """Compare the methods of one dataset and partition with each baseline."""
    inside = [cell for cell in cells if cell.block == where]
    found = summary.rows(inside, results)
    rows = [row for row in found if metrics.PERSONAL_AFTER in row.numbers]
    chosen = max(rows, key=lambda row: row.validation) if any(row.validation for row in rows) else None
    return Block(", ".join(where), conditions(inside[0].recipe), rows, chosen, summary.baselines(rows))


def verdict(found: Block) -> str:
    """One sentence: the method with the highest validation accuracy, and what it gains over each baseline."""
    if not found.rows:
        return "All cells failed."
    row = found.chosen
    if row is None:
        return "Without validation data no method is selected; the table has their test accuracies."
    seeds = f"{row.accuracy.count} seed{'s' * (row.accuracy.count != 1)}"
    reached = f"{units.percent(row.accuracy.mean)} of the test samples (mean over {seeds}, {row.clients} pairs of client and seed)"
    if row.method in ALWAYS:
        return f"By validation accuracy no method is better than the baseline {row.method}, which classifies {reached} correctly."
    gains = "".join(f", {difference_text(each)}" for each in row.differences.values())
    return f"Of {len(found.rows)} methods {row.method} has the highest validation accuracy and classifies {reached} correctly{gains}."


def difference_text(found: PairedDifference) -> str:
    """Format a paired difference with its interval and n."""
    n = f"n = {found.seeds} seeds" if found.over == "seeds" else f"n = {found.pairs} clients"
    low, high = (None if isnan(end) else end for end in (found.low, found.high))
    return facts.compared(found.baseline, found.mean, low, high, n)


def save(
    cells: Sequence[Cell], measured: Mapping[str, CellResult], folder: Path, watch: Watch = unwatched
) -> list[Path]:
    """Write the figures of a comparison into FOLDER/plots/."""
    paths: list[Path] = []
    drawn = list(of_cells(cells, measured, folder, watch))
    for done, one in enumerate(drawn, 1):
        paths += style.save(one.figure, folder / "plots", one.name)
        watch(Count("plots", done, len(drawn)))
    return paths


def of_cells(
    cells: Sequence[Cell], measured: Mapping[str, CellResult], folder: Path, watch: Watch = unwatched
) -> Iterator[Drawn]:
    """The figures of a comparison; features and labels are those of the first seed."""
    every = list(blocks(cells))
    for number, (block, inside) in enumerate(every):
        watch(Count("figures by dataset and partition", number, len(every)))
        runs: dict[str, list[tuple[Cell, CellResult]]] = {}
        for cell in inside:
            if cell.key in measured and not measured[cell.key].failure:
                runs.setdefault(cell.label, []).append((cell, measured[cell.key]))
        name = re.sub(r"[^a-z0-9.]+", "-", " ".join(block))
        for drawn in _of_block(runs, ", ".join(block), folder, watch):
            yield replace(drawn, name=f"{name}-{drawn.name}")
    watch(Count("figures by dataset and partition", len(every), len(every)))


def _of_block(runs: Runs, where: str, folder: Path, watch: Watch) -> Iterator[Drawn]:
    if len(runs) < 2:
        return
    over = _over(runs)
    yield from _final(runs, where, over)
    yield from _by_step(runs, where, over)
    yield from _features(runs, where, folder, watch)


def _final(runs: Runs, where: str, over: str) -> Iterator[Drawn]:
    marks, clients = {}, {}
    for label, each in runs.items():
        means = [result.last[AFTER].mean for _, result in each if AFTER in result.last]
        found = [value for _, result in each for value in summary.by_client(result).values()]
        if not found:
            continue
        half = metrics.interval(found)[1] - float(np.mean(found))
        reach = float(np.std(means)) if len(means) > 1 else half
        traffic = [COSTS["megabytes"][1](cumulative(result)[-1]) for _, result in each]
        marks[label] = Mark(float(np.mean(means)), reach, float(np.mean(traffic)))
        clients[label] = found
    several = max(map(len, runs.values())) > 1
    bars = "±1 std over seeds" if several else "95 % CI over clients"
    if len(marks) < 2:
        return
    yield Drawn(
        "final",
        plots.final(marks, "final test accuracy", f"{over}; bars: {bars}."),
        f"Final accuracy by method, {where}",
        f"Mean test accuracy of the clients' own models after the final personalisation, on {where}.",
    )
    if any(len(found) > 1 for found in clients.values()):
        yield Drawn(
            "clients",
            plots.clients(clients, "final test accuracy", f"{plots.BOX}; {_seeds(runs)}."),
            f"Accuracy of each client by method, {where}",
            f"Test accuracy of each client's own model after the final personalisation, on {where}.",
        )
    if sum(mark.cost > 0 for mark in marks.values()) > 1:
        cost = "MB to and from a client in all rounds"
        yield Drawn(
            "accuracy-against-bytes",
            plots.by_cost(marks, "final test accuracy", cost, f"{over}; bars: {bars}."),
            f"Final accuracy against bytes, {where}",
            f"Final test accuracy against the tensors sent to and from a client in all rounds (1 MB = 10⁶ bytes), on {where}.",
        )


def _by_step(runs: Runs, where: str, over: str) -> Iterator[Drawn]:
    curves = _curves(runs)
    if not any(len(curve.rounds) for curve in curves.values()):
        return
    several = max(map(len, runs.values())) > 1
    note = over + "; band: ±1 std over seeds" * several
    if ending := [label for label, curve in curves.items() if not len(curve.rounds)]:
        note += f"; predicts only at the end: {', '.join(ending)}"
    yield Drawn(
        "accuracy",
        plots.accuracy(curves, "mean test accuracy", f"{note}.", order=list(runs)),
        f"Accuracy by round, {where}",
        f"Mean test accuracy by round of the model that each method predicts with, on {where}.",
    )
    for name, (step, cost) in COSTS.items():
        if against := _against(cost, curves, runs):
            yield Drawn(
                f"accuracy-by-{name}",
                plots.accuracy(
                    against,
                    "mean test accuracy",
                    f"{over}; the last point is after the final personalisation.",
                    step=step,
                    log=True,
                    order=list(runs),
                ),
                f"Accuracy by {name}, {where}",
                f"Mean test accuracy against the {step}, up to the final personalisation, on {where}.",
            )


def _features(runs: Runs, where: str, folder: Path, watch: Watch) -> Iterator[Drawn]:
    study = studies.prepare(next(iter(runs.values()))[0][0].recipe)
    if len(study.split.clients) > 1:
        yield Drawn(
            "labels-by-client",
            labels_by_client(study),
            f"Labels by client, {where}",
            f"Samples of each class at each client of {where}.",
        )
    seen: dict[str, list[FeatureProbe]] = {}
    for label, each in runs.items():
        if found := [one for _, result in each if (one := cell_runs.read_probe(result, folder))]:
            seen[label] = found
    if len(seen) < 2:
        return
    over, several = _over(runs), max(map(len, runs.values())) > 1
    summed = {}
    for label, every in seen.items():
        over_seeds = mean_std(mean_std(one.separation().values()).mean for one in every)
        summed[label] = (over_seeds.mean, over_seeds.std)
    yield Drawn(
        "separation",
        plots.separation(summed, "", over + "; bars: ±1 std over seeds" * several + "."),
        f"Class separation by method, {where}",
        f"Class separation of the features of test samples, within each client of {where}.",
    )
    first = {label: every[0] for label, every in seen.items()}
    yield Drawn(
        "cka-similarity",
        plots.similarity(similarities([one.outermost for one in first.values()]), list(first), "method"),
        f"CKA similarity of methods, {where}",
        f"Linear CKA similarity of the methods' features on the same test samples of {where}.",
    )
    at: dict[str, Features] = {}
    for label, one in first.items():
        watch(Count("t-SNE of the features", len(at), len(first)))
        at[label] = features.tsne(one.outermost)
    watch(Count("t-SNE of the features", len(at), len(first)))
    by_class = {label: Points(at[label], one.y, study.dataset.classes) for label, one in first.items()}
    by_client = {label: Points(at[label], one.client, one.clients) for label, one in first.items()}
    for name, points in (("class", by_class), ("client", by_client)):
        yield Drawn(
            f"features-by-{name}",
            plots.embedding(points),
            f"Features by {name}, {where}",
            f"t-SNE of the features of test samples by {name}, of {where}.",
        )


def _seeds(runs: Runs) -> str:
    most = max(map(len, runs.values()))
    return f"{most} seed{'s' * (most != 1)}"


def _over(runs: Runs) -> str:
    """What the means are over: clients and seeds, with the methods that lack some."""
    clients = {len(summary.by_client(result)) for each in runs.values() for _, result in each} - {0}
    number = f"{min(clients)} to {max(clients)}" if len(clients) > 1 else f"{max(clients, default=0)}"
    most = max(map(len, runs.values()))
    fewer = [f"{label} {len(each)}" for label, each in runs.items() if len(each) < most]
    return f"Mean over {_seeds(runs)} of {number} clients" + f" ({', '.join(fewer)})" * bool(fewer)


def _curves(runs: Runs) -> dict[str, Curve]:
    """Accuracy of the model that each method predicts with, over the rounds in which all seeds were evaluated.

    A method with a single point has only its end: the accuracy after the final personalisation, or at that point.
    """
    curves = {}
    for label, each in runs.items():
        seeds = [
            {p.round: value for p in one.curve if (value := _predicting(p.means)) is not None}
            for _, one in each
        ]
        rounds = sorted(set.intersection(*(set(seed) for seed in seeds)))
        values = np.array([[seed[number] for number in rounds] for seed in seeds])
        after = [one.last[AFTER].mean for _, one in each if AFTER in one.last]
        if len(rounds) < 2:
            if ends := after or list(values.ravel()):
                curves[label] = Curve([], np.array([]), np.array([]), float(np.mean(ends)))
            continue
        curves[label] = Curve(
            rounds, values.mean(axis=0), values.std(axis=0), float(np.mean(after)) if after else None
        )
    return curves


def _against(cost: Callable[[Cost], float], curves: Mapping[str, Curve], runs: Runs) -> dict[str, Curve]:
    """The curves by a cumulative cost, the mean over seeds, up to the final personalisation; without methods that do not have it."""
    found = {}
    for label, curve in curves.items():
        by_round = [
            dict(zip([*(point.round for point in one.curve), FINAL], map(cost, cumulative(one)), strict=True))
            for _, one in runs[label]
        ]
        ends = [*curve.rounds, *([] if curve.after is None else [FINAL])]
        costs = [float(np.mean([each[end] for each in by_round])) for end in ends]
        if any(costs):
            values = np.append(curve.mean, [] if curve.after is None else curve.after)
            found[label] = Curve(costs, values, np.zeros(len(values)))
    return found


def _predicting(means: Mapping[str, float]) -> float | None:
    return next((means[name] for name in CURVES if name in means), None)
