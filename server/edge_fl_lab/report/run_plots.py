"""The figures of a run, drawn from its folder into RUN/plots/ as PDF, SVG and PNG: those of its report, and of its features."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from edge_fl.data import partition
from edge_fl.errors import ArtefactError, InputError
from edge_fl_lab import features, trained
from edge_fl_lab.report import page, plots, style
from edge_fl_lab.report.plots import Points
from edge_fl_lab.trained import TrainedRun
from edge_fl_server.runs.results import Results
from edge_fl_server.training.studies import Study

ABSENT = {
    "accuracy": "fewer than two rounds were evaluated",
    "accuracy-by-megabytes": "fewer than two rounds were evaluated, or their bytes are not known",
    "clients": "fewer than two clients were evaluated",
    "labels": "no device measured accuracy by labels (head auto)",
    "labels-by-client": "there is one client",
    "features": "",
    "separation": "there is one client",
    "cka-similarity": "there is one client, or all clients have the same extractor",
}
"""Every figure of a run -> why a run lacks it, if its data are there."""
COMMON_IMAGES = 300  # for the CKA similarity of the clients' networks

TRAINED = ("labels-by-client", "features", "separation", "cka-similarity")
"""Figures that need the run's data and checkpoint."""
SAME = 0.9995
"""CKA similarity above which all clients have the same extractor."""


def of_run(results: Results) -> tuple[list[Path], dict[str, list[str]]]:
    """Draw the figures of a run: those of its report, and, with its data and checkpoint on this machine, its labels and features.

    Returns the written files, and the figures that the run lacks by reason.
    """
    why = ABSENT
    drawn = {one.name: one.figure for one in page.figures_of(page.report(results))}
    try:
        run = trained.load(results)
    except (ArtefactError, InputError) as error:
        # the data are on devices, or the run ended before its first checkpoint
        if not drawn:
            raise
        why = ABSENT | dict.fromkeys(TRAINED, error.message)
    else:
        drawn |= _of_trained(run)
    absent: dict[str, list[str]] = {}
    for name in why:
        if name not in drawn:
            absent.setdefault(why[name], []).append(name)
    files = [path for name, picture in drawn.items() for path in style.save(picture, results.plots, name)]
    return files, absent


def _of_trained(run: TrainedRun) -> dict[str, Figure]:
    dataset, data = run.study.dataset, run.study.data()
    drawn: dict[str, Figure] = {}
    if len(run.study.split.clients) > 1:
        drawn["labels-by-client"] = labels_by_client(run.study)
    own = [(id, parts) for id, parts in run.personal.items() if id in data] or [(id, {}) for id in data]
    seen = features.probe(run.method, run.shared, own, data)
    spaces = {"features": seen.z}
    if seen.projected is not None:
        spaces = {"before the projector": seen.z, "after the projector": seen.projected}
    panels = {}
    for name, z in spaces.items():
        at = features.tsne(z)
        panels[f"{name}, by class"] = Points(at, seen.y, dataset.classes)
        panels[f"{name}, by client"] = Points(at, seen.client, seen.clients)
    drawn["features"] = plots.embedding(panels)
    by_client = {client: (value, 0.0) for client, value in seen.separation().items()}
    if len(by_client) > 1:
        drawn["separation"] = plots.separation(by_client, "client")
    images = np.concatenate([data[id].test.x for id in sorted(data)])
    some = images[np.linspace(0, len(images) - 1, min(COMMON_IMAGES, len(images))).astype(int)]
    seen_by = features.representations(run.method, run.shared, own, torch.from_numpy(some))
    if len(seen_by) > 1:
        matrix = similarities(list(seen_by.values()))
        if matrix.min() < SAME:
            drawn["cka-similarity"] = plots.similarity(matrix, list(seen_by), "client")
    return drawn


def labels_by_client(study: Study) -> Figure:
    """The number of samples of each class at each client."""
    counts = partition.histogram(study.dataset, study.split)
    return plots.labels(counts, study.split.clients, study.dataset.classes)


def similarities(seen: Sequence[features.Features]) -> NDArray[np.float64]:
    """CKA similarity of every two networks."""
    matrix = np.eye(len(seen))
    for a, b in combinations(range(len(seen)), 2):
        matrix[a, b] = matrix[b, a] = features.linear_cka(seen[a], seen[b])
    return matrix
