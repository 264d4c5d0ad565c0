"""Run one method: `run`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from numpy.typing import ArrayLike

from edge_fl.console.output import QUIET
from edge_fl.console.progress import Progress
from edge_fl_lab.report import page
from edge_fl_lab.research.data import Clients, Data
from edge_fl_lab.research.result import Result, ResultHooks
from edge_fl_lab.research.settings import Settings, recipe_of
from edge_fl_server.orchestrate import run as orchestrator
from edge_fl_server.orchestrate.execute import simulate
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.training import study as studies


def run(
    method: str,
    images: str | ArrayLike,
    labels: ArrayLike | None = None,
    *,
    test: Sequence[ArrayLike] | None = None,
    clients: Clients = None,
    partition: str = "",
    model: str | type = "",
    rounds: int | None = None,
    seed: int | None = None,
    engine: str = "",
    recipe: str | Path | Recipe = "",
    settings: Settings = (),
    folder: str | Path | None = None,
    progress: bool = False,
) -> Result:
    """Simulate a federation that trains a method, in this process or with worker processes.

    `method` is a name of `edge-fl methods list`, with options as in `edge-fl compare`: "fedcrc:tau=0.9". `images` is the name of a dataset,
    or an array [N, H, W], [N, H, W, C] or [N, C, H, W] with C 1 or 3, uint8 or floats 0..1; `labels` are class ids [N]. `test` are separate
    test samples, (images, labels); without them each client's samples are divided into training, validation and test samples.

    `clients` is their number, or names the client of each sample by an array of numbers or names (then `test` is (images, labels,
    clients)), or is a split: a `Split` or the path of a split file. `partition` is a rule for drawing clients: "dirichlet:0.1",
    "pathological:2", "iid" or "domain".

    `model` is a name of `edge-fl models list`, "package.module:Class" or a class; `engine` auto, sequential, pool, vector or ray. `recipe`
    is a recipe to start from, by name or path; `settings` change any of its settings: {"cohort.participation": 0.5}. With a `folder`, a run
    of `edge-fl runs list` is written below it, with the arrays and a report. `progress` prints progress on stderr.

    Raises InputError, before anything starts, for data or settings that do not fit; RunError if the run cannot continue.
    """
    data = Data(images, labels, test, clients)
    given = {"rounds": rounds, "seed": seed, "engine": engine or None}
    base = recipe_of(recipe, method, data, partition, model, given, settings)
    hooks = ResultHooks()
    if folder is None:
        study = data.study(base)
        with quiet(not progress), Progress() as shown:
            outcome = simulate(study, hooks, shown, shown.print)
        return hooks.result(study, outcome, None)
    saved = data.saved(base, Path(folder))
    with quiet(not progress):
        results, outcome = orchestrator.run(saved, Path(folder), hooks=hooks)
        page.write(results)
    return hooks.result(studies.prepare(saved), outcome, results.path)


@contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Print no progress in the block."""
    before = os.environ.get(QUIET)
    if wanted:
        os.environ[QUIET] = "1"
    try:
        yield
    finally:
        if wanted:
            os.environ.pop(QUIET)
            if before is not None:
                os.environ[QUIET] = before
