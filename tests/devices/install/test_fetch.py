"""A download subscribes group by group, keeps verified chunks only, repeats requests for missing ones, and ends."""

from collections.abc import Iterable
from pathlib import Path

from edge_fl.blob import Assembly, Blob, describe, split
from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.wire.messages import Echo, Request, encode
from edge_fl.wire.topics import Topics
from edge_fl_devices.agent.effects import Effect, Publish, Subscribe, Unsubscribe
from edge_fl_devices.agent.events import Failed, Fetched
from edge_fl_devices.install.fetch import Download, FetchLimits, MetadataFetch
from edge_fl_server.release.repository import Repository
from tests.devices.graphs import graph, manifest_for

TOPICS = Topics("main")
ECHO = "efl/1/main/d/pi-01/dn/echo"
LIMITS = FetchLimits(stall_s=10, bad_chunk_s=1, tries=3, quiet_s=0.3, metadata_s=5)
PAYLOAD = bytes(range(256)) * 4 * 36 + b"tail"  # 37 chunks of 1 KiB: groups of 16, 16 and 5
BLOB = describe(PAYLOAD, 1024)
CHUNKS = [bytes(chunk) for chunk in split(PAYLOAD, 1024)]


def download(sink: Assembly | None = None) -> Download:
    return Download(BLOB, sink or Assembly(BLOB), "pi-01", TOPICS, LIMITS)


def groups(effects: Iterable[Effect]) -> list[str]:
    """Abbreviated effects: +0 subscribes to group 0 at QoS 0, -0 unsubscribes, ? is a request to the server."""
    effects = list(effects)
    assert all(effect.qos == 0 for effect in effects if isinstance(effect, Subscribe))
    signs = {Subscribe: "+", Unsubscribe: "-"}
    return ["?" if isinstance(e, Publish) else signs[type(e)] + e.pattern.split("/")[-2] for e in effects]  # type: ignore[union-attr]


def test_the_next_group_is_subscribed_when_half_of_one_has_arrived() -> None:
    assembly = Assembly(BLOB)
    fetch = download(assembly)
    said = {-1: groups(fetch.begin(0.0))}
    for index, chunk in enumerate(CHUNKS):
        assert fetch.verified_bytes == index * 1024
        said[index] = groups(fetch.chunk(index, chunk, 0.1))
    assert fetch.verified_bytes == len(PAYLOAD)
    assert {index: found for index, found in said.items() if found} == {
        -1: ["+0"], 7: ["+1"], 15: ["-0"], 23: ["+2"], 31: ["-1"], 36: ["-2"]
    }  # fmt: skip
    assert fetch.outcome == Fetched(BLOB.sha256, len(PAYLOAD)) and assembly.join() == PAYLOAD


def test_chunks_already_present_are_not_fetched() -> None:
    assembly = Assembly(BLOB)
    for index in (*range(16), *range(20, 37)):
        assembly.add(index, CHUNKS[index])
    fetch = download(assembly)
    said = groups(fetch.begin(0.0))
    for index in range(16, 20):
        said += groups(fetch.chunk(index, CHUNKS[index], 0.1))
    assert said == ["+1"] * 4 + ["-1"] * 4 and fetch.outcome == Fetched(BLOB.sha256, 4 * 1024)


def test_a_complete_blob_is_done_at_once() -> None:
    assembly = Assembly(BLOB)
    for index, chunk in enumerate(CHUNKS):
        assembly.add(index, chunk)
    fetch = download(assembly)
    assert groups(fetch.begin(0.0)) == [] and fetch.outcome == Fetched(BLOB.sha256, 0)


def test_chunks_may_arrive_in_any_order_and_twice() -> None:
    fetch = download()
    groups(fetch.begin(0.0))
    for index in [*reversed(range(16)), *range(16), *range(36, 15, -1)]:
        groups(fetch.chunk(index, CHUNKS[index], 0.1))
    assert isinstance(fetch.outcome, Fetched) and fetch.outcome.bytes == len(PAYLOAD) + 16 * 1024


