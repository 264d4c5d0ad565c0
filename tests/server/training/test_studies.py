"""What of a recipe can be trained."""

import pytest

from edge_fl.errors import ConfigError
from edge_fl_server import recipes
from edge_fl_server.training import studies


def test_a_network_that_is_not_trained_is_no_method_of_a_source_that_trains() -> None:
    tree = {"source": "simulated", "method": {"name": "pretrained"}, "data": {"clients": 2}}
    study = studies.prepare(recipes.convert(tree | {"name": "pets"}, "pets.toml"))
    with pytest.raises(ConfigError, match=r"method 'pretrained' with source 'simulated'.*source = \"none\""):
        studies.method_spec(study.recipe, study.dataset.input, study.dataset.classes)
