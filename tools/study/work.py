"""The whole study as a list of cells: first the trials of each method on one federation per dataset, then all federations.

Finished cells are stored, so a study can be interrupted, or run for some minutes at a time.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edge_fl_lab.compare import tuning
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import Cell
from edge_fl_lab.compare.tuning import Tuning
from tools.study import runs
from tools.study.settings import (
    GRIDS,
    METHODS,
    SEEDS,
    TRIALS,
    TUNED_ON,
    TUNING_SEED,
    VARIANTS,
    Setting,
    cell,
    settings,
)


class PausedError(Exception):
    """The time is over; the next call continues."""


@dataclass(frozen=True)
class Plan:
    """Which part of the study to run, on which data, and how long (`until` on the monotonic clock)."""

    data_dir: Path
    folder: Path
    datasets: tuple[str, ...]
    methods: tuple[str, ...] = (*METHODS, *VARIANTS)
    seeds: tuple[int, ...] = SEEDS
    trials: int = TRIALS
    until: float = float("inf")


@dataclass(frozen=True)
class Run:
    """A finished cell of the study."""

    setting: Setting
    seed: int
    label: str
    result: CellResult


def tuned(plan: Plan, dataset: str) -> dict[str, Tuning]:
    """The trials of every method on the first federation of the dataset, or of the one that it is tuned on, with a seed that is not
    the study's.
    """
    setting = settings((TUNED_ON.get(dataset, dataset),))[0]
    cells = [cell(setting, plan.data_dir, TUNING_SEED, label) for label in plan.methods]
    found = tuning.search(cells, lambda batch: _all(plan, batch), plan.trials, GRIDS)
    return {each.method: each for each in found}


def study(plan: Plan) -> Iterator[Run]:
    """Every cell of the plan, seed by seed. Raises PausedError when the time is over."""
    chosen = {dataset: tuned(plan, dataset) for dataset in plan.datasets}
    for seed in plan.seeds:
        for setting in settings(plan.datasets):
            for label, trials in chosen[setting.dataset].items():
                usual = cell(setting, plan.data_dir, seed, label)
                best = tuning.configured(usual, trials.chosen, trials.default)
                yield Run(setting, seed, label, _one(plan, best))


def _all(plan: Plan, cells: Sequence[Cell]) -> dict[str, CellResult]:
    return {each.key: _one(plan, each) for each in cells}


def _one(plan: Plan, cell: Cell) -> CellResult:
    if time.monotonic() > plan.until:
        raise PausedError
    return msgspec.structs.replace(runs.run(cell, plan.folder), label=cell.label)
