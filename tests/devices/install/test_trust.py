"""Invalid metadata are rejected with a reason, after which genuine ones are accepted again."""

import random
import shutil
from datetime import timedelta

import pytest

from edge_fl.errors import DeadlineError, TrustError
from edge_fl_devices.install.trust import Trust, last_refusal
from edge_fl_server.release.repository import LIFETIME_DAYS, Repository, now

VERSIONED = ["3.targets.json", "3.snapshot.json"]


def numbers(manifests) -> list[int]:
    return [manifest.release for manifest in manifests]


class Broker(dict):
    """The retained files by name; counts the fetches."""

    def __init__(self, files=()):
        super().__init__(files)
        self.asked = []

    def fetch(self, name):
        self.asked.append(name)
        return self[name]


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path / "server")


@pytest.fixture
def trust(tmp_path, repository):
    return Trust(tmp_path / "device", repository.root_bytes)


@pytest.fixture
def broker(repository, make_release):
    """Releases 1 and 2 published, in metadata version 3 (1 was empty)."""
    broker = Broker(repository.files())
    for number in (1, 2):
        broker.update(repository.publish(make_release(number)[0]))
    return broker


def refusal(trust, broker) -> TrustError:
    with pytest.raises(TrustError) as caught:
        trust.refresh(broker.fetch)
    assert "the installed release keeps serving" in str(caught.value)
    return caught.value


def test_a_device_trusts_what_the_server_signed(trust, broker, make_release):
    assert trust.refresh(broker.fetch) == [make_release(1)[0], make_release(2)[0]]


def test_before_the_first_release_there_is_nothing_to_run(trust, repository):
    assert trust.refresh(Broker(repository.files()).fetch) == []


def test_a_second_refresh_fetches_little(trust, broker):
    trust.refresh(broker.fetch)
    broker.asked.clear()
    assert numbers(trust.refresh(broker.fetch)) == [1, 2]
    assert broker.asked == ["2.root.json", "timestamp.json"]


def test_an_older_timestamp_is_a_rollback(trust, broker, repository, make_release):
    old = dict(broker)
    broker.update(repository.publish(make_release(3)[0]))
    trust.refresh(broker.fetch)
    assert refusal(trust, Broker(old)).why == "rollback"
    assert numbers(trust.refresh(broker.fetch)) == [1, 2, 3]


def test_rollback_is_rejected_by_a_new_process_too(tmp_path, broker, repository, make_release):
    old = dict(broker)
    broker.update(repository.publish(make_release(3)[0]))
    Trust(tmp_path / "device", repository.root_bytes).refresh(broker.fetch)
    assert refusal(Trust(tmp_path / "device", repository.root_bytes), Broker(old)).why == "rollback"


@pytest.mark.parametrize("role", ["timestamp", "snapshot", "targets", "root"])
def test_expired_metadata_is_a_freeze(tmp_path, make_release, role):
    lifetimes = LIFETIME_DAYS | {role: 1}
    repository = Repository(
        tmp_path / "server", lifetime_days=lifetimes, clock=lambda: now() - timedelta(days=2)
    )
    trust = Trust(tmp_path / "device", repository.root_bytes)
    broker = Broker(repository.files())
    error = refusal(trust, broker)
    assert error.why == "expired"
    assert f"{role}" in str(error)
    broker.update(Repository(tmp_path / "server").refresh())
    assert trust.refresh(broker.fetch) == []


def test_a_device_that_was_off_for_three_years_follows_the_roots_that_it_missed(tmp_path, make_release):
    at = [now()]
    repository = Repository(tmp_path / "server", clock=lambda: at[0])
    broker = Broker(repository.files())
    broker.update(repository.publish(make_release(1)[0]))
    assert numbers(Trust(tmp_path / "device", repository.root_bytes).refresh(broker.fetch)) == [1]
    for _ in range(3):  # the server stays online, and signs each year's root
        at[0] += timedelta(days=364)
        broker.update(Repository(tmp_path / "server", clock=lambda: at[0]).refresh())
    broker.asked.clear()
    returned = Trust(tmp_path / "device", repository.root_bytes, clock=lambda: at[0])
    assert numbers(returned.refresh(broker.fetch)) == [1]
    assert {"2.root.json", "3.root.json", "4.root.json"} <= {*broker.asked}


