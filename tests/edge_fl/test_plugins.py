"""Objects by the name `package.module:attribute`."""

import sys
from pathlib import Path

import pytest

from edge_fl import plugins
from edge_fl.errors import ConfigError, MethodError

MODULE = """
from edge_fl.errors import MethodError

class Outer:
    class Inner:
        pass

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "refused":
        raise MethodError("refused: not today")
    return f"read {name}"
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "answering", raising=False)
    (tmp_path / "answering.py").write_text(MODULE)


def found(attribute: str) -> object:
    return plugins.imported(f"answering:{attribute}", "thing", ConfigError)


def test_a_module_may_answer_for_any_name_such_as_that_of_a_file() -> None:
    assert found("faults/slow.toml") == "read faults/slow.toml"
    assert found("other") == "read other"


def test_a_class_may_be_inside_another_one() -> None:
    assert found("Outer").__name__ == "Outer"  # type: ignore[attr-defined]
    module = sys.modules["answering"]
    del module.__getattr__
    assert found("Outer.Inner") is module.Outer.Inner


def test_the_errors_of_a_module_are_its_own_and_others_name_what_was_imported() -> None:
    with pytest.raises(MethodError, match=r"^refused: not today"):
        found("refused")
    with pytest.raises(
        ConfigError, match=r"thing 'absent:x': cannot be imported \(No module named 'absent'\)"
    ):
        plugins.imported("absent:x", "thing", ConfigError)
