"""Keys that are taken out, rotated and added: what a server can do without them, and which metadata devices trust."""

import json
from datetime import timedelta

import pytest

from edge_fl.errors import InputError, TrustError
from edge_fl_devices.install.trust import Trust
from edge_fl_server.release.repository import Repository, now


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "server"


@pytest.fixture
def usb(tmp_path):
    return tmp_path / "usb"


def believed(tmp_path, repository, root) -> list[int]:
    files = dict(repository.files())
    return [found.release for found in Trust(tmp_path / "device", root).refresh(files.__getitem__)]


def test_without_the_root_key_a_server_releases_and_cannot_rotate(
    tmp_path, folder, usb, make_release
) -> None:
    repository = Repository(folder)
    (key,) = repository.take_out("root", usb)
    assert [path.name for path in usb.iterdir()] == [f"{key}.pem"]
    assert (usb / f"{key}.pem").stat().st_mode & 0o777 == 0o600
    again = Repository(folder)
    again.publish(make_release(1)[0])
    assert believed(tmp_path, again, again.root_bytes) == [1]
    with pytest.raises(InputError, match="this private key is needed to sign, and is not here"):
        again.rotate("timestamp")
    assert Repository(folder).key_rows()[0]["place"] == ""


def test_with_the_root_key_available_keys_rotate_and_a_new_root_key_stays_outside(
    tmp_path, folder, usb, make_release
) -> None:
    repository = Repository(folder)
    first = repository.root_bytes
    repository.publish(make_release(1)[0])
    repository.take_out("root", usb)
    for role in ("timestamp", "root", "targets"):
        Repository(folder, elsewhere=[usb]).rotate(role)
    after = Repository(folder, elsewhere=[usb])
    assert believed(tmp_path, after, first) == [1]
    assert {row["place"] for row in after.key_rows() if row["role"] == "root"} == {str(usb)}
    assert len(list(usb.iterdir())) == 2


def test_a_server_without_the_targets_key_keeps_releases_valid_but_cannot_release(
    tmp_path, folder, usb, make_release
) -> None:
    repository = Repository(folder)
    repository.publish(make_release(1)[0])
    repository.take_out("targets", usb)
    later = Repository(folder, clock=lambda: now() + timedelta(days=6))
    assert [name for name, _ in later.refresh()] == ["3.snapshot.json", "timestamp.json"]
    assert believed(tmp_path, later, later.root_bytes) == [1]
    with pytest.raises(InputError, match="needed to sign"):
        later.publish(make_release(2)[0])
    Repository(folder, elsewhere=[usb]).publish(make_release(2)[0])
    online = Repository(folder)
    assert believed(tmp_path, online, online.root_bytes) == [1, 2]


def test_one_of_two_root_keys_is_not_enough(tmp_path, folder, usb, make_release) -> None:
    repository = Repository(folder)
    first = repository.root_bytes
    repository.add_key("root", 2, usb)
    assert believed(tmp_path, repository, first) == []
    with pytest.raises(InputError, match="needed to sign"):
        Repository(folder).rotate("timestamp")
    both = Repository(folder, elsewhere=[usb])
    assert [row["threshold"] for row in both.key_rows() if row["role"] == "root"] == [2, 2]
    both.rotate("timestamp")
    assert believed(tmp_path, both, first) == []


def test_a_role_of_two_keys_is_signed_by_both_and_a_device_rejects_one_signature(
    tmp_path, folder, usb
) -> None:
    repository = Repository(folder)
    first = repository.root_bytes
    repository.add_key("timestamp", 2, usb)
    assert believed(tmp_path, repository, first) == []
    alone = Repository(folder)
    assert alone.refresh() == []
    late = Repository(folder, clock=lambda: now() + timedelta(days=6))
    assert late.refresh() == []
    files = dict(repository.files())
    timestamp = json.loads(files["timestamp.json"])
    assert len(timestamp["signatures"]) == 2
    timestamp["signatures"].pop()
    files["timestamp.json"] = json.dumps(timestamp).encode()
    with pytest.raises(TrustError) as refused:
        Trust(tmp_path / "other", first).refresh(files.__getitem__)
    assert refused.value.why == "wrong_key"


@pytest.mark.parametrize("threshold", [0, 3])
def test_a_threshold_fits_the_number_of_keys(folder, usb, threshold) -> None:
    with pytest.raises(InputError, match="expected 1 to 2"):
        Repository(folder).add_key("root", threshold, usb)