def test_a_clock_set_back_does_not_revive_expired_metadata(tmp_path, make_release):
    repository = Repository(tmp_path / "server")
    six_days_on = Trust(tmp_path / "device", repository.root_bytes, clock=lambda: now() + timedelta(days=6))
    six_days_on.refresh(Broker(repository.files()).fetch)
    short = Repository(tmp_path / "server", lifetime_days=LIFETIME_DAYS | {"timestamp": 1})
    short.publish(make_release(1)[0])
    set_back = Trust(tmp_path / "device", repository.root_bytes)
    error = refusal(set_back, Broker(short.files()))
    assert error.why == "expired"
    assert "the latest time seen" in str(error)


def test_a_clock_that_ran_ahead_does_not_lock_the_device_out(tmp_path, broker, repository):
    ahead = Trust(tmp_path / "device", repository.root_bytes, clock=lambda: now() + timedelta(days=700))
    assert refusal(ahead, broker).why == "expired"
    assert numbers(Trust(tmp_path / "device", repository.root_bytes).refresh(broker.fetch)) == [1, 2]


@pytest.mark.parametrize("name", ["timestamp.json", *VERSIONED])
def test_a_file_signed_with_another_key_is_rejected(tmp_path, trust, broker, make_release, name):
    thief = Repository(tmp_path / "thief")
    for number in (1, 2):
        thief.publish(make_release(number)[0])
    genuine = dict(broker)
    broker[name] = dict(thief.files())[name]
    assert refusal(trust, broker).why == ("wrong_key" if name == "timestamp.json" else "mix_and_match")
    assert numbers(trust.refresh(Broker(genuine).fetch)) == [1, 2]


def test_all_metadata_of_another_server_are_rejected(tmp_path, trust):
    assert refusal(trust, Broker(Repository(tmp_path / "thief").files())).why == "wrong_key"


@pytest.mark.parametrize("name", VERSIONED)
def test_old_content_under_a_new_name_is_mix_and_match(trust, broker, name):
    broker[name] = broker["2" + name[1:]]
    error = refusal(trust, broker)
    assert error.why == "mix_and_match"
    assert f"tuf/{name}" in str(error)


@pytest.mark.parametrize("name", ["timestamp.json", *VERSIONED])
def test_a_truncated_file_is_rejected_as_such(trust, broker, name):
    genuine = dict(broker)
    broker[name] = broker[name][:-20]
    error = refusal(trust, broker)
    assert error.why == "truncated"
    assert f"tuf/{name}" in str(error)
    assert numbers(trust.refresh(Broker(genuine).fetch)) == [1, 2]


@pytest.mark.parametrize("name", ["timestamp.json", *VERSIONED])
def test_a_missing_file_is_named(trust, broker, name):
    del broker[name]
    error = refusal(trust, broker)
    assert error.why == "missing"
    assert f"tuf/{name}" in str(error)


def test_a_cleared_file_counts_as_missing(trust, broker):
    broker["timestamp.json"] = b""
    assert refusal(trust, broker).why == "missing"


@pytest.mark.parametrize("name", ["timestamp.json", *VERSIONED, "2.root.json"])
def test_endless_data_is_cut_off(trust, broker, name):
    broker[name] = broker.get(name, b"{}") + b" " * 300_000
    assert refusal(trust, broker).why == "endless"


@pytest.mark.parametrize(
    "garbage", [b"{}", b"[]", b"null", b"\xff\xfe", b'{"signed": {"_type": "timestamp"}, "signatures": []}']
)
def test_garbage_is_rejected_with_a_trust_error(trust, broker, garbage):
    broker["timestamp.json"] = garbage
    assert refusal(trust, broker).why in ("truncated", "invalid")


