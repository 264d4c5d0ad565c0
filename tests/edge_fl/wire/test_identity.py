"""An identity is read whole or refused with the reason, and a cut while it is replaced leaves one that works."""

import shutil
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from edge_fl.errors import ConfigError
from edge_fl.wire import identity
from edge_fl.wire.endpoint import Endpoint
from edge_fl_broker.provision.authority import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "home")


@pytest.fixture
def folder(authority: Authority, tmp_path: Path) -> Path:
    return authority.bake({"pi-1": tmp_path / "pi-1"})[0].folder


def test_it_is_an_endpoint_with_its_three_files(folder: Path) -> None:
    found = identity.read(folder)
    assert found.begins < datetime.now(UTC) < found.expires
    names = ("ca.crt", "client.crt", "client.key")
    assert found.endpoint("mill", 8884) == Endpoint("mill", 8884, *(folder / name for name in names))
    assert found.endpoint("mill").tls_context()


@pytest.mark.parametrize("name", ["ca.crt", "client.crt", "client.key"])
def test_a_missing_or_spoilt_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"spoilt")
    with pytest.raises(ConfigError, match="nothing was changed"):
        identity.read(folder)
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"{name}: No such file.*fleet enrol"):
        identity.read(folder)


def test_a_key_that_others_can_read_is_refused(folder: Path) -> None:
    (folder / "client.key").chmod(0o640)
    with pytest.raises(ConfigError, match="0640 lets others read the key"):
        identity.read(folder)


def test_files_that_do_not_belong_together_are_refused(
    folder: Path, authority: Authority, tmp_path: Path
) -> None:
    (other,) = authority.bake({"pi-2": tmp_path / "pi-2"})
    stranger = Authority.make(tmp_path / "strangers")
    for name, source, why in (
        ("client.key", other.folder, "not the key of"),
        ("ca.crt", stranger.home, "not signed by"),
    ):
        copy = shutil.copytree(folder, tmp_path / f"copy-{name}")
        shutil.copy(source / name, copy / name)
        with pytest.raises(ConfigError, match=why):
            identity.read(copy)


@pytest.mark.parametrize("moves", [0, 1, 2, 3])
def test_a_cut_while_it_is_replaced_leaves_a_pair(
    folder: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    """Every step of `replace` is a move into place; the power goes before the first, the second, ..."""
    before, key = identity.read(folder), identity.new_key()
    certificate = authority.answer("pi-1", identity.request("pi-1", key))
    done, move = [], identity.os.replace

    def cut(*names: Path) -> None:
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(names)
        move(*names)

    with monkeypatch.context() as patch:
        patch.setattr(identity.os, "replace", cut)
        try:
            identity.replace(folder, certificate, key)
        except KeyboardInterrupt:
            assert moves < 3
    after = identity.read(folder)
    assert (after.serial != before.serial) is (moves >= 2)
    assert after.name == "pi-1"
    assert not list(folder.glob("*.new"))


def test_who_reads_while_it_is_replaced_sees_a_pair_and_spoils_nothing(
    folder: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may look at any time (`device doctor`, a second `fleet rotate`): here before each of the steps."""
    before, key = identity.read(folder), identity.new_key()
    certificate = authority.answer("pi-1", identity.request("pi-1", key))
    readers, seen, move = list[threading.Thread](), list[int](), identity.os.replace

    def looked_at(*names: Path) -> None:
        readers.append(threading.Thread(target=lambda: seen.append(identity.read(folder).serial)))
        readers[-1].start()
        readers[-1].join(0.1)
        move(*names)

    with monkeypatch.context() as patch:
        patch.setattr(identity.os, "replace", looked_at)
        after = identity.replace(folder, certificate, key)
    for reader in readers:
        reader.join(10)
    assert len(seen) == 3 and {*seen} <= {before.serial, after.serial}
    assert after.serial != before.serial
