"""Recipes: valid ones are read as written, invalid ones name file, key, value and expectation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from edge_fl.config import MethodConfig, OptimiserConfig
from edge_fl.data.partition import DataConfig
from edge_fl.errors import ConfigError
from edge_fl.inputs import InputSpec
from edge_fl.learn.aggregation.robust import CENTRES
from edge_fl_server.recipes.recipe import Recipe, ValidationConfig, convert, dump, load, parse, with_settings


def keys(kind: Any = Recipe, table: str = "") -> Iterator[tuple[str, str]]:
    """(table, key) of all that a recipe may hold."""
    for field in msgspec.structs.fields(kind):
        yield table, field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from keys(field.type, f"{table}.{field.name}".lstrip("."))


def toml(table: str, key: str, value: str) -> str:
    return f"[{table}]\n{key} = {value}\n" if table else f"{key} = {value}\n"


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, "demo.toml")
    message = str(caught.value)
    assert message.startswith("demo.toml: ") and message.endswith("; nothing was changed")
    return message.removeprefix("demo.toml: ").removesuffix("; nothing was changed")


def test_an_empty_recipe_is_a_whole_one() -> None:
    assert parse("") == Recipe()


def test_a_recipe_survives_being_written_out() -> None:
    recipe = Recipe(
        name="fedrep-0.1",
        seed=7,
        source="fleet",
        data=DataConfig(dataset="fashion-mnist", beta=0.5, clients=20),
        method=MethodConfig(
            name="fedrep",
            optimiser=OptimiserConfig(lr=0.01, lr_steps=[(10, 0.1), (20, 0.01)]),
            options={"head_epochs": 5, "warm": True, "betas": [0.1, 0.2], "norm": "l2"},
        ),
    )
    assert parse(dump(recipe)) == recipe
    assert parse(dump(Recipe())) == Recipe()


@pytest.mark.parametrize(("table", "key"), list(keys()))
def test_a_mistyped_key_is_an_error_that_names_the_right_one(table: str, key: str) -> None:
    message = refusal(toml(table, f"{key}x", "1"))
    place = f"[{table}] " if table else ""
    assert message.startswith(f"{place}unknown key '{key}x'")
    assert f"'{key}'" in message or f"(known: {key}" in message or f", {key}" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[data]\nclient = 3", "[data] unknown key 'client' (did you mean 'clients'?)"),
        ("[method]\nbatch-size = 3", "[method] unknown key 'batch-size' (did you mean 'batch_size'?)"),
        ("[cohrot]\nquorum = 1.0", "unknown key 'cohrot' (did you mean 'cohort'?)"),
        ("rounds = -1", "rounds = -1: expected `int` >= 0"),
        ("rounds = '5'", "rounds = '5': expected `int`, got `str`"),
        ("rounds = 5.0", "rounds = 5.0: expected `int`, got `float`"),
        ("rounds = 5.5", "rounds = 5.5: expected `int`, got `float`"),
        ("name = 'Run 1'", "name = 'Run 1': expected `str` matching regex '^[a-z0-9][a-z0-9.-]{0,63}\\\\Z'"),
        (
            'name = "run\\n"',
            "name = 'run\\n': expected `str` matching regex '^[a-z0-9][a-z0-9.-]{0,63}\\\\Z'",
        ),
        ("source = 'fleets'", "source = 'fleets': unknown name (did you mean 'fleet'?)"),
        ("[data]\nbeta = 0", "[data] beta = 0: expected `float` > 0.0"),
        ("[data]\nbeta = nan", "[data] beta = nan: expected `float` > 0.0"),
        ("[data]\ntest_fraction = 1.0", "[data] test_fraction = 1.0: expected `float` < 1.0"),
        (
            "[data]\npartition = 'dirichlt'",
            "[data] partition = 'dirichlt': unknown name (did you mean 'dirichlet'?)",
        ),
        ("[method]\noptimiser = 'sgd'", "[method] optimiser = 'sgd': expected `object`, got `str`"),
        ("[method.optimiser]\nlr = inf", "[method.optimiser] lr = inf: expected a finite number"),
        ("[method.options]\ntau = nan", "[method.options] tau = nan: expected a finite number"),
        ("[method.options]\ntaus = [0.1, -inf]", "[method.options] taus = -inf: expected a finite number"),
        ("[broker]\nport = -1", "[broker] port = -1: expected `int` >= 0"),
        (
            '[broker]\nfleet = "a/#"',
            "[broker] fleet = 'a/#': expected 1 to 32 of a-z, 0-9 and '-', not beginning with '-'",
        ),
        ("[cohort]\nparticipation = 1.1", "[cohort] participation = 1.1: expected `float` <= 1.0"),
    ],
)
def test_a_wrong_value_is_shown_with_what_was_expected(text: str, message: str) -> None:
    assert refusal(text) == message


@pytest.mark.parametrize("text", ["[data", "seed = 1\nseed = 2", "seed =", "\x00", "rounds: 3"])
def test_what_is_not_toml_is_refused_with_its_place(text: str) -> None:
    assert refusal(text).startswith("not TOML (")


def test_a_wrong_value_deep_in_a_list_names_its_place() -> None:
    assert refusal("[method.optimiser]\nlr_steps = [[10, 'x']]").startswith(
        "[method.optimiser] lr_steps[0][1]"
    )
    assert "method.options" in refusal("[method.options]\na = { b = 1 }").replace("] ", ".")


def test_a_file_is_named_in_every_error(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    with pytest.raises(ConfigError, match=r"recipe\.toml: cannot be read \(No such file or directory\)"):
        load(path)
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        load(tmp_path)
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match=r"recipe\.toml: line 1, column 9 is not UTF-8"):
        load(path)
    path.write_text("rouns = 3")
    with pytest.raises(ConfigError, match=r"recipe\.toml: unknown key 'rouns' \(did you mean 'rounds'\?\)"):
        load(path)
    path.write_text("rounds = 3")
    assert load(path).rounds == 3


def test_a_long_wrong_value_is_not_quoted_whole() -> None:
    with pytest.raises(ConfigError) as caught:
        convert({"rounds": "x" * 10_000})
    assert len(str(caught.value)) < 200


def test_a_recipe_may_name_every_centre_and_no_other() -> None:
    choices = get_args(get_type_hints(ValidationConfig)["centre"])
    assert set(choices) == {"mean", *CENTRES}


def test_an_image_shape_is_channels_first() -> None:
    assert InputSpec((3, 32, 24)).shape == (3, 32, 24)


def test_optimizer_is_accepted_for_optimiser() -> None:
    assert parse("[method.optimizer]\nlr = 0.5").method.optimiser.lr == 0.5
    assert parse("[methods.fedper.optimizer]\nlr = 0.5").methods["fedper"].optimiser is not None
    assert with_settings(Recipe(), ["method.optimizer.lr=0.5"]).method.optimiser.lr == 0.5
    with pytest.raises(ConfigError, match="unknown key 'optimizer'"):
        parse("[method.optimizer]\nlr = 0.5\n[method.optimiser]\nlr = 0.1")