PIECES = [
    b"\xff",
    b"\xc3\x28",
    b"9" * 5000,
    b"1e999",
    b"NaN",
    b"[" * 50_000,
    b'"\\ud800"',
    b"",
    b"null",
    b"-1",
    b"\x00",
    b"{}",
    b"[]",
]


@pytest.mark.parametrize("name", ["2.root.json", "timestamp.json", *VERSIONED])
@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: repr(piece[:8]))
def test_a_file_that_is_no_json_has_a_failure_word(tmp_path, repository, broker, name, piece):
    """Alone, and within a file: not UTF-8, numbers without end, nested too deeply."""
    content = broker.get(name, broker["timestamp.json"])
    for damaged in (piece, content[:40] + piece + content[40:]):
        if damaged == content or not (damaged or name in broker):
            continue  # not damaged
        trust = Trust(tmp_path / f"device-{len(damaged)}", repository.root_bytes)
        words = ("truncated", "invalid", "missing", "mix_and_match", "wrong_key", "endless")
        assert refusal(trust, Broker(broker | {name: damaged})).why in words


def test_random_damage_to_metadata_is_a_trust_error_and_leaves_the_trust_as_it_was(
    tmp_path, repository, broker
):
    choose, trust = random.Random(32), Trust(tmp_path / "device", repository.root_bytes)
    refused = 0
    for _ in range(60):
        name = choose.choice(["timestamp.json", *VERSIONED])
        damaged = bytearray(broker[name])
        for _ in range(choose.randint(1, 3)):
            at = choose.randrange(len(damaged) + 1)
            damaged[at : at + choose.randint(0, 4)] = choose.choice(PIECES)
        try:
            trust.refresh(Broker(broker | {name: bytes(damaged)}).fetch)
        except TrustError as error:
            refused += error.why != ""
    assert refused > 15
    assert numbers(trust.refresh(broker.fetch)) == [1, 2]


def test_a_timestamp_in_place_of_a_root_is_rejected(trust, broker):
    broker["2.root.json"] = broker["timestamp.json"]
    assert refusal(trust, broker).why == "invalid"


def test_no_root_is_trusted_unless_allowed(tmp_path, broker):
    with pytest.raises(TrustError) as caught:
        Trust(tmp_path / "bare").refresh(broker.fetch)
    assert caught.value.why == "no_root"
    assert broker.asked == []


def test_the_root_of_first_use_stays_the_root(tmp_path, broker, make_release):
    allowed = Trust(tmp_path / "bare", trust_on_first_use=True)
    assert numbers(allowed.refresh(broker.fetch)) == [1, 2]
    thief = Repository(tmp_path / "thief")
    for number in (1, 2, 3, 4):
        thief.publish(make_release(number, seed=100)[0])
    again = Trust(tmp_path / "bare", trust_on_first_use=True)
    assert refusal(again, Broker(thief.files())).why == "wrong_key"
    assert numbers(Trust(tmp_path / "bare").refresh(broker.fetch)) == [1, 2]


@pytest.mark.parametrize("shipped", [True, False])
def test_another_root_in_the_settings_replaces_the_one_that_was_trusted(
    tmp_path, repository, broker, make_release, shipped
):
    """A fleet with a new server: neither its root nor its versions follow from the old ones."""
    before = Trust(tmp_path / "device", repository.root_bytes if shipped else None, trust_on_first_use=True)
    assert numbers(before.refresh(broker.fetch)) == [1, 2]
    new = Repository(tmp_path / "new")
    new.publish(make_release(1, seed=9)[0])
    after = Broker(new.files())
    error = refusal(before, after)
    assert error.why == "wrong_key" and "edge-fl device reset --trust" in error.message
    assert last_refusal(tmp_path / "device") == "wrong_key"
    assert numbers(Trust(tmp_path / "device", new.root_bytes).refresh(after.fetch)) == [1]
    assert last_refusal(tmp_path / "device") is None


