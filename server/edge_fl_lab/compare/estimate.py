"""Estimate how long the missing cells of a comparison take, before the first one runs.

A method with a finished cell takes as long again; of others a round of one client with a few batches is measured, and extrapolated by
batches and evaluations (`edge_fl_server.training.engines.choice`). Measuring takes about SHARE of the estimate at most: methods left over
are estimated from those that are known, by the stated costs of methods (`edge_fl_server.recipes.hours`). Cells that share their rounds
count once.

Clients are assumed to train one after another, as in a comparison on CPUs. Processor time is measured, because what other programs take
within a second tells little about hours.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from statistics import fmean

from msgspec.structs import replace
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn

from edge_fl.console import units
from edge_fl.console.progress import Count, Watch, unwatched
from edge_fl.data.partition import DataConfig
from edge_fl_lab.compare import cell_runs
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import Cell, rounds_of, trainings
from edge_fl_server.orchestrate import execution
from edge_fl_server.recipes import hours
from edge_fl_server.training.engines import choice, processes
from edge_fl_server.training.studies import ClientStore

SHARE = 0.02


@dataclass(frozen=True)
class Estimate:
    """Expected seconds of each cell by key, and of each training that cells share (`grid.trainings`).

    `measured` methods were measured, in `took_s` seconds; `finished` ones have finished cells.
    """

    cells: dict[str, float]
    trainings: list[float]
    measured: int
    took_s: float
    finished: int

    def seconds(self, jobs: int) -> float:
        """Expected seconds of all trainings, `jobs` at a time on the cores of this machine: no less than the longest. NaN: not known."""
        return max(sum(self.trainings) / min(jobs, processes.cores()), max(self.trainings, default=0.0))

    def text(self, jobs: int) -> str:
        """In words: "24 cells, about 6.3 h with 2 jobs (estimated from a few steps of 8 methods, measured in 12 s)"."""
        if not self.cells:
            return "no cell is missing"
        sources = []
        if self.finished:
            sources.append(f"the finished cells of {units.counted(self.finished, 'method')}")
        if self.measured:
            took = units.seconds(self.took_s, 0)
            sources.append(f"a few steps of {units.counted(self.measured, 'method')}, measured in {took}")
        duration = units.seconds(self.seconds(jobs), 0)
        said = f"about {duration} with {units.counted(jobs, 'job')} (estimated from {' and '.join(sources)})"
        return f"{units.counted(len(self.cells), 'cell')}, {said if sources else 'unknown time'}"


def of_cells(cells: Sequence[Cell], finished: Iterable[CellResult], watch: Watch = unwatched) -> Estimate:
    """Estimate cells whose data and methods are there; `finished` are results, whatever their inputs."""
    known: dict[str, list[float]] = {}
    for result in finished:
        if not result.failure:
            known.setdefault(_kind(Cell(result.label, result.recipe)), []).append(result.seconds)
    seconds = {kind: fmean(each) for kind, each in known.items()}
    groups = trainings(cells)
    todo: dict[str, Cell] = {}
    for first, *_ in groups:
        todo.setdefault(_kind(first), first)
    missing = [kind for kind in todo if kind not in seconds]
    from_finished, measured = len(todo) - len(missing), 0
    began, took_s = time.monotonic(), 0.0
    for place, kind in enumerate(missing):
        watch(Count("estimate", place, len(missing)))
        if took_s > SHARE * sum(_of_each(groups, _expected(todo, seconds))):
            break
        try:
            seconds[kind] = _measured(todo[kind])
            measured += 1
        except Exception:  # the cell itself will say what is wrong
            continue
        finally:
            took_s = time.monotonic() - began
    watch(Count("estimate", len(missing), len(missing)))
    expected = _expected(todo, seconds)
    each = {cell.key: expected[_kind(cell)] for cell in cells}
    return Estimate(each, _of_each(groups, expected), measured, took_s, from_finished)


def _of_each(groups: Sequence[Sequence[Cell]], expected: Mapping[str, float]) -> list[float]:
    return [expected[_kind(group[0])] for group in groups]


def _expected(todo: Mapping[str, Cell], known: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each kind: the known ones, or in proportion to these by their costs; NaN if nothing is known."""
    rates = [known[kind] / _cost(cell) for kind, cell in todo.items() if kind in known]
    rate = fmean(rates) if rates else nan
    return {kind: known.get(kind, rate * _cost(cell)) for kind, cell in todo.items()}


def _cost(cell: Cell) -> float:
    """What a round of a method costs in proportion to others."""
    config = cell.recipe.method
    cost = hours.costs().methods.get(config.name.removesuffix("+ft"))
    return (cost.train if cost else 1.0) * max(config.epochs, 1)


def _kind(cell: Cell) -> str:
    """Equal for cells that take about as long: final personalisation, seeds and partitions make little difference."""
    recipe, usual = rounds_of(cell.recipe), DataConfig()
    same = replace(
        recipe.data,
        data_dir="",
        partition=usual.partition,
        beta=usual.beta,
        classes_per_client=usual.classes_per_client,
    )
    return Cell("", replace(recipe, seed=0, data=same)).key


def _measured(cell: Cell) -> float:
    """Seconds of a cell, from a few steps of one client."""
    setup = execution.of_study(cell_runs.prepare(cell))
    assert setup.study is not None
    clock = time.process_time if setup.device == "cpu" else time.perf_counter
    with processes.threads(1), threadpool_limits(1):
        return choice.run_seconds(ClientStore.of(setup.study, setup.device), setup.plan, clock)
