import stat
import threading
import time
from datetime import timedelta

import msgspec
import pytest

from edge_fl.blob import describe
from edge_fl.errors import ArtefactError, InputError
from edge_fl.files import atomic
from edge_fl.wire.topics import TUF_FILE
from edge_fl_devices.install.trust import Trust
from edge_fl_server.release.repository import LIFETIME_DAYS, Repository, now, superseded


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


def names(files) -> list[str]:
    return [name for name, _ in files]


def numbers(repository) -> list[int]:
    return [manifest.release for manifest in repository.releases()]


def test_the_commit_point_is_published_last(repository, make_release):
    assert names(repository.publish(make_release(1)[0])) == [
        "2.targets.json",
        "2.snapshot.json",
        "timestamp.json",
    ]
    assert names(repository.files()) == ["1.root.json", "2.targets.json", "2.snapshot.json", "timestamp.json"]
    assert all(TUF_FILE.match(name) for name in names(repository.files()))


def test_private_keys_are_for_their_owner_alone_and_apart_from_metadata(tmp_path, repository):
    keys = list((tmp_path / "keys").iterdir())
    assert len(keys) == 4
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert not any(b"PRIVATE" in payload for _, payload in repository.files())


def test_the_last_three_releases_are_kept(repository, make_release):
    for number in range(1, 6):
        repository.publish(make_release(number)[0])
    assert numbers(repository) == [3, 4, 5]


def test_an_older_release_published_again_has_a_higher_version(tmp_path, repository, make_release):
    for number in (1, 2):
        repository.publish(make_release(number)[0])
    trust = Trust(tmp_path / "device", repository.root_bytes)
    trust.refresh(dict(repository.files()).__getitem__)
    files = repository.publish(make_release(1)[0])
    assert names(files)[0] == "4.targets.json"
    believed = trust.refresh(dict(repository.files()).__getitem__)
    assert [manifest.release for manifest in believed] == [2, 1]


def test_processes_with_one_folder_build_on_each_other(tmp_path, repository, make_release):
    other = Repository(tmp_path)
    other.publish(make_release(1)[0])
    repository.publish(make_release(2)[0])
    assert numbers(repository) == [1, 2]
    assert names(other.refresh()) == []
    assert numbers(other) == [1, 2]
    other.rotate("timestamp")
    repository.publish(make_release(3)[0])
    versions = [name for name in names(repository.files()) if name.endswith("targets.json")]
    assert versions == ["4.targets.json"]
    Trust(tmp_path / "device", repository.root_bytes).refresh(dict(repository.files()).__getitem__)


def test_a_number_is_not_given_away_while_a_release_is_made(tmp_path, repository, make_release):
    published = []

    def publish():
        with other.locked():
            published.append(other.next_release())

    other = Repository(tmp_path)
    with repository.locked():
        thread = threading.Thread(target=publish)
        thread.start()
        number = repository.next_release()
        time.sleep(0.1)
        assert published == []
        repository.publish(make_release(number)[0])
    thread.join()
    assert (number, published) == (1, [2])


def test_the_classes_of_one_extractor_only_grow(repository, make_release):
    first = make_release(1, seed=0)[0]
    repository.publish(first)
    for classes in (["one", "zero"], ["zero"], ["zero", "two"]):
        changed = msgspec.structs.replace(make_release(2, seed=0)[0], classes=classes)
        with pytest.raises(
            InputError, match="release 1 has zero, one, and devices know a class by its place"
        ):
            repository.publish(changed)
    repository.publish(msgspec.structs.replace(make_release(2, seed=0)[0], classes=["zero", "one", "two"]))
    repository.publish(first)  # a roll back to fewer classes
    repository.publish(msgspec.structs.replace(make_release(3)[0], classes=["one", "zero"]))
    assert sorted(numbers(repository)) == [1, 2, 3]


def test_one_number_names_one_release(repository, make_release):
    repository.publish(make_release(1)[0])
    with pytest.raises(ArtefactError, match="signed before with another manifest"):
        repository.publish(make_release(1, seed=9)[0])
    assert repository.releases() == [make_release(1)[0]]


def test_a_release_number_is_never_used_twice(tmp_path, repository, make_release):
    assert repository.next_release() == 1
    for number in (1, 2, 9, 2, 1, 3):
        repository.publish(make_release(number)[0])
    assert numbers(repository) == [2, 1, 3]
    assert Repository(tmp_path).next_release() == 10


