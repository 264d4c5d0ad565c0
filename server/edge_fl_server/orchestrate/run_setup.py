"""The second form of a recipe: the dataset, method and torch device that follow from it (docs/architecture.md).

Modules that only runs with devices need are imported where they are used, so that a simulation starts sooner.
"""

from dataclasses import dataclass

import torch

from edge_fl import heads
from edge_fl.config import MethodSpec
from edge_fl.errors import ConfigError
from edge_fl.learn.network import precision
from edge_fl.methods import build_method
from edge_fl.methods.contract.method import Method
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.training import cohort, studies
from edge_fl_server.training.engine_timing import EngineTiming
from edge_fl_server.training.engines import choice
from edge_fl_server.training.rounds import Plan
from edge_fl_server.training.studies import Study


@dataclass(frozen=True)
class RunSetup:
    """The recipe, resolved. `study` (dataset and split) is set where clients are simulated in this process.

    `chosen` is the engine that "auto" chose when a resumed run began.
    """

    recipe: Recipe
    study: Study | None
    spec: MethodSpec
    method: Method
    device: str
    chosen: EngineTiming | None = None

    @property
    def plan(self) -> Plan:
        """The arguments of the round loop."""
        return Plan.of(self.recipe, self.method)

    @property
    def data_hash(self) -> str:
        """Hash of the data trained on in this process and of their split; empty when only devices have data."""
        return self.study.fingerprint() if self.study else ""


def prepare(recipe: Recipe) -> RunSetup:
    """Load the dataset, if the server needs one, and build the method. Raises InputError."""
    if recipe.source in ("simulated", "hybrid"):
        return of_study(studies.prepare(recipe))
    recipe, spec = studies.without_data(recipe)
    # Aggregating alone is no work for a GPU: "auto" uses one only where clients train in this process.
    device = "cpu" if recipe.device == "auto" else torch_device(recipe.device)
    return _build(recipe, None, spec, device)


def of_study(study: Study) -> RunSetup:
    """The setup of a study whose data are loaded. Raises InputError."""
    return _build(study.recipe, study, study.spec, torch_device(study.recipe.device))


def torch_device(name: str) -> str:
    """The torch device to compute on; "auto" is CUDA if available. Raises ConfigError for an unavailable device."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r}: {reason}; expected auto, cpu or cuda") from error
    return name


def _build(recipe: Recipe, study: Study | None, spec: MethodSpec, device: str) -> RunSetup:
    method = build_method(spec)
    method.net.to(device)
    if study:
        precision.require_trainable(recipe.precision, device)
    cohort.require_bufferable(recipe.cohort, method, recipe.source)
    cohort.require_simulable(recipe)
    choice.require(recipe.engine)
    _require_heads(recipe)
    if recipe.statistics.sums != "none":
        from edge_fl_server.orchestrate import statistics

        statistics.require_possible(recipe, method)
    if recipe.release.heads:
        from edge_fl_server.release import export

        export.require_exportable(method)
    return RunSetup(recipe, study, spec, method, device)


def _require_heads(recipe: Recipe) -> None:
    """Raise ConfigError for an unknown head, or for heads without simulated clients."""
    if recipe.heads and recipe.source in ("fleet", "none"):
        raise ConfigError(
            f"heads = {recipe.heads} with source {recipe.source!r}: expected simulated clients; a device's head is configured on the device"
        )
    for name in recipe.heads:
        heads.resolve(name)
