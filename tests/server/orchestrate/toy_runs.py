"""Small changes to the request of a toy run, and reading its results."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import replace as changed
from pathlib import Path

from msgspec.structs import replace

from edge_fl.config import (
    MethodConfig,
    OptimiserConfig,
)
from edge_fl_server.orchestrate import run as orchestrator
from edge_fl_server.orchestrate.serving import FleetAccess
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.runs.results import Results
from edge_fl_server.runs.round_metrics import Opener


@dataclass(frozen=True)
class ToyRun:
    """The arguments of a run."""

    recipe: Recipe
    access: FleetAccess
    runs: Path
    resume: Path | None = None
    track: Mapping[str, Opener] = field(default_factory=dict)

    @property
    def registry(self) -> str:
        return self.access.registry


def finished(run: ToyRun) -> Path:
    """Run to the end; the results folder."""
    return orchestrator.run(run.recipe, run.runs, access=run.access, resume=run.resume, track=run.track)[
        0
    ].path


def refusing(*modes):
    """A device that cannot do its work in these modes."""
    return lambda mode, report, payload: (
        [(replace(report, metrics={}, blob=None, compression="none", error="rejected"), b"")]
        if mode in modes
        else [(report, payload)]
    )


def with_recipe(run_request, **fields):
    return changed(run_request, recipe=replace(run_request.recipe, **fields))


def method(name, **options):
    return MethodConfig(name, 1, 8, OptimiserConfig("sgd", 0.05), options)


def the_run(run_request):
    (path,) = run_request.runs.iterdir()
    return Results.open(path)
