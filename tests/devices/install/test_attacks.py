"""Rows 10, 11, 14, 15 and 16 of the failure matrix (docs/protocol.md) against a live agent, while the old model keeps serving.

Forged metadata and chunks are rejected with their reason, and genuine ones are accepted later. A bad model with a valid signature
fails its canary, and its release is blocked.
"""

import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from tuf.api.metadata import Metadata, Root, Timestamp

from edge_fl.blob import CHUNK_BYTES, split
from edge_fl.release.manifests import Manifest
from edge_fl.wire.transport import UNTYPED, Packet
from edge_fl_devices.install import canary
from edge_fl_devices.install.canary import MEBIBYTE
from edge_fl_devices.serving.predict import Predictor
from edge_fl_server.release.repository import Repository, now
from tests.devices import graphs
from tests.devices.scripted import TOPICS, running
from tests.devices.site import DATA, Site, big, head_device, site_over
from tools.memory_broker import InMemoryBroker, InMemoryTransport

TIGHT = canary.CanaryLimits(memory_bytes=128 * MEBIBYTE, cpu_s=1, deadline_s=100)
Files = dict[str, bytes]


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


@dataclass
class Scene:
    """pi-01 serves release 1 and is assigned release 2, while an attacker controls the broker."""

    site: Site
    first: Manifest

    @property
    def server(self) -> Repository:
        return self.site.repository

    @property
    def files(self) -> Files:
        return dict(self.server.files())

    def name(self, role: str) -> str:
        return next(name for name in self.files if role in name)

    def retain(self, files: Files) -> None:
        for name, payload in files.items():
            self.site.server.transport.publish(Packet(TOPICS.tuf(name), payload, retain=True))

    def assignment(self, manifest: Manifest) -> None:
        self.site.serve(manifest)

    def is_rejected(self, why: str) -> None:
        """The device publishes the reason and predicts as before."""
        self.site.server.wait_for(
            "pi-01", "state", lambda s: (s.status, s.why, s.release) == ("alert", why, 1)
        )
        predictor = Predictor(self.site.home)
        assert predictor.manifest == self.first
        assert len(predictor.predict(DATA.test.x)) == len(DATA.test)

    def recovers(self) -> None:
        """The device finally serves release 2."""
        self.site.server.wait_for("pi-01", "state", lambda s: (s.status, s.release) == ("ready", 2))


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    check = (
        partial(canary.require, limits=TIGHT) if "model" in request.fixturenames else lambda installed: None
    )
    broker = InMemoryBroker()
    with site_over(partial(InMemoryTransport, broker), tmp_path) as site:
        first = site.publish()
        site.serve(first)
        device = head_device(site.home, check=check)
        with running(device, connect=site.connect):
            site.server.ack("pi-01", site.server.wait_for("pi-01", "rpt").id)
            site.server.wait_for("pi-01", "state", lambda s: (s.release, s.activity) == (1, "idle"))
            yield Scene(site, first)
    broker.close()


# row 15: metadata


def rollback(scene: Scene, old: Files) -> Files:
    return {"timestamp.json": old["timestamp.json"]}


def freeze(scene: Scene, old: Files) -> Files:
    past = Repository(scene.server.folder, clock=lambda: now() - timedelta(days=20))
    return dict(past.rotate("timestamp"))


def old_snapshot(scene: Scene, old: Files) -> Files:
    return {scene.name("snapshot"): next(payload for name, payload in old.items() if "snapshot" in name)}


def wrong_key(scene: Scene, old: Files) -> Files:
    thief = Repository(scene.site.folder / "thief")
    for role in ("timestamp",) * 9:
        thief.rotate(role)
    return {"timestamp.json": dict(thief.files())["timestamp.json"]}


def below_threshold(scene: Scene, old: Files) -> Files:
    """The newest root requires two signatures on the timestamp; there is one."""
    root = Metadata[Root].from_bytes(scene.files[scene.name("root")])
    root.signed.version += 1
    root.signed.add_key(scene.server.keys.create().public_key, Timestamp.type)
    root.signed.roles[Timestamp.type].threshold = 2
    root.sign(scene.server.keys.signer(root.signed.roles[Root.type].keyids[0]))
    name = f"{root.signed.version}.root.json"
    (scene.server.folder / "metadata" / name).write_bytes(root.to_bytes())
    return {name: root.to_bytes()}


def truncated(scene: Scene, old: Files) -> Files:
    return {scene.name("targets"): scene.files[scene.name("targets")][:-30]}


def missing(scene: Scene, old: Files) -> Files:
    return {scene.name("snapshot"): b""}


def endless(scene: Scene, old: Files) -> Files:
    return {"timestamp.json": scene.files["timestamp.json"] + b" " * 20_000}


def pickled_metadata(scene: Scene, old: Files) -> Files:
    return {"timestamp.json": pickle.dumps(Bomb(scene.site.folder / "exploded"))}