def test_reopening_changes_nothing(tmp_path, repository, make_release):
    repository.publish(make_release(1)[0])
    again = Repository(tmp_path)
    assert again.files() == repository.files()
    assert again.releases() == repository.releases()
    assert again.refresh() == []


def test_a_crash_before_the_timestamp_leaves_the_old_release_and_publishing_again_finishes(
    tmp_path, repository, make_release, monkeypatch
):
    repository.publish(make_release(1)[0])
    write = atomic.write

    def die_at_the_timestamp(path, content):
        if path.name == "timestamp.json":
            raise KeyboardInterrupt
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write", die_at_the_timestamp)
        with pytest.raises(KeyboardInterrupt):
            repository.publish(make_release(2)[0])
    restarted = Repository(tmp_path)
    assert numbers(restarted) == [1]
    trust = Trust(tmp_path / "device", restarted.root_bytes)
    assert [m.release for m in trust.refresh(dict(restarted.files()).__getitem__)] == [1]
    assert names(restarted.publish(make_release(2)[0]))[0] == "4.targets.json"  # 3 is taken
    assert [m.release for m in trust.refresh(dict(restarted.files()).__getitem__)] == [1, 2]


def test_a_crash_in_a_key_rotation_is_repaired_by_the_next_refresh(
    tmp_path, repository, make_release, monkeypatch
):
    repository.publish(make_release(1)[0])
    write = atomic.write

    def die_after_the_root(path, content, **how):
        if path.name.endswith("targets.json"):
            raise KeyboardInterrupt
        write(path, content, **how)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write", die_after_the_root)
        with pytest.raises(KeyboardInterrupt):
            repository.rotate("targets")
    restarted = Repository(tmp_path)
    assert names(restarted.refresh()) == ["3.targets.json", "3.snapshot.json", "timestamp.json"]
    trust = Trust(tmp_path / "device", restarted.root_bytes)
    assert [m.release for m in trust.refresh(dict(restarted.files()).__getitem__)] == [1]


@pytest.mark.parametrize(
    ("days", "renewed"),
    [
        (1, []),
        (5, ["2.snapshot.json", "timestamp.json"]),
        (21, ["2.targets.json", "2.snapshot.json", "timestamp.json"]),
        (250, ["2.root.json", "2.targets.json", "2.snapshot.json", "timestamp.json"]),
    ],
)
def test_metadata_is_signed_again_when_a_third_of_its_life_is_left(tmp_path, days, renewed):
    Repository(tmp_path)
    later = Repository(tmp_path, clock=lambda: now() + timedelta(days=days))
    assert names(later.refresh()) == renewed
    assert later.refresh() == []


def test_a_timestamp_alone_can_be_renewed(tmp_path):
    Repository(tmp_path, lifetime_days=LIFETIME_DAYS | {"timestamp": 1})
    later = Repository(
        tmp_path, lifetime_days=LIFETIME_DAYS | {"timestamp": 1}, clock=lambda: now() + timedelta(hours=20)
    )
    assert names(later.refresh()) == ["timestamp.json"]


def test_metadata_fits_one_message_by_keeping_fewer_releases(repository, make_release):
    for number in (1, 2, 3):
        manifest, _ = make_release(number)
        long = describe(bytes([number]) * 1_500_000, 1024)  # 1465 chunk hashes, about 100 kB of manifest
        repository.publish(msgspec.structs.replace(manifest, extractor=long))
    assert numbers(repository) == [2, 3]
    assert max(len(payload) for _, payload in repository.files()) < 256 * 1024


def test_a_release_too_large_for_one_message_is_rejected_and_changes_nothing(repository, make_release):
    manifest, _ = make_release(1)
    huge = describe(bytes(5_000_000), 1024)
    before = repository.files()
    with pytest.raises(ArtefactError, match="longer chunks"):
        repository.publish(msgspec.structs.replace(manifest, extractor=huge))
    assert repository.files() == before
    assert repository.next_release() == 1
    repository.publish(manifest)
    assert numbers(repository) == [1]


def test_a_missing_private_key_is_named(tmp_path, repository, make_release):
    for key in (tmp_path / "keys").iterdir():
        key.unlink()
    with pytest.raises(InputError, match="private key"):
        Repository(tmp_path).publish(make_release(1)[0])


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("7.targets.json", ["5.targets.json"]),
        ("2.targets.json", []),
        ("7.root.json", []),
        ("timestamp.json", []),
    ],
)
def test_a_file_two_versions_old_is_superseded(name, gone):
    assert superseded(name) == gone
