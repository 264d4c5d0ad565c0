"""What a device tells Home Assistant about its release and its agent is what it has, and what its server offered."""

from pathlib import Path

from edge_fl import __version__
from edge_fl.blob import describe
from edge_fl.release.agent import FIELD, AgentRelease, AgentWheel, encode
from edge_fl_devices.agent.effects import Memory
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store
from edge_fl_maker.known_versions import Versions, of_agent, of_release
from edge_fl_server.release.repository import Repository
from tests.maker import wrist


def test_of_a_release_the_offered_one_is_the_latest_or_the_installed_one(folder: Path) -> None:
    assert of_release(folder, 1) == Versions("1", "1")
    Store(folder).remember(Memory(offered=4))
    assert of_release(folder, 1) == Versions("1", "4")
    Store(folder).remember(Memory(offered=1))  # the roll-out was aborted
    assert of_release(folder, 1) == Versions("1", "1")


def test_an_installed_release_whose_head_is_not_fitted_yet_is_newer_than_the_one_that_predicts(
    tmp_path: Path,
) -> None:
    device = wrist.install(tmp_path / "wrist", release=2)
    assert of_release(device, 1) == Versions("1", "2")


def test_why_an_offered_release_does_not_come_is_said(tmp_path: Path) -> None:
    device = wrist.install(wrist.install(tmp_path / "wrist"), release=2)
    Slots(device / "release").rollback("crash_loop")
    Store(device).remember(Memory(offered=2))
    assert of_release(device, 1) == Versions("1", "2", "Release 2 failed on this device: crash_loop")


def test_the_version_of_an_offered_agent_is_that_of_the_signed_metadata(tmp_path: Path) -> None:
    device, repository = tmp_path / "pi", Repository(tmp_path / "server")
    wheels = [AgentWheel("edge_fl-0.9.0-py3-none-any.whl", describe(b"wheel"), 10)]
    releases = [AgentRelease(number, version, wheels) for number, version in ((2, "0.8.0"), (3, "0.9.0"))]
    repository.set_fields({FIELD: [encode(release) for release in releases]})
    assert of_agent(device) == Versions(__version__, __version__)  # nothing has run here
    store = Store(device)
    with store.owned():
        store.begin()
    store.remember(Memory(agent="0.7.0", offered_agent=3))
    assert of_agent(device) == Versions("0.7.0", "0.7.0")  # not fetched yet: its version is not known
    Trust(device / "tuf", repository.root_bytes).agents(dict(repository.files()).__getitem__)
    assert of_agent(device) == Versions("0.7.0", "0.9.0")
    store.remember(Memory(agent="0.9.0", offered_agent=3))
    assert of_agent(device) == Versions("0.9.0", "0.9.0")
    (device / "tuf" / "metadata" / "targets.json").write_text('{"signed": {"agents": ["{}"]}}')
    assert of_agent(device) == Versions("0.9.0", "0.9.0")  # of a later version, which this one cannot read


def test_a_start_records_the_version_of_the_agent(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.owned():
        assert store.begin().agent == __version__ == store.memory().agent
