"""Small changes to the request of a toy run, and reading its results."""

from __future__ import annotations

from dataclasses import replace as changed
from pathlib import Path

from msgspec.structs import replace

from edge_fl.config import (
    MethodConfig,
    OptimiserConfig,
)
from edge_fl_server.orchestrate import run as orchestrator
from edge_fl_server.orchestrate.setup import RunRequest
from edge_fl_server.runs.results import Results


def finished(request: RunRequest) -> Path:
    """Run to the end; the results folder."""
    return orchestrator.run(request)[0].path


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
