"""Run one method, or compare several on the same clients: `run`, `compare`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from edge_fl import metrics, modalities, plugins
from edge_fl.console.output import QUIET
from edge_fl.console.progress import Progress
from edge_fl.console.units import percent
from edge_fl.errors import ConfigError, DataError, InputError, MethodError, RunError, nearest
from edge_fl.inputs import InputSpec
from edge_fl.learn.batches import in_batches
from edge_fl.learn.tree import Parts, to_device
from edge_fl.methods.contract import steps
from edge_fl.metrics import Summary
from edge_fl_lab.compare import comparison, grid, summary, tables
from edge_fl_lab.recipe_changes import flat, with_method
from edge_fl_lab.report import page
from edge_fl_lab.research.data import Clients, Data, nothing_run
from edge_fl_lab.trained import TrainedRun
from edge_fl_server import recipes, training
from edge_fl_server.orchestrate import run as orchestrator
from edge_fl_server.orchestrate.execution import RunResult, simulate, torch_device
from edge_fl_server.recipes.recipe import Recipe, with_settings
from edge_fl_server.training import studies
from edge_fl_server.training.engines.processes import environment
from edge_fl_server.training.rounds import FinalResult, RoundResult, RunHooks
from edge_fl_server.training.studies import Study

Values = NDArray[np.float64]
ACCURACIES = (metrics.PERSONAL_AFTER, metrics.PERSONAL_BEFORE, metrics.GLOBAL_TEST)


@dataclass(frozen=True, eq=False)
class Result:
    """The result of one run.

    `clients` are the names of all clients, ascending; `metrics` maps each metric after the last round and the final personalisation to one
    value per client (NaN where it was not measured), `summary` to mean, std and bottom decile over clients. `rounds` has one dict per
    round: duration, traffic and the metrics' means. `trained` is the trained model with its data, `folder` that of the results, if one was
    requested. `note` says why the run ended early, if it did.
    """

    trained: TrainedRun
    clients: tuple[str, ...]
    metrics: Mapping[str, Values]
    summary: Mapping[str, Summary]
    rounds: list[dict[str, Any]]
    engine: str
    folder: Path | None = None
    note: str = ""
    _evaluated: Mapping[int, Mapping[str, Mapping[str, float]]] = field(default_factory=dict, repr=False)

    @property
    def method(self) -> str:
        """The method's name."""
        return self.trained.recipe.method.name

    @property
    def accuracy(self) -> Values:
        """Test accuracy of each client's own model, after the final personalisation; else of the global model."""
        return next(self.metrics[name] for name in ACCURACIES if name in self.metrics)

    def rows(self) -> list[dict[str, Any]]:
        """A row per client, evaluated round and metric, with the final metrics in the last round: `pandas.DataFrame(result.rows())`."""
        return [
            {"method": self.method, "seed": self.trained.recipe.seed, "client": client, "round": round, "metric": name, "value": value}
            for round, reports in sorted(self._evaluated.items())
            for client, report in sorted(reports.items())
            for name, value in report.items()
        ]  # fmt: skip

    @nothing_run()
    def predict(self, client: str, images: ArrayLike) -> NDArray[np.int64]:
        """Predict the class ids of pictures, or other samples, with a client's own model. Raises DataError."""
        run = self.trained
        dataset = run.study.dataset
        if client not in run.personal:
            raise DataError(f"client {client!r} did not train{nearest(client, run.personal)}")
        words = modalities.ABOUT[dataset.kind].samples
        found = modalities.of(dataset.kind).arrays(np.asarray(images), words)
        if found.shape[1:] != dataset.samples.shape:
            raise DataError(f"{words} of {list(found.shape[1:])}, expected {list(dataset.samples.shape)}")
        device = torch_device(run.recipe.device)
        own = to_device(run.personal[client], device)
        down = steps.broadcast(run.method, run.shared, client)
        x = torch.from_numpy(found).to(device)
        logits = in_batches(lambda batch: steps.predict(run.method, down, own, batch), x)
        classes: NDArray[np.int64] = logits.argmax(1).cpu().numpy()
        return classes

    def __repr__(self) -> str:
        own = self.accuracy[np.isfinite(self.accuracy)]
        lowest = metrics.summarise(own.tolist()).bottom_decile
        return (
            f"{self.method}: mean accuracy {percent(own.mean())}, bottom decile {percent(lowest)} (clients: {len(self.clients)},"
            f" rounds: {len(self.rounds)}, engine: {self.engine})"
        )


