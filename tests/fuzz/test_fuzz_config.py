"""Mutated settings give a value that survives a round trip, or a ConfigError that names the problem."""

import json
import tempfile
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from edge_fl import heads, toml
from edge_fl.errors import ConfigError
from edge_fl_devices import config
from edge_fl_devices.config import DeviceConfig
from edge_fl_server.recipes.recipe import Recipe, dump, load, parse, with_settings
from tests.fuzz.mutate import NO_TOML, mutated_text, mutated_trees, to_toml
from tests.fuzz.valid import structs
from tools.chaos import profile
from tools.chaos.profile import Chaos


@given(data=st.data())
def test_a_recipe_with_mutations_is_rejected_or_survives_a_round_trip(data: st.DataObject) -> None:
    recipe = data.draw(structs(Recipe))
    assert parse(dump(recipe)) == recipe
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        Path(file.name).write_bytes(_spoilt(recipe, data))
        try:
            read = load(Path(file.name))
        except ConfigError as error:
            _require_helpful(error, file.name)
            return
    assert parse(dump(read)) == read


@given(data=st.data())
def test_a_setting_with_mutations_is_rejected_or_gives_a_recipe(data: st.DataObject) -> None:
    """`--set key=value`, with keys and values from a mutated recipe."""
    text = _spoilt(data.draw(structs(Recipe)), data).decode("utf-8", "replace")
    settings = data.draw(st.lists(st.sampled_from(text.splitlines() or [""]), max_size=3))
    try:
        recipe = with_settings(Recipe(), settings)
    except ConfigError:
        return
    assert parse(dump(recipe)) == recipe


@given(data=st.data())
def test_device_settings_with_mutations_are_rejected_or_accepted(data: st.DataObject) -> None:
    settings = msgspec.structs.replace(data.draw(structs(DeviceConfig)), head=next(iter(heads.HEADS)))
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        Path(file.name).write_bytes(_spoilt(settings, data))
        try:
            read = config.convert(toml.read(Path(file.name)), file.name)
        except ConfigError as error:
            _require_helpful(error, file.name)
            return
    tree = msgspec.to_builtins(read)
    assert config.convert(tree, "again") == read


@given(data=st.data())
def test_a_chaos_profile_with_mutations_is_rejected_or_survives_a_round_trip(data: st.DataObject) -> None:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        Path(file.name).write_bytes(_spoilt(data.draw(structs(Chaos)), data))
        try:
            read = profile.load(file.name)
        except ConfigError as error:
            _require_helpful(error, file.name)
            return
        Path(file.name).write_text(msgspec.toml.encode(read).decode())
        assert profile.load(file.name) == read


def _require_helpful(error: ConfigError, file: str) -> None:
    assert str(error).startswith(file) and "nothing was changed" in str(error) and len(str(error)) < 1500


def _spoilt(settings: Struct, data: st.DataObject) -> bytes:
    tree = {
        name: value
        for name, value in json.loads(msgspec.json.encode(settings)).items()
        if value not in (None, {})
    }
    return data.draw(mutated_text(to_toml(data.draw(mutated_trees(tree, NO_TOML).filter(_is_table)))))


def _is_table(tree: object) -> bool:
    return isinstance(tree, dict) or type(tree).__name__ == "Pairs"
