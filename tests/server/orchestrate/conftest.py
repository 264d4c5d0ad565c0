"""The request of a small run over the stage's broker."""

import numpy as np
import pytest

from edge_fl.config import MethodConfig, ModelConfig, OptimiserConfig
from edge_fl.data.partition import DataConfig
from edge_fl_server.orchestrate.serving import FleetAccess
from edge_fl_server.recipes.recipe import CohortConfig, Recipe, ReleaseConfig
from tests.server.orchestrate.toy_runs import ToyRun


@pytest.fixture
def run_request(stage, tmp_path):
    """A recipe of two rounds on a dataset of 4x4 images in three classes, over the stage's broker."""
    data = stage.data("everybody", 120).train
    np.savez(tmp_path / "toy.npz", x=data.x, y=data.y)
    recipe = Recipe(
        name="toy",
        seed=1,
        rounds=2,
        source="fleet",
        data=DataConfig("toy", str(tmp_path), clients=3, beta=5.0),
        model=ModelConfig("cnn-tiny", {"feature_dim": 4, "width": 2}),
        method=MethodConfig("fedavg", 1, 8, OptimiserConfig("sgd", 0.05)),
        cohort=CohortConfig(min_devices=2, wait_s=60.0, deadline_s=60.0),
        release=ReleaseConfig(wait_s=60.0),
    )
    return ToyRun(recipe, FleetAccess(stage.connect, "main", tmp_path / "home"), tmp_path / "runs")
