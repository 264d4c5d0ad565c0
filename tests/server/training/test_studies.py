"""What of a recipe can be trained, on samples of which kind."""

import numpy as np
import pytest
from msgspec.structs import replace

from edge_fl.config import ModelConfig
from edge_fl.data.samples import Dataset, Samples
from edge_fl.errors import ConfigError, DataError
from edge_fl.inputs import InputSpec
from edge_fl_server import recipes
from edge_fl_server.recipes.recipe import Recipe, parse, with_settings
from edge_fl_server.training import studies
from tests.devices.recordings import SERIES

WINDOWS = np.random.default_rng(0).normal(0, 1, (40, *SERIES.shape)).astype(np.float32)
MOVES = Dataset("moves", Samples(WINDOWS, np.arange(40) % 2), ("lying", "standing"), given=SERIES)
TWO = with_settings(Recipe(), ["data.clients=2"])


def test_a_network_that_is_not_trained_is_no_method_of_a_source_that_trains() -> None:
    tree = {"source": "simulated", "method": {"name": "pretrained"}, "data": {"clients": 2}}
    study = studies.prepare(recipes.convert(tree | {"name": "pets"}, "pets.toml"))
    with pytest.raises(ConfigError, match=r"method 'pretrained' with source 'simulated'.*source = \"none\""):
        studies.method_spec(study.recipe, study.dataset.input, study.dataset.classes)


def test_a_series_gets_a_network_of_its_own_and_its_mean_and_spread() -> None:
    study = studies.of_dataset(TWO, MOVES)
    assert study.recipe.model.name == study.spec.model.name == "cnn1d"
    assert study.spec.input.names == SERIES.names
    assert study.spec.input.mean == pytest.approx(WINDOWS.mean((0, 2)), abs=1e-4)
    chosen = with_settings(TWO, ["model.name=identity"])
    assert studies.of_dataset(chosen, MOVES).spec.model.name == "identity"
    recipe = parse(
        'source = "none"\ndata = {classes = ["a", "b"]}\ninput = {shape = [4], axes = "F", dtype = "float32"}'
    )
    assert studies.without_data(recipe)[1].model == ModelConfig("mlp")


@pytest.mark.parametrize(
    ("input", "said"),
    [
        (replace(SERIES, rate=50.0), "moves: series 2x25 at 25 Hz, but the recipe or its model takes series 2x25 at 50 Hz"),
        (replace(SERIES, names=("ay", "az")), "channels ay, az instead of ax, az"),
        (replace(SERIES, shape=(2, 30)), r"moves: samples \[2, 25\], the extractor takes \[2, 30\]"),
        (InputSpec((3, 8, 8)), "moves: series 2x25 at 25 Hz, but the recipe or its model takes picture 3x8x8"),
    ],
)  # fmt: skip
def test_samples_that_are_not_those_of_the_recipe_are_named(input: InputSpec, said: str) -> None:
    with pytest.raises(DataError, match=said):
        studies.of_dataset(replace(TWO, input=input), MOVES)


def test_pictures_are_no_series_and_only_pictures_are_augmented() -> None:
    with pytest.raises(DataError, match=r"digits: pictures, but the extractor takes windows \(series\)"):
        studies.prepare(replace(TWO, input=SERIES))
    augmented = with_settings(TWO, ["method.augment=crop"])
    with pytest.raises(
        ConfigError, match=r"augment = \"crop\" changes pictures, not windows; expected \"none\""
    ):
        _ = studies.of_dataset(augmented, MOVES).spec
