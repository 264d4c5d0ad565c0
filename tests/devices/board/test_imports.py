"""A package that does not load is named, with the signal that ends a process that loads it."""

from pathlib import Path

import pytest

from edge_fl.errors import KilledError
from edge_fl_devices.board import imports
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.doctor import device_checks
from tests.devices.deadly import deadly


def test_packages_that_load_are_no_failures() -> None:
    assert imports.failures(["json", "numpy"]) == []


def test_a_package_that_is_missing_is_named_and_the_next_are_tried() -> None:
    first, second = imports.failures(["nosuchpackage", "json", "nosuchother"])
    assert first == "nosuchpackage ModuleNotFoundError No module named 'nosuchpackage'"
    assert second.startswith("nosuchother")


def test_a_package_that_ends_the_process_is_named_by_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadly(tmp_path / "site", monkeypatch, "-c", "SIGILL", when="onnxruntime")
    (found,) = device_checks.wheels(DeviceConfig("pi-1", "x"))
    assert (found.state, found.found) == ("failed", "onnxruntime ends with SIGILL on this processor")
    assert "SIGILL" in found.remedy


def test_an_accident_is_not_the_package_s_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadly(tmp_path / "site", monkeypatch, "-c", "SIGSEGV", times=2, when="json.tool")
    assert imports.failures(["json.tool"]) == []


def test_the_death_of_a_child_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadly(tmp_path / "site", monkeypatch, "-c", "SIGILL", when="json.tool")
    with (
        pytest.raises(
            KilledError, match=r"^data: died: json.tool ends with SIGILL .*; nothing lost$"
        ) as caught,
        imports.naming("json", "json.tool"),
    ):
        raise KilledError("data: died", "SIGILL", "nothing lost")
    assert caught.value.signal == "SIGILL"
