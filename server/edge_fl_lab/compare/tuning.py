"""Tuned comparisons: the search for each method's learning rate and own hyper-parameters, with equally many trials for every method.

A trial is an ordinary cell with the first seed, so it is stored and never run twice. The first one is untuned. A coordinate search from
the best values so far follows: two more learning rates, all other values of each hyper-parameter in the method's `grid`, two more learning
rates, and so on until all trials are used. A method without a grid spends them all on its learning rate. New learning rates lie halfway, on
a logarithmic scale, between the best one and its neighbours, or a factor of 3 away where there is none; the larger comes first.

The best trial has the highest mean validation accuracy over clients after the final personalisation; of equal ones it is the first. Test
data play no part.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from math import sqrt

import msgspec
from msgspec import Struct

from edge_fl import methods
from edge_fl.config import Option
from edge_fl.errors import InputError, nearest
from edge_fl.methods.contract.method import check_hypers
from edge_fl.methods.finetuned import FineTuned
from edge_fl.toml import parse_value
from edge_fl_lab.compare import cell_runs
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import Cell, parse_method
from edge_fl_lab.compare.summary import validation

TRIALS = 6
LR = "lr"
FACTOR = 3.0  # between learning rates, at first

Values = dict[str, Option]
"""The learning rate ("lr") and the tuned hyper-parameters of a method."""

Grid = Mapping[str, Sequence[Option]]
Run = Callable[[Sequence[Cell]], Mapping[str, CellResult]]


class Trial(Struct, frozen=True):
    """A trained configuration and its validation accuracy; None if its cell failed."""

    values: Values
    key: str
    validation: float | None
    failure: str = ""


class Tuning(Struct, frozen=True):
    """The trials of a method on one dataset and partition with one seed; the first is untuned."""

    method: str
    dataset: str
    partition: str
    seed: int
    trials: list[Trial]

    @property
    def default(self) -> Values:
        """The untuned values."""
        return self.trials[0].values

    @property
    def chosen(self) -> Values:
        """The values of the best trial."""
        return max(
            self.trials, key=lambda trial: -1.0 if trial.validation is None else trial.validation
        ).values


def search(
    cells: Sequence[Cell], run: Run, trials: int = TRIALS, grids: Mapping[str, Grid] | None = None
) -> list[Tuning]:
    """Tune every method of a comparison on each dataset and partition; `run` trains cells, `grids` replace those of methods by name.

    Raises InputError before anything runs if clients have no validation data, or a value does not suit the model.
    """
    untuned = of_first_seed(cells)
    for cell in {cell.block: cell for cell in untuned}.values():
        _require_validation(cell)
    searches = [_MethodSearch(cell, _grid(cell, grids or {}), trials) for cell in untuned]
    while any(todo := [each.next() for each in searches]):
        pairs = [(each, *pair) for each, batch in zip(searches, todo, strict=True) for pair in batch]
        results = run([cell for _, _, cell in pairs])
        for each, values, cell in pairs:
            each.record(values, results[cell.key])
    return [each.tuning() for each in searches]


def variants(cells: Sequence[Cell], grids: Mapping[str, Grid] | None = None) -> list[Cell]:
    """The cells of the first seed with each value of their grids alone, for checks before anything runs.

    Raises InputError for values of a method that is not compared.
    """
    compared = {cell.recipe.method.name for cell in cells}
    if unused := sorted(set(grids or {}) - compared):
        raise InputError(f"--tune-values: {unused[0]} is not compared{nearest(unused[0], compared)}")
    return [
        configured(cell, {**each.default, key: value}, each.default)
        for cell in of_first_seed(cells)
        if (each := _MethodSearch(cell, _grid(cell, grids or {}), 0))
        for key, values in each.grid.items()
        for value in values
    ]


def of_first_seed(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that tuning starts from."""
    first = min(cell.recipe.seed for cell in cells)
    return [cell for cell in cells if cell.recipe.seed == first]


def tuned(cells: Sequence[Cell], tunings: Sequence[Tuning]) -> list[Cell]:
    """The cells with the chosen values, for all seeds."""
    chosen = {(tuning.method, tuning.dataset, tuning.partition): tuning for tuning in tunings}
    return [
        configured(cell, found.chosen, found.default)
        for cell in cells
        if (found := chosen[(cell.label, *cell.block)])
    ]


