"""Rounds of a whole federation on the vectorised engine, with evaluation, each with its wall-clock time."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from edge_fl.data import datasets
from edge_fl.data.samples import Dataset, Samples
from edge_fl.inputs import InputSpec
from edge_fl.learn.tree import to_device
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl_server.training import rounds
from edge_fl_server.training.engines.choice import ENGINES
from edge_fl_server.training.rounds import Plan, Reports
from edge_fl_server.training.studies import ClientStore, Study
from tools.bench import workloads
from tools.bench.measure import settle


class Timed(NamedTuple):
    """A round, its duration in seconds with its evaluation, and the accuracy over all test images (None if not evaluated)."""

    seconds: float
    accuracy: float | None


def timed(study: Study, device: str) -> Iterator[Timed]:
    """Train as the study's recipe says on the vectorised engine, yielding each round."""
    method = build_method(study.spec)
    method.net.to(device)
    fleet = ENGINES["vector"](ClientStore.of(study, device), method)
    shared = to_device(steps.start(method), device)
    start = time.perf_counter()
    for result in rounds.run(method, fleet, Plan.of(study.recipe, method), shared):
        settle(device)
        seconds = time.perf_counter() - start
        yield Timed(seconds, _accuracy(study, result.metrics) if result.metrics else None)
        start = time.perf_counter()


def images(name: str, count: int, input: InputSpec) -> Dataset:
    """The first `count` images of a dataset in the folder EDGE_FL_DATA, or as many synthetic ones."""
    folder = Path(os.environ.get("EDGE_FL_DATA", ".data"))
    if not (folder / f"{name}.npz").is_file():
        return workloads.images(count, input)
    dataset = datasets.DATASETS[name](folder)
    first = Samples(dataset.samples.x[:count], dataset.samples.y[:count])
    return Dataset(name, first, dataset.classes)


def _accuracy(study: Study, metrics: Reports) -> float:
    sizes = {id: len(rows) for id, rows in zip(study.split.clients, study.split.test, strict=True)}
    return sum(metrics[id]["global.test_acc"] * size for id, size in sizes.items()) / sum(sizes.values())