METADATA: dict[str, tuple[Callable[[Scene, Files], Files], str]] = {
    "rollback": (rollback, "rollback"),
    "freeze": (freeze, "expired"),
    "mix-and-match": (old_snapshot, "mix_and_match"),
    "wrong key": (wrong_key, "wrong_key"),
    "threshold": (below_threshold, "wrong_key"),
    "truncated": (truncated, "truncated"),
    "missing": (missing, "missing"),
    "endless data": (endless, "endless"),
    "pickle": (pickled_metadata, "truncated"),
}


@pytest.mark.parametrize("attack", METADATA)
def test_forged_metadata_are_rejected_and_genuine_ones_are_accepted_later(scene: Scene, attack: str) -> None:
    forge, why = METADATA[attack]
    old = scene.files if attack != "rollback" else _empty_repository_of(scene)
    second = scene.site.publish()
    scene.retain(forge(scene, old))
    scene.assignment(second)
    scene.is_rejected(why)
    assert not (scene.site.folder / "exploded").exists()
    genuine = Repository(scene.server.folder)
    genuine.refresh()
    scene.retain(dict(genuine.files()))
    scene.recovers()


def _empty_repository_of(scene: Scene) -> Files:
    """The metadata from before the first release, which the device already trusts."""
    timestamp = Metadata[Timestamp].from_bytes(scene.files["timestamp.json"])
    timestamp.signed.version = 1
    timestamp.sign(scene.server.keys.signer(scene.server.root().roles[Timestamp.type].keyids[0]))
    return scene.files | {"timestamp.json": timestamp.to_bytes()}


def test_new_keys_end_a_fast_forward_attack(scene: Scene) -> None:
    """Fast-forward: version 1000 signed with the stolen online key makes every genuine version a rollback."""
    timestamp = Metadata[Timestamp].from_bytes(scene.files["timestamp.json"])
    timestamp.signed.version = 1000
    timestamp.sign(scene.server.keys.signer(scene.server.root().roles[Timestamp.type].keyids[0]))
    ahead = scene.site.publish()
    scene.retain({"timestamp.json": timestamp.to_bytes()})
    scene.assignment(ahead)
    scene.is_rejected("missing")  # that timestamp does not contain the release
    scene.retain(scene.files)
    scene.is_rejected("rollback")
    scene.server.rotate("timestamp")
    scene.retain(scene.files)
    scene.recovers()


# rows 10, 11 and 14: chunks

CHUNKS: dict[str, Callable[[Scene, bytes], bytes]] = {
    "tampered": lambda scene, chunk: bytes([chunk[0] ^ 1]) + chunk[1:],
    "longer than signed": lambda scene, chunk: chunk + b"x" * (2 * CHUNK_BYTES),
    "truncated": lambda scene, chunk: chunk[:-1],
    "pickle": lambda scene, chunk: pickle.dumps(Bomb(scene.site.folder / "exploded")),
}


@pytest.mark.parametrize("attack", CHUNKS)
def test_a_bad_chunk_is_never_kept_and_the_disk_stays_bounded(scene: Scene, attack: str) -> None:
    payload = big(graphs.WEIGHTS.copy() * 1.00001)
    manifest = scene.site.publish(payload)
    for index, chunk in enumerate(split(payload, manifest.extractor.chunk_bytes)):
        bad = CHUNKS[attack](scene, bytes(chunk))
        topic = TOPICS.chunk(manifest.extractor.sha256, index)
        scene.site.server.transport.publish(Packet(topic, bad, True, content_type=UNTYPED))
    scene.assignment(manifest)
    scene.is_rejected("chunk_hash")
    kept = (scene.site.home / "release" / "chunks").glob("*")
    assert sum(path.stat().st_size for path in kept) <= manifest.extractor.bytes
    assert not (scene.site.folder / "exploded").exists()
    scene.site.server.chunks(payload, manifest.extractor)
    scene.recovers()


# row 16: signed but bad

MODELS: dict[str, tuple[Callable[[], bytes], dict[str, object], str]] = {
    "a loop that never returns": (graphs.never_returns, {}, "canary_failed"),
    "a memory bomb": (partial(graphs.takes_memory, 400), {}, "canary_failed"),
    "terabytes": (graphs.asks_for_terabytes, {}, "canary_failed"),
    "a wrong feature size": (graphs.drops_a_feature, {}, "canary_failed"),
    "NaN": (graphs.gives_nan, {}, "canary_failed"),
    "a pickle": (partial(pickle.dumps, {"weights": [1.0] * 200}), {}, "canary_failed"),
    "a newer opset": (graphs.graph, {"opset": 99}, "unsupported_opset"),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_bad_model_with_a_valid_signature_is_blocked_while_the_old_model_serves(
    scene: Scene, model: str
) -> None:
    make, fields, why = MODELS[model]
    scene.assignment(scene.site.publish(make(), **fields))
    server = scene.site.server
    report = server.wait_for("pi-01", "rpt", number=2)
    assert (report.error, report.release, report.metrics) == (why, 2, {})
    scene.is_rejected(why)
    server.ack("pi-01", report.id)
    time.sleep(0.3)  # time for a retry, which must not happen
    assert len(server.messages("pi-01", "rpt")) == 2