class _ResultHooks(RunHooks):
    """Collect the rounds and the trained model of a run."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, Any]] = []
        self.engine = ""
        self.personal: dict[str, Parts] = {}
        self.final: FinalResult | None = None

    def after_round(self, result: RoundResult, clients: training.clients.Clients) -> None:
        means = metrics.summarise_reports(list(result.metrics.values()))
        self.rounds.append({
            "round": result.round,
            "seconds": result.seconds,
            "bytes_down": result.bytes_down,
            "bytes_up": result.bytes_up,
            "clients": len(result.responded),
            **{name: summary.mean for name, summary in means.items()},
        })  # fmt: skip

    def after_final(self, result: FinalResult, clients: training.clients.Clients) -> None:
        self.engine, self.final = clients.engine, result
        self.personal = dict(clients.personal_state())

    def result(self, study: Study, outcome: RunResult, folder: Path | None = None) -> Result:
        """The result of the run."""
        if self.final is None:
            raise InputError("the run did not reach its final personalisation")
        last = outcome.reports()
        names = dict.fromkeys(name for report in last.values() for name in report)
        clients = tuple(sorted(last))
        return Result(
            trained=TrainedRun(study.recipe, study, self.final.method, self.final.shared, self.personal),
            clients=clients,
            metrics={
                name: np.array([last[client].get(name, np.nan) for client in clients]) for name in names
            },
            summary=outcome.last(),
            rounds=self.rounds,
            engine=self.engine,
            folder=folder,
            note=str(outcome.exhausted or ""),
            _evaluated={**outcome.evaluated, max(self.final.round, 0): last},
        )


MAIN = f"{plugins.MAIN}:"
Settings = Mapping[str, Any] | Sequence[str]


def run(
    method: str | type,
    images: str | ArrayLike,
    labels: ArrayLike | None = None,
    *,
    test: Sequence[ArrayLike] | None = None,
    clients: Clients = None,
    input: InputSpec | None = None,
    groups: ArrayLike | None = None,
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
    or an array of pictures [N, H, W], [N, H, W, C] or [N, C, H, W] with C 1 or 3, whole numbers or floats 0..1; with an `input`
    (`edge_fl.inputs.InputSpec`) of its samples, such as windows [N, C, T]. `labels` are class ids [N]. Samples with the same value of
    `groups` [N], such as windows of one recording, stay in one client and one of its sets. `test` are separate
    test samples, (images, labels); without them each client's samples are divided into training, validation and test samples.

    `clients` is their number, or names the client of each sample by an array of numbers or names (then `test` is (images, labels,
    clients)), or is a split: a `Split` or the path of a split file. `partition` is a rule for drawing clients: "dirichlet:0.1",
    "pathological:2", "iid" or "domain".

    `method` is a name of `edge-fl methods list` or "package.module:Class", each also with options ("fedcrc:tau=0.9"), or a class; `model`
    is a name of `edge-fl models list`, "package.module:Class" or a class; `engine` auto, sequential, pool, vector or ray. `recipe`
    is a recipe to start from, by name or path; `settings` change any of its settings: {"cohort.participation": 0.5}. With a `folder`, a run
    of `edge-fl runs list` is written below it, with the arrays and a report. `progress` prints progress on stderr.

    Raises InputError, before anything starts, for data or settings that do not fit; RunError if the run cannot continue.
    """
    data = Data(images, labels, test, clients, input, groups)
    given = {"rounds": rounds, "seed": seed, "engine": engine or None}
    base = _recipe(recipe, method, data, partition, model, given, settings)
    hooks = _ResultHooks()
    if folder is None:
        study = data.study(base)
        with _shown(progress), Progress() as shown:
            outcome = simulate(study, hooks, shown, shown.print)
        return hooks.result(study, outcome)
    saved = data.saved(base, Path(folder))
    with _shown(progress):
        results, outcome = orchestrator.run(saved, Path(folder), hooks=hooks)
        page.write(results)
    return hooks.result(studies.prepare(saved), outcome, results.path)


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
    methods: Sequence[str | type],
    images: str | ArrayLike,
    labels: ArrayLike | None = None,
    *,
    test: Sequence[ArrayLike] | None = None,
    clients: Clients = None,
    input: InputSpec | None = None,
    groups: ArrayLike | None = None,
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
    data = Data(images, labels, test, clients, input, groups)
    base = _recipe(recipe, "", data, partition, model, {"rounds": rounds}, settings)
    named = _labels(methods)
    if jobs > 1 or base.engine in ("pool", "ray"):
        processes = f"jobs = {jobs}" if jobs > 1 else f"engine {base.engine!r}"
        for what, name in (("model", base.model.name), *(("method", label) for label in named)):
            _require_importable(what, name, processes)
    with TemporaryDirectory(prefix="edge-fl-") as temporary:
        place = Path(folder or temporary)
        cells = grid.cells(data.saved(base, place), named, seeds=seeds)
        with _shown(progress):
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


