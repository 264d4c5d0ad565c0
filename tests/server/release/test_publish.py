import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_fl.blob import describe, split
from edge_fl.errors import ArtefactError, DeadlineError, InputError
from edge_fl.inputs import InputSpec
from edge_fl.release.manifests import Canary, Manifest, blobs
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import UNTYPED, Packet
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.storage.slots import Slots
from edge_fl_server.mqtt.chunks import ChunkLimits, clear_chunks, numbered, send_chunks
from edge_fl_server.release.publish import Publisher, store
from edge_fl_server.release.repository import Repository
from tools.memory_broker import InMemoryBroker, InMemoryTransport

TOPICS = Topics("test")
HEAD = np.random.default_rng(99).bytes(200)  # an extra part that every release has


def release(number: int) -> tuple[Manifest, dict[str, bytes]]:
    payload = np.random.default_rng(number).bytes(5000)
    extractor, head = describe(payload, 1024), describe(HEAD, 1024)
    canary = Canary(seed=1, images=1, features=[[0.0]])
    manifest = Manifest(
        number,
        "t",
        "m",
        1,
        extractor,
        4,
        ["a"],
        InputSpec((1, 8, 8)),
        False,
        "none",
        17,
        8,
        canary,
        extras={"head": head},
    )
    return manifest, {extractor.sha256: payload, head.sha256: HEAD}


class Recording(InMemoryTransport):
    """Records its calls in order; fails once when `fail_at` is published."""

    def __init__(self, broker: InMemoryBroker) -> None:
        super().__init__(broker, "server", None, lambda event: None)
        self.calls: list[Packet | str] = []
        self.fail_at = ""

    def publish(self, packet: Packet) -> None:
        if self.fail_at and packet.topic.endswith(self.fail_at):
            self.fail_at = ""
            raise DeadlineError("the server dies here")
        self.calls.append(packet)
        super().publish(packet)

    def drain(self, deadline_s: float) -> None:
        self.calls.append("drain")
        super().drain(deadline_s)


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    broker = InMemoryBroker()
    yield broker
    broker.close()


@pytest.fixture
def transport(broker: InMemoryBroker) -> Recording:
    return Recording(broker)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "server")


@pytest.fixture
def publisher(transport: Recording, repository: Repository) -> Publisher:
    return Publisher(transport, TOPICS, repository, ChunkLimits(outstanding_bytes=2048))


def retained(broker: InMemoryBroker, below: str = "#") -> dict[str, bytes]:
    """The broker's retained messages, by topic without the fleet's root."""
    found: dict[str, bytes] = {}

    def take(event: object) -> None:
        if isinstance(event, Packet):
            found[event.topic.removeprefix(TOPICS.root + "/")] = event.payload

    reader = InMemoryTransport(broker, "reader", None, take, session_expiry_s=0, clean_start=True)
    reader.subscribe(f"{TOPICS.root}/{below}")
    reader.drain(5)
    reader.close()
    return found


def believed(folder: Path, broker: InMemoryBroker, repository: Repository) -> list[int]:
    files = {topic.removeprefix("tuf/"): payload for topic, payload in retained(broker, "tuf/+").items()}
    return [manifest.release for manifest in Trust(folder, repository.root_bytes).refresh(files.__getitem__)]


def stripped(call: Packet | str) -> str:
    return call if isinstance(call, str) else call.topic.removeprefix(TOPICS.root + "/")


def test_chunks_are_published_first_and_the_timestamp_last(publisher, transport):
    publisher.publish(*release(1))
    calls = [stripped(call) for call in transport.calls]
    sent = [call for call in calls if call != "drain"]
    chunks = [call for call in sent if call.startswith("art/")]
    metadata = ["tuf/1.root.json", "tuf/2.targets.json", "tuf/2.snapshot.json", "tuf/timestamp.json"]
    assert sent == chunks + metadata
    assert len(chunks) == 6
    assert calls[calls.index("tuf/timestamp.json") - 1] == "drain"
    assert calls[calls.index("tuf/1.root.json") - 1] == "drain"
    assert all(call.retain and call.qos == 1 for call in transport.calls if isinstance(call, Packet))


def test_progress_of_a_release_counts_the_bytes_acknowledged_by_the_broker(transport, repository):
    counts = []
    watched = Publisher(
        transport, TOPICS, repository, ChunkLimits(outstanding_bytes=2048), watch=counts.append
    )
    manifest, payloads = release(1)
    watched.publish(manifest, payloads)
    total = sum(map(len, payloads.values()))
    assert {(count.stage, count.of, count.bytes) for count in counts} == {("release 1", total, True)}
    done = [count.done for count in counts]
    assert done[0] == 0 and done[-1] == total and done == sorted(set(done)) and len(done) > 2


