"""What is asked of a run, and what follows from it before anything is connected: dataset, spec, method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edge_fl.config import MethodSpec, Recipe
from edge_fl.data import datasets
from edge_fl.data.samples import Dataset
from edge_fl.methods import build_method
from edge_fl.methods.contract.method import Method
from server.mqtt.retained import Connect
from server.orchestrate import simulate
from server.registry import database
from server.release import export
from server.runs.tracking import Opener
from server.training import cohort as cohorts
from server.training import study as studies
from server.training.study import Study


@dataclass(frozen=True)
class RunRequest:
    """What to run and where to put things: results below `runs`, the keys of releases below `home`.

    `resume` is the folder of a run to go on with; `recipe` is then the one found there. `database` is the registry's path or URL; by
    default a file in the folder `server` beside `home`. With `workers` other processes take the reports. `track` are
    the viewers that have the rounds, too.
    """

    recipe: Recipe
    connect: Connect
    runs: Path = Path("runs")
    home: Path = Path("runs/releases")
    takeover: bool = False
    resume: Path | None = None
    database: str = ""
    workers: bool = False
    track: Mapping[str, Opener] = field(default_factory=dict)

    @property
    def registry(self) -> str:
        """Where the registry is."""
        return database.place(self.database, self.home)


@dataclass(frozen=True)
class RunSetup:
    """What follows from a recipe before anything is connected; `study` only where clients are simulated here."""

    recipe: Recipe
    dataset: Dataset = field(repr=False)
    study: Study | None
    spec: MethodSpec
    method: Method
    device: str


def prepare(recipe: Recipe) -> RunSetup:
    """Dataset, spec and method. Raises InputError."""
    study = studies.prepare(recipe) if recipe.source != "fleet" else None
    dataset = study.dataset if study else datasets.load(recipe.data.dataset, Path(recipe.data.data_dir))
    spec = studies.method_spec(recipe, dataset)
    # Aggregating alone is no work for a GPU: "auto" asks for one only where clients train in this process.
    device = "cpu" if recipe.device == "auto" and study is None else simulate.torch_device(recipe.device)
    method = build_method(spec)
    method.net.to(device)
    cohorts.require_bufferable(recipe.cohort, method, recipe.source)
    if recipe.release.heads:
        export.require_exportable(method)
    return RunSetup(recipe, dataset, study, spec, method, device)


def data_hash(setup: RunSetup) -> str:
    """Of the data that are trained on here; what devices have is not known here."""
    return setup.dataset.samples.fingerprint() if setup.study else ""
