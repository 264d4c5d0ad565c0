"""A run that has ended, brought back from its folder: its method, what it learnt, and the personal parts of clients simulated here."""

from __future__ import annotations

from dataclasses import dataclass

from edge_fl.config import Recipe
from edge_fl.errors import InputError
from edge_fl.learn.tree import Parts
from edge_fl.methods import build_method
from edge_fl.methods.contract.method import Method
from server.runs import checkpoint
from server.training import study as studies
from server.runs.results import Results
from server.training.study import Study


@dataclass(frozen=True)
class TrainedRun:
    """`study` is its data, the same as then; `shared` and `personal` are its parts after the last checkpoint."""

    recipe: Recipe
    study: Study
    method: Method
    shared: Parts
    personal: dict[str, Parts]


def load(results: Results) -> TrainedRun:
    """Raises InputError for a run of devices, whose data are elsewhere; DataError without the dataset, ArtefactError without checkpoint."""
    recipe = results.recipe()
    if recipe.source == "fleet":
        raise InputError(f"{results.id}: its data are on the devices, not here")
    study = studies.prepare(recipe)
    method = build_method(study.spec).at(max(recipe.rounds, 1))
    kept = checkpoint.load(results.checkpoints)
    return TrainedRun(recipe, study, method, kept.shared, kept.own)
