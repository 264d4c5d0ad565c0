"""Load a finished run from its folder: method, shared parts, and the personal parts of simulated clients."""

from dataclasses import dataclass

from edge_fl.errors import InputError
from edge_fl.learn.tree import Parts
from edge_fl.methods import build_method
from edge_fl.methods.contract.method import Method
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.runs import checkpoint
from edge_fl_server.runs.results import Results
from edge_fl_server.training import studies
from edge_fl_server.training.studies import Study


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its study (recomputed from the recipe), method, and the parts of its last checkpoint."""

    recipe: Recipe
    study: Study
    method: Method
    shared: Parts
    personal: dict[str, Parts]


def load(results: Results) -> TrainedRun:
    """Load a run.

    Raises InputError for the sources "fleet" and "none" (data on devices), DataError without the dataset, ArtefactError without a
    checkpoint.
    """
    recipe = results.recipe()
    if recipe.source in ("fleet", "none"):
        raise InputError(f"{results.id}: the data of source {recipe.source!r} are on the devices")
    study = studies.prepare(recipe)
    method = build_method(study.spec).at(max(recipe.rounds, 1))
    kept = checkpoint.load(results.checkpoints)
    return TrainedRun(recipe, study, method, kept.shared, kept.own)