def test_a_stalled_group_is_subscribed_again_then_requested_from_the_server_then_fails() -> None:
    fetch = download()
    groups(fetch.begin(0.0))
    groups(fetch.chunk(0, CHUNKS[0], 1.0))
    assert fetch.wake_s == 11.0 and groups(fetch.tick(10.9)) == []
    said = []
    while fetch.outcome is None:
        effects = list(fetch.tick(fetch.wake_s))
        said.append(groups(effects))
        for effect in effects:
            if isinstance(effect, Publish):
                assert isinstance(effect.message, Request) and effect.message.missing == list(range(1, 37))
    assert said == [["+0"], ["+0"], ["+0"], ["?", "+0"], ["-0"]]
    assert (
        isinstance(fetch.outcome, Failed)
        and fetch.outcome.reason == "deadline"
        and "36 of 37" in fetch.outcome.detail
    )


def test_progress_in_one_group_does_not_count_against_the_next() -> None:
    fetch = download()
    groups(fetch.begin(0.0))
    for _ in range(3):
        groups(fetch.tick(fetch.wake_s))
    for index in range(16):
        groups(fetch.chunk(index, CHUNKS[index], 100.0))
    assert [groups(fetch.tick(fetch.wake_s)) for _ in range(3)] == [["+1"]] * 3


def test_a_bad_chunk_is_fetched_again_soon_and_named_if_it_stays_bad() -> None:
    assembly = Assembly(BLOB)
    fetch = download(assembly)
    groups(fetch.begin(0.0))
    now_s = 0.0
    while fetch.outcome is None:
        groups(fetch.chunk(3, b"x" * 1024, now_s))
        assert fetch.wake_s <= now_s + 1
        now_s = fetch.wake_s
        groups(fetch.tick(now_s))
    assert (
        isinstance(fetch.outcome, Failed) and fetch.outcome.reason == "chunk_hash" and 3 in assembly.missing
    )


def test_no_new_group_is_subscribed_behind_a_bad_chunk() -> None:
    fetch = download()
    groups(fetch.begin(0.0))
    groups(fetch.chunk(15, b"x" * 1024, 0.0))
    assert [groups(fetch.chunk(index, CHUNKS[index], 0.1)) for index in range(15)] == [[]] * 15
    assert fetch.wake_s == 1.0, "good chunks do not put off the bad one"
    assert list(fetch.tick(1.0)) == [
        Unsubscribe(TOPICS.chunk_group(BLOB.sha256, 0)),
        Subscribe(TOPICS.chunk(BLOB.sha256, 15), qos=0),
    ]
    assert groups(fetch.chunk(15, CHUNKS[15], 1.1)) == ["-0", "+1"] and fetch.wake_s == 11.1


class FullDisk(Assembly):
    def add(self, index: int, payload: bytes) -> bool:
        raise ArtefactError("no space", Failure.ENOSPC)


def test_a_full_disk_ends_the_fetch_at_once() -> None:
    fetch = download(FullDisk(BLOB))
    groups(fetch.begin(0.0))
    assert groups(fetch.chunk(0, CHUNKS[0], 0.1)) == ["-0"]
    assert isinstance(fetch.outcome, Failed) and fetch.outcome.reason == "enospc"


def test_at_most_1024_missing_chunks_are_requested() -> None:
    many = Blob("a" * 64, 5000 * 1024, ["b" * 64] * 5000, 1024)
    fetch = Download(many, Assembly(many), "pi-01", TOPICS, LIMITS)
    groups(fetch.begin(0.0))
    asked = [e for _ in range(4) for e in fetch.tick(fetch.wake_s) if isinstance(e, Publish)]
    assert isinstance(asked[0].message, Request) and len(asked[0].message.missing) == 1024


def ask() -> tuple[MetadataFetch, Echo]:
    """A metadata fetch begun at 0.0, and its echo."""
    metadata_fetch = MetadataFetch(3, "pi-01", TOPICS, LIMITS)
    subscribe, echo = metadata_fetch.begin(0.0)
    assert subscribe == Subscribe("efl/1/main/tuf/+")
    assert isinstance(echo, Publish) and isinstance(echo.message, Echo)
    return metadata_fetch, echo.message


