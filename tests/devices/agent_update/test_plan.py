"""What an agent release must contain for this device, and what is refused before anything is downloaded."""

from datetime import datetime
from pathlib import Path

import pytest
from packaging.tags import Tag

from edge_fl.blob import describe
from edge_fl.errors import ArtefactError
from edge_fl.release.agent import AgentRelease, AgentWheel
from edge_fl_devices.agent_update import environment
from edge_fl_devices.agent_update.environment import Distribution
from edge_fl_devices.agent_update.updater import postponed
from edge_fl_devices.config import UpdateConfig

TAGS = [Tag("cp311", "cp311", "manylinux_2_28_aarch64"), Tag("py3", "none", "any")]
FACTORY = {
    "edge-fl": Distribution("1.0", ["numpy>=1"]),
    "numpy": Distribution("2.0"),
    "scikit_learn": Distribution("1.5", ["numpy<3", "scipy>=1; extra == 'full'"]),
}


def wheel(file: str, *requires: str, python: str = ">=3.11") -> AgentWheel:
    return AgentWheel(file, describe(b"wheel"), 5, list(requires), python)


def needed(*wheels: AgentWheel) -> list[str]:
    release = AgentRelease(7, "1.1", list(wheels))
    return [one.file for one in environment.needed(release, FACTORY, TAGS, "3.11.2")]


def refused(*wheels: AgentWheel) -> str:
    with pytest.raises(ArtefactError) as caught:
        needed(*wheels)
    return f"{caught.value.why}: {caught.value}"


AGENT = wheel("edge_fl-1.1-py3-none-any.whl", "numpy>=1", "torch>=2; extra == 'full'")
NUMPY = "numpy-2.1-cp311-cp311-manylinux_2_28_{}.whl"


def test_only_what_the_installation_lacks_is_needed() -> None:
    same = wheel("numpy-2.0-cp311-cp311-manylinux_2_28_aarch64.whl")
    assert needed(AGENT, same) == [AGENT.file]
    assert needed(AGENT, wheel(NUMPY.format("aarch64")), wheel(NUMPY.format("x86_64"))) == [
        AGENT.file,
        NUMPY.format("aarch64"),
    ]
    new = wheel("edge_fl-1.1-py3-none-any.whl", "brand-new>=2")
    assert len(needed(new, wheel("brand_new-2.5-py3-none-any.whl"))) == 2


def test_wheels_for_another_machine_or_python_are_refused() -> None:
    assert refused(wheel("edge_fl-1.1-cp311-cp311-manylinux_2_28_x86_64.whl")).startswith("wrong_platform: ")
    assert "3.11.2" in refused(wheel("edge_fl-1.1-py3-none-any.whl", python=">=3.12"))
    assert refused(wheel("edge_fl-1.1-py3-none-any.whl", python="nonsense")).startswith("bad_wheel: ")


def test_a_missing_dependency_is_refused_by_name() -> None:
    text = refused(wheel("edge_fl-1.1-py3-none-any.whl", "numpy>=2.1"))
    assert text.startswith("unsatisfied: ") and "edge-fl requires numpy>=2.1, found 2.0" in text
    assert "found none" in refused(wheel("edge_fl-1.1-py3-none-any.whl", "brand-new"))
    other = wheel("numpy-3.0-py3-none-any.whl")
    assert "scikit-learn requires numpy<3, found 3.0" in refused(AGENT, other)


def test_an_older_version_is_refused_unless_it_is_signed_as_a_downgrade() -> None:
    old = AgentRelease(7, "0.9", [AGENT])
    with pytest.raises(ArtefactError, match=r"version 0\.9, 1\.0 runs here") as caught:
        environment.require_allowed(old, "1.0", withdrawn=False)
    assert caught.value.why == "downgrade"
    environment.require_allowed(old, "1.0", withdrawn=True)
    environment.require_allowed(AgentRelease(7, "0.9", [AGENT], downgrade=True), "1.0", withdrawn=False)
    environment.require_allowed(AgentRelease(7, "1.0", [AGENT]), "1.0", withdrawn=False)


def test_a_withdrawn_release_is_refused_unless_the_device_returns_from_another_one() -> None:
    held_back = AgentRelease(7, "1.1", [AGENT], withdrawn=True)
    with pytest.raises(ArtefactError, match="agent release 7: withdrawn") as caught:
        environment.require_allowed(held_back, "1.0", withdrawn=False)
    assert caught.value.why == "withdrawn"
    environment.require_allowed(held_back, "1.0", withdrawn=True)


@pytest.mark.parametrize(
    "hours, hour, waits",
    [("", 12, False), ("1-5", 0, True), ("1-5", 4, False), ("22-4", 23, False), ("22-4", 5, True)],
)
def test_the_switch_waits_for_the_maintenance_window(hours: str, hour: int, waits: bool) -> None:
    now = datetime(2026, 11, 23, hour).astimezone()
    assert bool(postponed(UpdateConfig(hours=hours), 0.0, now)) == waits


def test_the_switch_waits_for_the_delay() -> None:
    now = datetime(2026, 11, 23, 12).astimezone()
    config = UpdateConfig(delay_h=24.0)
    assert postponed(config, now.timestamp() - 3600, now).startswith("until 2026-11-24")
    assert postponed(config, now.timestamp() - 25 * 3600, now) == ""


def test_a_damaged_wheel_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    (folder / environment.WHEELS).mkdir(parents=True)
    bad = folder / environment.WHEELS / "edge_fl-1.1-py3-none-any.whl"
    bad.write_bytes(b"no zip")
    with pytest.raises(ArtefactError, match="edge_fl-1") as caught:
        environment.build(folder, tmp_path / "factory", {bad: 1000})
    assert caught.value.why == "bad_wheel" and not environment.is_complete(folder)
