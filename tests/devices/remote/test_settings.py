"""Settings from the operator on a device: what wins, what is rejected, and which address of the broker is used."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_fl.errors import ConfigError, DataError
from edge_fl.files import atomic
from edge_fl.fleet.remote_settings import (
    DEFAULTS,
    ActualSetting,
    DesiredSettings,
    SettingsStatus,
    flat,
    nested,
    require,
)
from edge_fl.wire.topics import Address
from edge_fl_devices.agent.events import Received
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.remote.applied_settings import LOCAL, RETURN_S, TRIAL_S, RemoteSettings

ADDRESS = Address("settings", "pi-1")


def tree(folder: Path, **local: Any) -> dict[str, Any]:
    own = {"id": "pi-1", "data": "folder:/", "folder": str(folder), "broker": {"host": "old"}}
    return {**own, **local}


def receive(remote: RemoteSettings, serial: int, rejected: str = "", **values: Any) -> SettingsStatus:
    named = {key.replace("__", "."): value for key, value in values.items()}
    return remote.receive(Received(ADDRESS, DesiredSettings(serial, named), rejected=rejected))


def connected(remote: RemoteSettings, at_s: float = 0.0) -> None:
    remote.observe(True, False, at_s)


@pytest.fixture
def remote(tmp_path: Path) -> RemoteSettings:
    """A device that has connected once with its installed settings."""
    remote = RemoteSettings(tree(tmp_path, head="svm"), "device.toml")
    connected(remote)
    return remote


def test_every_setting_from_afar_is_one_of_the_settings_file_with_the_same_default() -> None:
    own = flat(msgspec.to_builtins(DeviceConfig("pi-1", "")))
    assert {key: own[key] for key in DEFAULTS} == DEFAULTS
    assert nested(DEFAULTS, {"id": "pi-1"}) | {"id": ""} == nested(DEFAULTS) | {"id": ""}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"watch_s": -1}, "watch_s = -1"),
        ({"watchs": 1}, "'watch_s'"),
        ({"budget.megabytes": "many"}, r"\[budget\] megabytes"),
        ({"broker.port": 70_000}, r"\[broker\] port"),
        ({"data": "python:os:getcwd"}, "folder:/PATH"),
        ({"broker.identity": "/tmp/x"}, "identity"),
        ({"uploads": True}, "uploads"),
        ({"sums.minimum": 3}, "sums"),
        ({"remote_settings": True}, "remote_settings"),
    ],
)
def test_a_value_out_of_range_or_for_the_owner_alone_is_rejected_by_name(
    remote: RemoteSettings, values: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        require(values, "fleet set")
    before = remote.config
    (key,) = values
    status = remote.receive(Received(ADDRESS, DesiredSettings(1, {**values, "keep": 7})))
    assert remote.restart_due  # the others are in effect
    remote.begin()
    assert remote.config == msgspec.structs.replace(before, keep=7)
    assert remote.status.settings[key].why and remote.status.settings[key].origin != "remote"
    assert not status.why


def test_values_from_afar_replace_defaults_and_installed_ones_but_not_later_changes_on_the_device(
    remote: RemoteSettings, tmp_path: Path
) -> None:
    receive(remote, 1, head="auto", watch_s=60, budget__megabytes=5)
    assert remote.restart_due and remote.config.head == "svm"  # until it starts again
    remote.begin()
    assert (remote.config.head, remote.config.watch_s, remote.config.budget.megabytes) == ("auto", 60.0, 5.0)
    assert remote.status.settings["head"] == ActualSetting("remote", "auto")
    assert remote.status.settings["broker.host"] == ActualSetting("file", "old")
    assert remote.status.settings["data"] == ActualSetting("file")  # the owner's path stays on the device
    assert "keep" not in remote.status.settings
    edited = RemoteSettings(tree(tmp_path, head="cosine", watch_s=5.0), "device.toml")
    assert (edited.config.head, edited.config.watch_s, edited.config.budget.megabytes) == ("cosine", 5.0, 5.0)
    assert edited.status.settings["head"] == ActualSetting("local", "cosine", LOCAL)
    assert edited.status.serial == 1
    receive(edited, 2, head="mlp")
    edited.begin()
    assert edited.config.head == "cosine" and edited.config.budget.megabytes == 0.0


def test_a_value_that_is_taken_back_gives_the_installed_one(remote: RemoteSettings) -> None:
    receive(remote, 1, head="auto")
    remote.begin()
    receive(remote, 2)
    remote.begin()
    assert remote.config.head == "svm" and remote.status.settings["head"].origin == "file"


def test_the_owner_can_switch_it_off(tmp_path: Path) -> None:
    remote = RemoteSettings(tree(tmp_path, remote_settings=False), "device.toml")
    assert receive(remote, 1, head="auto").why == "local_only"
    assert not remote.restart_due and remote.config.head == "logistic"


def test_older_and_rejected_messages_change_nothing_and_are_named(
    remote: RemoteSettings, tmp_path: Path
) -> None:
    receive(remote, 5, keep=5)
    remote.begin()
    assert receive(remote, 4, keep=4).why == "replayed"
    assert receive(remote, 6, rejected="forged", keep=6).why == "forged"
    assert remote.receive(Received(ADDRESS, None)).why == "forged"  # cleared
    assert not remote.restart_due
    restarted = RemoteSettings(tree(tmp_path), "device.toml")
    assert receive(restarted, 4, keep=4).why == "replayed" and restarted.config.keep == 5
    assert receive(restarted, 5, keep=5).why == "" and not restarted.restart_due


def test_a_folder_that_is_not_there_is_rejected(remote: RemoteSettings, tmp_path: Path) -> None:
    receive(remote, 1, data=f"folder:{tmp_path}/none", keep=3)
    remote.begin()
    assert (remote.config.data, remote.config.keep) == ("folder:/", 3)
    assert "not a folder" in remote.status.settings["data"].why
    receive(remote, 2, data=f"folder:{tmp_path}")
    remote.begin()
    assert remote.config.data == f"folder:{tmp_path}"


def test_values_that_the_agent_does_not_start_with_are_rejected_and_those_before_stay(
    remote: RemoteSettings, tmp_path: Path
) -> None:
    error = DataError("no picture can be read")
    assert not remote.revert(error)  # it was not because of settings from afar
    receive(remote, 1, keep=5)
    remote.begin()
    connected(remote)
    receive(remote, 2, keep=5, head="auto")
    again = RemoteSettings(tree(tmp_path, head="svm"), "device.toml")  # the power was cut before the start
    for each in (remote, again):
        each.begin()
        assert each.config.head == "auto"
    assert again.revert(error)
    assert (again.config.head, again.config.keep) == ("svm", 5)
    assert again.status.settings["head"].why == error.message
    assert not again.revert(error)


@pytest.mark.parametrize(
    ("key", "before", "wrong"),
    [("head", "auto", "autoo"), ("watch_s", 60.0, -1), ("data", "folder:/", "folder:/none")],
)
def test_the_value_before_stays_where_a_new_one_is_of_no_use(
    remote: RemoteSettings, tmp_path: Path, key: str, before: object, wrong: object
) -> None:
    receive(remote, 1, **{key: before})
    remote.begin()
    connected(remote)
    receive(remote, 2, **{key: wrong}, keep=7)
    for each in (remote, RemoteSettings(tree(tmp_path, head="svm"), "device.toml")):
        each.begin()
        connected(each)
        actual = each.status.settings[key]
        assert (getattr(each.config, key), actual.origin, actual.value) == (before, "remote", before)
        assert actual.why and each.config.keep == 7
    receive(remote, 3, keep=8)  # taken back: the device's own again
    remote.begin()
    assert key not in remote.status.settings or remote.status.settings[key].origin != "remote"


def test_settings_that_the_disk_does_not_take_are_not_accepted(
    remote: RemoteSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(atomic, "write", full)
        assert receive(remote, 1, keep=5).why == "disk"
    assert not remote.restart_due
    assert receive(remote, 1, keep=5).why == "" and remote.restart_due


def moved(remote: RemoteSettings, **address: Any) -> None:
    """Set another address of the broker and start with it."""
    receive(remote, remote.status.serial + 1, **address)
    assert remote.restart_due
    remote.begin()


def test_a_new_address_that_is_not_reached_is_left_for_the_last_one_that_worked(
    remote: RemoteSettings, tmp_path: Path
) -> None:
    moved(remote, broker__host="new", broker__port=1884)
    assert (remote.config.broker.host, remote.config.broker.port) == ("new", 1884)
    remote.observe(False, False, 0.0)
    remote.observe(False, False, TRIAL_S)
    assert not remote.restart_due
    remote.observe(False, False, TRIAL_S + 1)
    assert remote.restart_due
    for each in (remote, RemoteSettings(tree(tmp_path), "device.toml")):  # also after a restart
        each.begin()
        assert (each.config.broker.host, each.config.broker.port) == ("old", 0)
        assert each.status.settings["broker.host"].origin == "fallback"
        assert "new:1884 was not reached" in each.status.settings["broker.host"].why
    moved(remote, broker__host="new", broker__port=1884)  # the operator asks once more
    connected(remote)
    assert remote.config.broker.host == "new" and remote.status.settings["broker.host"].origin == "remote"


def test_a_new_address_that_denies_access_is_left_at_once(remote: RemoteSettings) -> None:
    moved(remote, broker__host="new")
    remote.observe(False, True, 0.0)
    assert remote.restart_due
    remote.begin()
    assert remote.config.broker.host == "old"


def test_an_address_that_worked_is_left_later_and_no_address_for_good(remote: RemoteSettings) -> None:
    moved(remote, broker__host="new")
    connected(remote, 0.0)
    remote.observe(False, False, RETURN_S)
    assert not remote.restart_due
    hosts = []
    at_s = RETURN_S
    for _ in range(4):
        at_s += RETURN_S + 1
        remote.observe(False, False, at_s)
        assert remote.restart_due
        remote.begin()
        remote.observe(False, False, at_s)
        hosts.append(remote.config.broker.host)
    assert hosts == ["old", "new", "old", "new"]
    connected(remote, at_s)
    assert not remote.restart_due and remote.status.settings["broker.host"].origin == "remote"


def test_without_settings_from_afar_or_after_a_change_on_the_device_the_address_stays(tmp_path: Path) -> None:
    first = RemoteSettings(tree(tmp_path), "device.toml")
    connected(first)
    for host in ("old", "other"):
        remote = RemoteSettings(tree(tmp_path, broker={"host": host}), "device.toml")
        remote.observe(False, False, 0.0)
        remote.observe(False, True, 1e6)
        assert not remote.restart_due and remote.config.broker.host == host
    receive(first, 1, broker__host="new")
    local = RemoteSettings(tree(tmp_path, broker={"host": "mine"}), "device.toml")
    local.observe(False, False, 0.0)
    local.observe(False, False, 1e6)
    assert not local.restart_due and local.config.broker.host == "mine"
    assert local.status.settings["broker.host"] == ActualSetting("local", "mine", LOCAL)