def test_metadata_are_complete_after_the_echo(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.publish(manifest_for(graph()))
    files = dict(repository.files())
    metadata_fetch, echo = ask()
    for name, payload in files.items():
        metadata_fetch.file(name, payload, 0.1)
    metadata_fetch.echo(Echo("another"), 0.1)
    assert list(metadata_fetch.tick(0.1)) == [] and metadata_fetch.outcome is None
    metadata_fetch.echo(echo, 0.2)
    assert (
        list(metadata_fetch.tick(0.2)) == [Unsubscribe("efl/1/main/tuf/+")]
        and metadata_fetch.outcome == files
    )


def test_an_echo_before_the_metadata_ends_nothing() -> None:
    metadata_fetch, echo = ask()
    metadata_fetch.echo(echo, 0.1)
    metadata_fetch.file("3.snapshot.json", b"s", 0.1)
    metadata_fetch.echo(echo, 0.2)
    assert list(metadata_fetch.tick(4.9)) == [] and metadata_fetch.outcome is None


def test_metadata_are_complete_after_a_quiet_time() -> None:
    metadata_fetch, _ = ask()
    metadata_fetch.file("timestamp.json", b"t", 0.1)
    metadata_fetch.file("3.snapshot.json", b"s", 0.3)
    metadata_fetch.file("2.snapshot.json", b"", 0.35)  # cleared
    assert list(metadata_fetch.tick(0.5)) == [] and metadata_fetch.outcome is None
    assert [type(e) for e in metadata_fetch.tick(0.7)] == [Unsubscribe]
    assert metadata_fetch.outcome == {"timestamp.json": b"t", "3.snapshot.json": b"s"}


def test_files_named_by_the_metadata_are_waited_for(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.publish(manifest_for(graph()))
    files = dict(repository.files())
    (targets,) = [name for name in files if "targets" in name]
    metadata_fetch, _ = ask()
    for name in files.keys() - {targets}:
        metadata_fetch.file(name, files[name], 0.1)
    assert metadata_fetch.wake_s == 5.0
    metadata_fetch.file(targets, files[targets], 4.0)  # a slow link
    assert metadata_fetch.wake_s == 4.3


def test_without_a_timestamp_there_are_no_metadata() -> None:
    metadata_fetch, _ = ask()
    metadata_fetch.file("3.snapshot.json", b"s", 4.9)
    list(metadata_fetch.tick(5.0))
    assert isinstance(metadata_fetch.outcome, Failed) and metadata_fetch.outcome.reason == "missing"


def test_a_stream_of_files_does_not_delay_the_end_forever() -> None:
    metadata_fetch, _ = ask()
    for number in range(1000):
        metadata_fetch.file("timestamp.json", b"t", 0.01 * number)
        metadata_fetch.file(f"{number}.snapshot.json", b"s", 0.01 * number)
    assert metadata_fetch.wake_s == 5.0
    list(metadata_fetch.tick(5.0))
    assert isinstance(metadata_fetch.outcome, dict) and len(metadata_fetch.outcome) == 256


def test_fetches_take_the_messages_that_are_theirs(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.publish(manifest_for(graph()))
    fetch, (metadata_fetch, echo) = download(), ask()
    list(fetch.begin(0.0))
    chunks = {TOPICS.chunk(BLOB.sha256, index): chunk for index, chunk in enumerate(CHUNKS)}
    files = {TOPICS.tuf(name): payload for name, payload in repository.files()}
    others = {TOPICS.chunk("0" * 64, 0): b"of another blob", ECHO: b"no message"}
    for topic, payload in (others | chunks | files).items():
        for each in (fetch, metadata_fetch):
            list(each.received(TOPICS.parse(topic), payload, 1.0))
    assert fetch.outcome == Fetched(BLOB.sha256, BLOB.bytes) and metadata_fetch.outcome is None
    list(metadata_fetch.received(TOPICS.parse(ECHO), encode(echo), 1.0))
    assert metadata_fetch.outcome == dict(repository.files())
