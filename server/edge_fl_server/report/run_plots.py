"""The figures of a run and of a comparison, drawn from their folders into RUN/plots/ and FOLDER/plots/ as SVG and PNG."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from math import isnan
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from edge_fl import metrics
from edge_fl.data import partition
from edge_fl.errors import ArtefactError, InputError
from edge_fl_server.compare import cell as cells_of
from edge_fl_server.compare.cell import CellResult
from edge_fl_server.compare.grid import Cell, blocks
from edge_fl_server.compare.summary import FINAL, MEGABYTE, Cost, cumulative, mean_std
from edge_fl_server.report import plots, style
from edge_fl_server.report.plots import Curve, Points
from edge_fl_server.runs import trained
from edge_fl_server.runs.results import Results
from edge_fl_server.runs.trained import TrainedRun
from edge_fl_server.training import features
from edge_fl_server.training import study as studies
from edge_fl_server.training.features import Probe

CURVES = (metrics.PERSONAL_BEFORE, metrics.GLOBAL_TEST)
AFTER = metrics.PERSONAL_AFTER
COSTS: dict[str, tuple[str, Callable[[Cost], float]]] = {
    "megabytes": ("MB to and from a client", lambda cost: (cost.bytes_down + cost.bytes_up) / MEGABYTE),
    "device-seconds": ("processor seconds of a client", lambda cost: cost.device_seconds),
}
COMMON_IMAGES = 300  # for the CKA similarity of the clients' networks


def of_run(results: Results) -> list[Path]:
    """Draw the figures of a run: its accuracy, and, with its data and checkpoint on this machine, its labels and features."""
    drawn: dict[str, Figure] = {}
    if curves := _curves_of_run(results):
        drawn["accuracy"] = plots.accuracy(curves, "mean accuracy over clients")
    try:
        run = trained.load(results)
    except (
        ArtefactError,
        InputError,
    ):  # the data are on devices, or the run ended before its first checkpoint
        if not drawn:
            raise
    else:
        drawn |= _of_trained(run)
    return [path for name, picture in drawn.items() for path in style.save(picture, results.plots, name)]


def of_comparison(cells: Sequence[Cell], measured: Mapping[str, CellResult], folder: Path) -> list[Path]:
    """Draw the figures of a comparison by dataset and partition; features and labels are those of the first seed."""
    paths = []
    for block, inside in blocks(cells):
        chosen = [cell for cell in inside if cell.key in measured]
        runs = [(cell, measured[cell.key]) for cell in chosen if not measured[cell.key].failure]
        name = re.sub(r"[^a-z0-9.]+", "-", " ".join(block))
        for what, picture in _of_block(runs, folder):
            paths += style.save(picture, folder / "plots", f"{name}-{what}")
    return paths


def _of_trained(run: TrainedRun) -> dict[str, Figure]:
    dataset, data = run.study.dataset, run.study.data()
    drawn = {"labels": _labels(run.study)}
    own = [(id, parts) for id, parts in run.personal.items() if id in data] or [(id, {}) for id in data]
    seen = features.probe(run.method, run.shared, own, data)
    spaces = {"features": seen.z}
    if seen.projected is not None:
        spaces = {"features before the projector": seen.z, "features after it": seen.projected}
    panels = {}
    for name, z in spaces.items():
        at = features.tsne(z)
        panels[f"{name}, by class"] = Points(at, seen.y, dataset.classes)
        panels[f"{name}, by client"] = Points(at, seen.client, seen.clients)
    drawn["features"] = plots.embedding(panels)
    by_client = {client: (value, 0.0) for client, value in seen.separation().items()}
    drawn["separation"] = plots.separation(by_client, "client")
    images = np.concatenate([data[id].test.x for id in sorted(data)])
    some = images[np.linspace(0, len(images) - 1, min(COMMON_IMAGES, len(images))).astype(int)]
    seen_by = features.representations(run.method, run.shared, own, torch.from_numpy(some))
    if len(seen_by) > 1:
        matrix = _similarity(list(seen_by.values()))
        drawn["cka-similarity"] = plots.similarity(matrix, list(seen_by), "client")
    return drawn


def _of_block(runs: Sequence[tuple[Cell, CellResult]], folder: Path) -> Iterator[tuple[str, Figure]]:
    if not runs:
        return
    study = studies.prepare(runs[0][0].recipe)
    yield "labels", _labels(study)
    if curves := _curves_of_cells(runs):
        yield "accuracy", plots.accuracy(curves, "mean accuracy over clients")
    for name, (step, cost) in COSTS.items():
        if against := _against(cost, curves, runs):
            yield (
                f"accuracy-by-{name}",
                plots.accuracy(against, "mean accuracy over clients", step=step, log=True),
            )
    seen: dict[str, list[Probe]] = {}
    for cell, _ in runs:
        if one := cells_of.read_probe(cell.key, folder):
            seen.setdefault(cell.label, []).append(one)
    if not seen:
        return
    values = {
        label: [mean_std(one.separation().values()).mean for one in every] for label, every in seen.items()
    }
    summed = {label: (float(np.mean(each)), float(np.std(each))) for label, each in values.items()}
    yield "separation", plots.separation(summed, "method, mean over clients")
    first = {label: every[0] for label, every in seen.items()}
    if len(first) > 1:
        outermost = [one.outermost for one in first.values()]
        yield "cka-similarity", plots.similarity(_similarity(outermost), list(first), "method")
    at = {label: features.tsne(one.outermost) for label, one in first.items()}
    by_class = {label: Points(at[label], one.y, study.dataset.classes) for label, one in first.items()}
    yield "features-by-class", plots.embedding(by_class)
    by_client = {label: Points(at[label], one.client, one.clients) for label, one in first.items()}
    yield "features-by-client", plots.embedding(by_client)


def _labels(study: studies.Study) -> Figure:
    counts = partition.histogram(study.dataset, study.split)
    return plots.labels(counts, study.split.clients, study.dataset.classes)


def _curves_of_run(results: Results) -> dict[str, Curve]:
    means: dict[str, dict[int, float]] = {name: {} for name in CURVES}
    for record in results.rounds():
        for name, summary in record.metrics.items():
            if name in means and not isnan(summary.mean):
                means[name][record.round] = summary.mean
    summaries = results.summary()
    after = summaries[AFTER].mean if AFTER in summaries else None
    return {
        name: Curve(
            list(by_round),
            np.array(list(by_round.values())),
            np.zeros(len(by_round)),
            after if name == metrics.PERSONAL_BEFORE else None,
        )
        for name, by_round in means.items()
        if by_round or (name == metrics.PERSONAL_BEFORE and after is not None)
    }


def _curves_of_cells(runs: Sequence[tuple[Cell, CellResult]]) -> dict[str, Curve]:
    """Accuracy of the model that each method predicts with, over the rounds in which all seeds were evaluated."""
    curves = {}
    for label in dict.fromkeys(cell.label for cell, _ in runs):
        seeds = [
            {p.round: value for p in one.curve if (value := _predicting(p.means)) is not None}
            for cell, one in runs
            if cell.label == label
        ]
        rounds = sorted(set.intersection(*(set(seed) for seed in seeds)))
        values = np.array([[seed[number] for number in rounds] for seed in seeds])
        after = [one.last[AFTER].mean for cell, one in runs if cell.label == label and AFTER in one.last]
        curves[label] = Curve(
            rounds, values.mean(axis=0), values.std(axis=0), float(np.mean(after)) if after else None
        )
    return curves


def _against(
    cost: Callable[[Cost], float], curves: Mapping[str, Curve], runs: Sequence[tuple[Cell, CellResult]]
) -> dict[str, Curve]:
    """The curves by a cumulative cost, the mean over seeds, up to the final personalisation; without methods that do not have it."""
    found = {}
    for label, curve in curves.items():
        by_round = [
            dict(zip([*(point.round for point in one.curve), FINAL], map(cost, cumulative(one)), strict=True))
            for cell, one in runs
            if cell.label == label
        ]
        ends = [*curve.rounds, *([] if curve.after is None else [FINAL])]
        costs = [float(np.mean([each[end] for each in by_round])) for end in ends]
        if any(costs):
            values = np.append(curve.mean, [] if curve.after is None else curve.after)
            found[label] = Curve(costs, values, np.zeros(len(values)))
    return found


def _predicting(means: Mapping[str, float]) -> float | None:
    return next((means[name] for name in CURVES if name in means), None)


def _similarity(seen: Sequence[features.Features]) -> NDArray[np.float64]:
    matrix = np.eye(len(seen))
    for a, b in combinations(range(len(seen)), 2):
        matrix[a, b] = matrix[b, a] = features.linear_cka(seen[a], seen[b])
    return matrix