def _shown(progress: bool) -> AbstractContextManager[None]:
    """Print progress in the block only if it is wanted."""
    return environment({} if progress else {QUIET: "1"})


@nothing_run()
def _labels(methods: Sequence[str | type]) -> list[str]:
    """The labels of methods that are given by label or as a class. Raises InputError."""
    labels = [_name(method, "method") for method in methods]
    for label in labels:
        grid.parse_method(label)
    return labels


def _name(given: str | type, what: str) -> str:
    return given if isinstance(given, str) else plugins.name_of(given, what, MethodError)


@nothing_run()
def _recipe(
    base: str | Path | Recipe,
    method: str | type,
    data: Data,
    partition: str,
    model: str | type,
    given: Mapping[str, Any],
    settings: Settings,
) -> Recipe:
    """The recipe `base` with a method ("fedcrc:tau=0.9"; none: the recipe's), the data's and other settings. Raises InputError."""
    recipe = (
        base if isinstance(base, Recipe) else recipes.find(str(base)) if base else Recipe(name="research")
    )
    own = {**data.settings(), "model.name": _name(model, "model") or None, **given, "source": "simulated"}
    changes = [
        *_formatted(own),
        *(grid.parse_partition(partition) if partition else ()),
        *_formatted(settings),
    ]
    if method:
        label = _name(method, "method")
        name, options = grid.parse_method(label)
        recipe = with_method(recipe, name)
        changes += grid.parse_settings(label)
        changes += _formatted({f"method.options.{key}": value for key, value in options.items()})
    recipe = with_settings(recipe, changes)
    if recipe.source != "simulated":
        raise ConfigError(f"source = {recipe.source!r}, expected simulated")
    return _importable(recipe)


def _importable(recipe: Recipe) -> Recipe:
    """The recipe with an engine that can build its model and its method. Raises ConfigError."""
    names = {"model": recipe.model.name, "method": recipe.method.name}
    if recipe.engine == "auto" and any(name.startswith(MAIN) for name in names.values()):
        return msgspec.structs.replace(recipe, engine="sequential")
    if recipe.engine in ("pool", "ray"):
        for what, name in names.items():
            _require_importable(what, name, f"engine {recipe.engine!r}")
    return recipe


@nothing_run()
def _require_importable(what: str, name: str, processes: str) -> None:
    """Raise ConfigError for a model or method of the script or notebook, which other processes cannot import."""
    if name.startswith(MAIN):
        raise ConfigError(
            f"{what} {name.removeprefix(MAIN)} is defined in this script or notebook, which the processes of {processes} cannot"
            f" import; expected a {what} in a module of its own, or a single process"
        )


def _formatted(settings: Settings) -> list[str]:
    """Settings as "key=value"; values of None are left out."""
    if isinstance(settings, str):
        raise ConfigError(f"settings {settings!r}: expected a dict, or a list of 'key=value'")
    if not isinstance(settings, Mapping):
        return list(settings)
    given = {key: value for key, value in flat(settings).items() if value is not None}
    return [f"{key}={json.dumps(value, default=_plain)}" for key, value in given.items()]


def _plain(value: Any) -> Any:
    """A NumPy number or array, or a path, as JSON knows them."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)