def test_a_garbled_first_root_is_not_kept(tmp_path, broker):
    genuine = dict(broker)
    broker["1.root.json"] = broker["1.root.json"][:-5]
    trust = Trust(tmp_path / "bare", trust_on_first_use=True)
    assert refusal(trust, broker).why == "truncated"
    assert numbers(trust.refresh(Broker(genuine).fetch)) == [1, 2]


@pytest.mark.parametrize("role", ["root", "timestamp", "snapshot", "targets"])
def test_devices_follow_a_key_rotation_and_the_old_key_is_worthless(
    tmp_path, trust, broker, repository, make_release, role
):
    trust.refresh(broker.fetch)
    shutil.copytree(tmp_path / "server", tmp_path / "stolen")
    broker.update(repository.rotate(role))
    assert numbers(trust.refresh(broker.fetch)) == [1, 2]
    stolen = Repository(tmp_path / "stolen")
    for number in (7, 8, 9):
        broker.update(stolen.publish(make_release(number)[0]))
    if role == "root":  # the stolen folder still holds the keys of the other roles
        return
    assert refusal(trust, broker).why in ("wrong_key", "mix_and_match")


def test_during_a_refresh_only_the_newest_keys_count(tmp_path, broker, repository):
    """python-tuf begins each refresh with the first root, in whose place the file is removed for a moment."""
    content = b"a message"

    def signatures() -> dict[str, str]:
        (keyid,) = repository.root().roles["timestamp"].keyids
        return {keyid: repository.keys.signer(keyid).sign(content).signature}

    first, old = repository.root_bytes, signatures()
    broker.update(repository.rotate("timestamp"))
    new, found = signatures(), []
    Trust(tmp_path / "device", first).refresh(broker.fetch)
    trust = Trust(tmp_path / "device", first)  # after a restart

    def fetch(name):
        trust.require_online_signature(content, new, 0)
        with pytest.raises(TrustError) as caught:
            trust.require_online_signature(content, old, 0)
        found.append(caught.value.why)
        return broker.fetch(name)

    trust.refresh(fetch)
    assert set(found) == {"wrong_key"}


def test_a_device_recovers_from_a_fast_forward_attack(tmp_path, trust, broker, repository, make_release):
    shutil.copytree(tmp_path / "server", tmp_path / "stolen")
    stolen = Repository(tmp_path / "stolen")
    ahead = Broker(broker)
    for number in (7, 8, 9, 10):
        ahead.update(stolen.publish(make_release(number)[0]))
    assert numbers(trust.refresh(ahead.fetch)) == [8, 9, 10]
    assert refusal(trust, broker).why == "rollback"
    for role in ("targets", "snapshot", "timestamp"):
        repository.rotate(role)
    assert numbers(trust.refresh(Broker(repository.files()).fetch)) == [1, 2]


def test_a_device_offline_during_rotations_catches_up(trust, broker, repository, make_release):
    for role in ("timestamp", "root", "targets"):
        repository.rotate(role)
    repository.publish(make_release(3)[0])
    assert numbers(trust.refresh(Broker(repository.files()).fetch)) == [1, 2, 3]


def test_metadata_that_a_power_cut_garbled_on_the_device_is_fetched_again(tmp_path, trust, broker):
    trust.refresh(broker.fetch)
    for name in ("timestamp.json", "snapshot.json", "targets.json"):
        (tmp_path / "device" / "metadata" / name).write_bytes(b"")
        assert numbers(trust.refresh(broker.fetch)) == [1, 2]
    (tmp_path / "device" / "last_seen.txt").write_bytes(b"")
    (tmp_path / "device" / "metadata" / "root.json").unlink()
    assert numbers(trust.refresh(broker.fetch)) == [1, 2]


def test_a_deadline_of_the_callback_passes_through(trust):
    def fetch(name):
        raise DeadlineError(f"tuf/{name}: nothing came within 5 s")

    with pytest.raises(DeadlineError, match="within 5 s"):
        trust.refresh(fetch)
