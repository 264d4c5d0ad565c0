"""Compare methods on the same clients: `compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from numpy.typing import ArrayLike

from edge_fl.errors import RunError
from edge_fl_lab.compare import comparison, grid, summary, tables
from edge_fl_lab.research.data import Clients, Data
from edge_fl_lab.research.settings import Settings, recipe_of, require_importable
from edge_fl_lab.research.single import quiet
from edge_fl_server.recipes.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of a comparison.

    `table` has a dict per method: means over clients and seeds of the last round, and their standard deviation over seeds (".over_seeds").
    """

    table: list[dict[str, Any]]
    _clients: list[dict[str, Any]] = field(repr=False)

    def rows(self) -> list[dict[str, Any]]:
        """A row per method, seed, client and metric after the last round: `pandas.DataFrame(comparison.rows())`."""
        return self._clients


def compare(
    methods: Sequence[str],
    images: str | ArrayLike,
    labels: ArrayLike | None = None,
    *,
    test: Sequence[ArrayLike] | None = None,
    clients: Clients = None,
    partition: str = "",
    model: str | type = "",
    rounds: int | None = None,
    seeds: int = 3,
    jobs: int = 1,
    recipe: str | Path | Recipe = "",
    settings: Settings = (),
    folder: str | Path | None = None,
    progress: bool = False,
) -> Comparison:
    """Run methods with several seeds on the same clients, always with Local, FedAvg and FedAvg+FT, as `edge-fl compare` does.

    Data, model and settings are given as to `run`. `jobs` runs are computed at a time. A `folder` stores each run as soon as it is
    finished; a second call runs only what is missing or changed.

    Raises InputError, before anything starts, for data or settings that do not fit; RunError if a run fails.
    """
    data = Data(images, labels, test, clients)
    base = recipe_of(recipe, "", data, partition, model, {"rounds": rounds}, settings)
    for method in methods:
        grid.parse_method(method)
    if jobs > 1:
        require_importable(base.model.name, f"jobs = {jobs}")
    with TemporaryDirectory(prefix="edge-fl-") as temporary:
        place = Path(folder or temporary)
        cells = grid.cells(data.saved(base, place), methods, seeds=seeds)
        with quiet(not progress):
            results = comparison.run(cells, place, jobs)
    if failed := [cell for cell in cells if results[cell.key].failure]:
        raise RunError(
            f"{len(failed)} of {len(cells)} runs failed ({failed[0]}: {results[failed[0].key].failure})"
        )
    return Comparison(
        [tables.record(row) for row in summary.rows(cells, results)],
        [
            {"method": cell.label, "seed": cell.recipe.seed, "client": client, "metric": name, "value": value}
            for cell in cells
            for client, report in results[cell.key].clients.items()
            for name, value in report.items()
        ],
    )
