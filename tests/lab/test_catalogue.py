"""The catalogue: the commands' output and the table of methods come from the methods' own declarations."""

import json

import msgspec
import pytest

from edge_fl.cli import main
from edge_fl.errors import MethodError
from edge_fl.methods import METHODS, names
from edge_fl.wire.egress import Egress
from edge_fl_lab import catalogue
from tools.site import methods_table


def test_every_method_has_a_row_with_its_citation() -> None:
    rows = catalogue.rows()
    assert [row["name"] for row in rows] == names()
    assert all(row["citation"] and row["family"] for row in rows)


def test_the_table_of_methods_is_the_methods_own() -> None:
    text = methods_table.PAGE.read_text()
    assert methods_table.with_table(text) == text, "run `python -m tools.site.methods_table`"


def test_a_method_without_a_shared_extractor_is_refused_to_head_only_devices() -> None:
    unsupported = {row["name"] for row in catalogue.rows() if row["head_only"] == "not supported"}
    assert unsupported == {"local", "lg-fedavg", "fedamp", "fedproto", "fedgh"}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_description_names_every_hyper_parameter_and_what_travels(name: str) -> None:
    from edge_fl.methods.contract.method import hypers_of

    text = catalogue.describe(name)
    assert all(f"  {hyper} = " in text for hyper in hypers_of(METHODS[name]))
    assert "\ndown per client and round with cnn2: " in text and "BatchNorm: " in text


def test_an_unknown_method_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(MethodError, match="fedrep"):
        catalogue.describe("fedrepp")


def test_methods_show_prints_what_leaves_a_device_for_people_and_for_machines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["methods", "show", "fedper"]) == 0
    shown = capsys.readouterr().out
    assert "leaves a full device with its update report: extractor" in shown
    assert "leaves a head device with its head report: nothing" in shown
    assert main(["methods", "show", "fedcrl", "--egress"]) == 0
    found = msgspec.convert(json.loads(capsys.readouterr().out), list[Egress])
    assert [egress.tier for egress in found] == ["full", "head"]
    assert found[1].parts == {"head": ["prototypes"]}