def test_outstanding_bytes_are_bounded(publisher, transport):
    publisher.publish(*release(1))
    outstanding = worst = 0
    for call in transport.calls:
        outstanding = 0 if call == "drain" else outstanding + len(call.payload) * call.topic.count("/art/")
        worst = max(worst, outstanding)
    assert worst == 2048


def test_a_device_trusts_fetches_and_installs_a_published_release(tmp_path, publisher, broker, repository):
    manifest, payloads = release(1)
    publisher.publish(manifest, payloads)
    assert believed(tmp_path / "trust", broker, repository) == [1]
    kept = retained(broker, "art/#")
    slots = Slots(tmp_path / "slots", reserve_bytes=0)
    for blob in blobs(manifest):
        for index in slots.sink(blob).missing:
            topic = TOPICS.chunk(blob.sha256, index).removeprefix(TOPICS.root + "/")
            slots.sink(blob).add(index, kept[topic])
    assert slots.install(manifest).extractor.read_bytes() == payloads[manifest.extractor.sha256]


@pytest.mark.parametrize("wrong", [b"", b"x" * 5000, b"short"])
def test_bytes_that_do_not_match_the_manifest_are_not_published(publisher, transport, repository, wrong):
    manifest, payloads = release(1)
    with pytest.raises(ArtefactError, match="nothing was published"):
        publisher.publish(manifest, payloads | {manifest.extractor.sha256: wrong})
    assert transport.calls == []
    assert list(repository.artefacts.iterdir()) == []
    assert repository.releases() == []


def test_a_release_that_cannot_be_stored_is_not_published(publisher, broker, repository):
    publisher.publish(*release(1))
    before, (manifest, payloads) = retained(broker), release(2)
    (repository.artefacts / manifest.extractor.sha256).mkdir()
    with pytest.raises(ArtefactError, match=r"disk, Is a directory; what was there stays"):
        publisher.publish(manifest, payloads)
    assert retained(broker) == before
    assert [kept.release for kept in repository.releases()] == [1]


@pytest.mark.parametrize("fail_at", ["/0/3", "targets.json", "snapshot.json", "timestamp.json"])
def test_a_crash_before_the_timestamp_leaves_the_old_release_and_a_second_try_succeeds(
    tmp_path, publisher, transport, broker, repository, fail_at
):
    publisher.publish(*release(1))
    transport.fail_at = fail_at
    with pytest.raises(DeadlineError, match="dies here"):
        publisher.publish(*release(2))
    assert believed(tmp_path / "trust", broker, repository) == [1]
    restarted = Publisher(transport, TOPICS, Repository(tmp_path / "server"))
    restarted.publish(*release(2))
    assert believed(tmp_path / "trust", broker, repository) == [1, 2]


def test_the_last_three_releases_stay_and_shared_parts_are_not_cleared(
    publisher, broker, repository, tmp_path
):
    for number in range(1, 6):
        publisher.publish(*release(number))
    needed = {blob.sha256 for number in (3, 4, 5) for blob in blobs(release(number)[0])}
    assert {topic.split("/")[1] for topic in retained(broker, "art/#")} == needed
    assert {path.name for path in (tmp_path / "server" / "artefacts").iterdir()} == needed
    assert believed(tmp_path / "trust", broker, repository) == [3, 4, 5]


def test_releases_that_another_process_signed_on_disk_are_published(
    publisher, broker, repository, tmp_path, transport
):
    publisher.publish(*release(1))
    for number in (2, 3, 4):
        store(Repository(tmp_path / "server"), *release(number))
    assert believed(tmp_path / "trust", broker, repository) == [1]
    publisher.publish_missing()
    needed = {blob.sha256 for number in (2, 3, 4) for blob in blobs(release(number)[0])}
    assert {topic.split("/")[1] for topic in retained(broker, "art/#")} == needed
    assert believed(tmp_path / "trust", broker, repository) == [2, 3, 4]
    transport.calls.clear()
    publisher.publish_missing()
    assert transport.calls == []  # nothing is sent twice