def configured(cell: Cell, values: Values, default: Values) -> Cell:
    """A cell with other values; options that keep their default are not written, so that equal settings have equal keys."""
    method = cell.recipe.method
    optimiser = msgspec.structs.replace(method.optimiser, lr=_rate(values))
    changed = {name: value for name, value in values.items() if name != LR and value != default[name]}
    method = msgspec.structs.replace(method, optimiser=optimiser, options={**method.options, **changed})
    return Cell(cell.label, msgspec.structs.replace(cell.recipe, method=method))


def parse_grids(texts: Sequence[str]) -> dict[str, Grid]:
    """Read "fedcrc:tau=0.9,0.99" -> values to try, by method. Raises MethodError for a value out of range, InputError for another form."""
    grids: dict[str, dict[str, list[Option]]] = {}
    for text in texts:
        option, equals, values = text.partition("=")
        name, colon, key = option.rpartition(":")
        if not (colon and equals and all(values.split(","))):
            raise InputError(f"--tune-values {text!r}: expected METHOD:OPTION=VALUE,VALUE")
        grids.setdefault(name, {})[key] = [parse_value(value) for value in values.split(",")]
        for value in grids[name][key]:
            check_hypers(name, {key: value}, methods.hypers(name))
    return dict(grids)


class _MethodSearch:
    """The search for one method on one dataset and partition."""

    def __init__(self, cell: Cell, grid: Grid, trials: int) -> None:
        self.cell, self.grid, self._limit = cell, grid, trials
        method, known = cell.recipe.method, methods.hypers(cell.recipe.method.name)
        options = {name: method.options.get(name, known[name][0]) for name in grid}
        self.default: Values = {LR: method.optimiser.lr, **options}
        self._turns = cycle([LR, *grid])
        self._trials: list[Trial] = []

    def next(self) -> list[tuple[Values, Cell]]:
        """The next configurations to train, none when all trials are used. `record` the results before the next call."""
        left = self._limit - len(self._trials)
        if not self._trials:
            return self._cells([self.default][:left])
        tried = [trial.values for trial in self._trials]
        for name in islice(self._turns, 1 + len(self.grid)):  # the first one with something new
            if new := [values for values in self._changed(name) if values not in tried]:
                return self._cells(new[:left])
        return []

    def record(self, values: Values, result: CellResult) -> None:
        """Add the result of a trial."""
        self._trials.append(Trial(values, result.key, validation(result), result.failure))

    def tuning(self) -> Tuning:
        """All trials so far."""
        return Tuning(self.cell.label, *self.cell.block, self.cell.recipe.seed, self._trials)

    def _cells(self, batch: Sequence[Values]) -> list[tuple[Values, Cell]]:
        return [(values, configured(self.cell, values, self.default)) for values in batch]

    def _changed(self, name: str) -> Iterator[Values]:
        """The best values so far with one of them changed."""
        best = self.tuning().chosen
        rates = [_rate(trial.values) for trial in self._trials]
        for value in _around(_rate(best), rates) if name == LR else self.grid[name]:
            yield {**best, name: value}


def _rate(values: Values) -> float:
    rate = values[LR]
    assert isinstance(rate, float)
    return rate


def _around(rate: float, tried: Sequence[float]) -> list[float]:
    """Two more learning rates around the best one, the larger first."""
    above = min((other for other in tried if other > rate), default=rate * FACTOR**2)
    below = max((other for other in tried if other < rate), default=rate / FACTOR**2)
    return [float(f"{sqrt(rate * neighbour):.2g}") for neighbour in (above, below)]


def _grid(cell: Cell, grids: Mapping[str, Grid]) -> Grid:
    """The values to try of a cell's method, without the options that its label sets."""
    name, given = parse_method(cell.label)
    tuning = FineTuned.grid if name.endswith("+ft") else {}
    grid = {**methods.find(name).grid, **tuning, **grids.get(name, {})}
    return {key: values for key, values in grid.items() if key not in given}


def _require_validation(cell: Cell) -> None:
    clients = cell_runs.prepare(cell).data().values()
    if not any(len(client.validation) for client in clients):
        raise InputError(
            f"--tune: {', '.join(cell.block)} has no validation samples,"
            " expected data.validation_fraction above 0 or the set 'validation' in the split file"
        )