def test_superseded_metadata_is_cleared_but_for_one_version(publisher, broker):
    for number in range(1, 6):
        publisher.publish(*release(number))
    names = set(retained(broker, "tuf/+"))
    assert names == {
        "tuf/1.root.json",
        "tuf/5.targets.json",
        "tuf/6.targets.json",
        "tuf/5.snapshot.json",
        "tuf/6.snapshot.json",
        "tuf/timestamp.json",
    }


def test_everything_is_published_again_after_the_broker_lost_its_data(tmp_path, publisher, broker):
    for number in (1, 2):
        publisher.publish(*release(number))
    before = retained(broker)
    empty = InMemoryBroker()
    restarted = Publisher(Recording(empty), TOPICS, Repository(tmp_path / "server"))
    restarted.republish_all()
    current = {
        topic: payload
        for topic, payload in before.items()
        if "2.targets" not in topic and "2.snapshot" not in topic
    }
    assert retained(empty) == current
    empty.close()


def test_metadata_alone_can_be_published_again(publisher, transport):
    publisher.publish(*release(1))
    transport.calls.clear()
    publisher.republish_all(chunks=False)
    assert [stripped(call) for call in transport.calls if call != "drain"] == [
        "tuf/1.root.json",
        "tuf/2.targets.json",
        "tuf/2.snapshot.json",
        "tuf/timestamp.json",
    ]


def test_a_rollback_is_the_older_release_under_a_higher_version(tmp_path, publisher, broker, repository):
    for number in (1, 2):
        publisher.publish(*release(number))
    assert believed(tmp_path / "trust", broker, repository) == [1, 2]
    publisher.republish(1)
    assert believed(tmp_path / "trust", broker, repository) == [2, 1]


def test_a_release_that_is_not_kept_cannot_be_published_again(publisher):
    publisher.publish(*release(1))
    with pytest.raises(InputError, match=r"release 7: not kept, only \[1\] are"):
        publisher.republish(7)


def test_chunks_that_a_device_is_missing_are_published_again(publisher, transport, broker):
    manifest, payloads = release(1)
    publisher.publish(manifest, payloads)
    clear_chunks(transport, TOPICS, manifest.extractor)
    assert publisher.repair(manifest.extractor.sha256, [4, 0, 99, -1])
    sha256 = manifest.extractor.sha256
    found = {topic: payload for topic, payload in retained(broker, "art/#").items() if sha256 in topic}
    payload = payloads[sha256]
    assert found == {f"art/{sha256}/0/0": payload[:1024], f"art/{sha256}/0/4": payload[4096:]}


def test_an_unreleased_blob_is_not_sent(publisher, transport):
    publisher.publish(*release(1))
    transport.calls.clear()
    assert not publisher.repair("0" * 64, [0])
    assert transport.calls == []


@pytest.mark.broker
def test_a_real_broker_retains_a_release_as_it_was_published(mosquitto, repository):
    topics = Topics("publish")
    server = MqttTransport(mosquitto.endpoint, "publish-server", None, lambda event: None, session_expiry_s=0)
    server.wait_connected(60)
    manifest, payloads = release(1)
    Publisher(server, topics, repository).publish(manifest, payloads)
    arrived: queue.SimpleQueue[object] = queue.SimpleQueue()
    device = MqttTransport(mosquitto.endpoint, "publish-device", None, arrived.put, session_expiry_s=0)
    device.wait_connected(60)
    device.subscribe(f"{topics.root}/#")
    found: dict[str, bytes] = {}
    while len(found) < 10:  # six chunks, four files
        event = arrived.get(timeout=60)
        if isinstance(event, Packet):
            found[event.topic] = event.payload
    for transport in (server, device):
        transport.close()
    assert {topics.tuf(name): payload for name, payload in repository.files()}.items() <= found.items()
    for blob in blobs(manifest):
        for index, chunk in enumerate(split(payloads[blob.sha256], blob.chunk_bytes)):
            assert found[topics.chunk(blob.sha256, index)] == chunk


def test_any_blob_can_be_sent_with_its_own_type_and_expiry_and_be_cleared(transport, broker):
    blob = describe(bytes(40_000), 1024)
    send_chunks(transport, TOPICS, blob, numbered(blob, bytes(40_000)), expiry_s=60)
    first = transport.calls[0]
    assert (first.content_type, first.expiry_s, first.retain) == (UNTYPED, 60, True)
    topics = retained(broker, "art/#")
    assert len(topics) == 40
    assert f"art/{blob.sha256}/2/39" in topics  # groups of 16
    clear_chunks(transport, TOPICS, blob)
    assert retained(broker) == {}
    assert transport.calls[-1].content_type == UNTYPED
