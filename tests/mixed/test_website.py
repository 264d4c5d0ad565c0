"""The signed repository on a web server: python-tuf's client verifies it, devices download from it."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tuf.api.exceptions import RepositoryError
from tuf.ngclient import Updater

from edge_fl.blob import describe
from edge_fl.cli import main
from edge_fl.release.manifests import Manifest, paths
from edge_fl.wire import tensors
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.workers.releases import Mirror
from edge_fl_server.release import website
from edge_fl_server.release.publish import Publisher
from edge_fl_server.release.repository import Repository
from tests.devices import graphs
from tests.devices.scripted import TOPICS, ScriptedServer, eventually, running
from tests.devices.site import big, head_device
from tools.memory_broker import InMemoryBroker, InMemoryTransport


class Handler(SimpleHTTPRequestHandler):
    """Python's request handler, with `ranges` also for range requests; records all requests."""

    asked: list[tuple[str, str]]
    ranges = False

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.asked.append((self.path, wanted))
        path = Path(self.translate_path(self.path))
        if not (self.ranges and wanted and path.is_file()):
            super().do_GET()
            return
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups())
        payload = path.read_bytes()[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(folder: Path, *, ranges: bool = False) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A web server of `folder` on loopback: its address, and its requests as (path, range)."""
    asked: list[tuple[str, str]] = []
    kind = type("Recording", (Handler,), {"asked": asked, "ranges": ranges})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


@dataclass
class Fleet:
    """A repository, fully exported to `web`, and a broker with its metadata and optionally its chunks."""

    folder: Path
    broker: InMemoryBroker = field(default_factory=InMemoryBroker)

    def __post_init__(self) -> None:
        self.web, self.repository = self.folder / "web", Repository(self.folder / "home" / "main")
        website.keep(self.repository, self.web)
        self.server = ScriptedServer(partial(InMemoryTransport, self.broker))
        self.server.online()

    def publish(self, number: int, payload: bytes) -> Manifest:
        """As the real server does, on a broker of its own; the devices' broker hears of it, and gets no chunk."""
        manifest, elsewhere = graphs.manifest_for(payload, release=number, extras=EXTRAS), InMemoryBroker()
        transport = InMemoryTransport(elsewhere, "publisher", None, lambda event: None)
        payloads = {manifest.extractor.sha256: payload, EXTRAS["head"].sha256: HEAD}
        Publisher(transport, TOPICS, self.repository).publish(manifest, payloads)
        transport.close()
        elsewhere.close()
        self.server.metadata(self.repository.files())
        self.server.assignment(
            "pi-01", "serve", run_id="toy", round=number, id=f"rel-{number}", release=number
        )
        return manifest

    def serves(self, device: Any, release: int) -> None:
        """Waits until a device runs a release."""
        with running(device, connect=partial(InMemoryTransport, self.broker)):
            eventually(lambda: device.state.release == release, 30)


HEAD = tensors.pack({"head": {"weight": np.ones((400,), np.float32)}})
EXTRAS = {"head": describe(HEAD, 1024)}


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.server.leave()
    fleet.broker.close()


def stock_client(folder: Path, address: str, root: bytes) -> Updater:
    """python-tuf's client, unchanged."""
    (folder / "downloads").mkdir(parents=True)
    return Updater(
        str(folder),
        f"{address}/metadata/",
        target_dir=str(folder / "downloads"),
        target_base_url=f"{address}/targets/",
        bootstrap=root,
    )


def test_python_tufs_client_verifies_and_downloads_it(fleet: Fleet, tmp_path: Path) -> None:
    payloads = {number: graphs.graph(weights=graphs.WEIGHTS * number) for number in (1, 2)}
    for number, payload in payloads.items():
        fleet.publish(number, payload)
    with serving(fleet.web) as (address, _):
        client = stock_client(tmp_path / "auditor", address, fleet.repository.root_bytes)
        client.refresh()
        for number, payload in payloads.items():
            info = client.get_targetinfo(f"{number}/extractor.onnx")
            assert info is not None
            assert Path(client.download_target(info)).read_bytes() == payload
    assert not [path for path in fleet.web.rglob("*") if path.suffix == ".pem"]


def test_python_tufs_client_rejects_modified_files(fleet: Fleet, tmp_path: Path) -> None:
    manifest = fleet.publish(1, graphs.graph())
    (place,) = fleet.web.glob(f"targets/1/{manifest.extractor.sha256}.*")
    place.write_bytes(place.read_bytes()[:-1] + b"x")
    with serving(fleet.web) as (address, _):
        client = stock_client(tmp_path / "auditor", address, fleet.repository.root_bytes)
        info = client.get_targetinfo("1/extractor.onnx")
        assert info is not None
        with pytest.raises(RepositoryError):
            client.download_target(info)


@pytest.mark.parametrize("ranges", [False, True])
def test_a_device_installs_from_the_mirror_what_the_broker_lacks(fleet: Fleet, ranges: bool) -> None:
    manifest = fleet.publish(1, big())
    with serving(fleet.web, ranges=ranges) as (address, asked):
        device = head_device(
            fleet.folder / "pi-01", root=fleet.repository.root_bytes, mirror=Mirror(address + "/")
        )
        fleet.serves(device, 1)
    assert device.reporting.last["head"].bytes_down == manifest.extractor.bytes + len(HEAD)
    assert [path for path, _ in asked] == [f"/targets/{path}" for path in paths(manifest)]


def test_a_device_installs_from_its_card_what_the_broker_lacks(fleet: Fleet) -> None:
    fleet.publish(1, big())
    card = Mirror(f"file://{fleet.web}")
    device = head_device(fleet.folder / "pi-01", root=fleet.repository.root_bytes, mirror=card)
    fleet.serves(device, 1)
    assert device.reporting.last["head"].bytes_down == 0


def test_only_missing_bytes_are_requested_from_a_mirror(fleet: Fleet) -> None:
    fleet.publish(1, big())
    manifest = fleet.publish(2, payload := big(graphs.WEIGHTS * 2))
    slots, blob = Slots(fleet.folder / "slots"), manifest.extractor
    slots.prepare(manifest)
    for index in set(range(40)) - {7, 9}:
        slots.sink(blob).add(index, payload[index * 1024 : (index + 1) * 1024])
    sink = slots.sink(blob)
    with serving(fleet.web, ranges=True) as (address, asked):
        (path, _), _ = paths(manifest).items()
        assert Mirror(address).fetch(path, blob, sink) == 3 * 1024
        assert Mirror(address).fetch(path, blob, sink) == 0
    assert asked == [(f"/targets/{path}", f"bytes={7 * 1024}-{10 * 1024 - 1}")]
    assert sink.missing == []


def spoiled(place: Path) -> None:
    place.write_bytes(place.read_bytes()[:5000] + b"x" * (place.stat().st_size - 5000))


def cut_short(place: Path) -> None:
    place.write_bytes(place.read_bytes()[:5000])


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("harm", [spoiled, cut_short, Path.unlink])
def test_damaged_bytes_of_a_mirror_are_replaced_from_the_broker(
    fleet: Fleet, harm: Callable[[Path], None], local: bool, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = fleet.publish(1, payload := big())
    for content, blob in ((payload, manifest.extractor), (HEAD, EXTRAS["head"])):
        fleet.server.chunks(content, blob)
    (place,) = fleet.web.glob(f"targets/1/{manifest.extractor.sha256}.*")
    harm(place)
    with serving(fleet.web) as (address, _):
        mirror = Mirror(f"file://{fleet.web}" if local else address)
        device = head_device(fleet.folder / "pi-01", root=fleet.repository.root_bytes, mirror=mirror)
        fleet.serves(device, 1)
    assert "the rest is fetched from the broker" in caplog.text
    installed = Slots(fleet.folder / "pi-01" / "release").current()
    assert installed is not None
    assert installed.extractor.read_bytes() == payload


def test_an_export_is_updated_and_keeps_the_kept_releases(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["release", "export", str(tmp_path / "out"), "--home", str(tmp_path / "home")]
    for number in range(1, 6):
        fleet.publish(number, graphs.graph(weights=graphs.WEIGHTS * number))
        assert main(command) == 0
        assert capsys.readouterr().out.endswith("metadata/timestamp.json\n")
    assert main(command) == 0
    assert capsys.readouterr().out == ""
    assert {place.parent.name for place in (tmp_path / "out" / "targets").glob("*/*")} == {"3", "4", "5"}
    versioned = {place.name for place in (tmp_path / "out" / "metadata").glob("*.targets.json")}
    assert versioned == {"5.targets.json", "6.targets.json"}


def test_an_export_without_all_its_bytes_changes_nothing(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = fleet.publish(1, graphs.graph())
    (fleet.repository.artefacts / manifest.extractor.sha256).unlink()
    assert main(["release", "export", str(tmp_path / "out"), "--home", str(tmp_path / "home")]) == 1
    assert "nothing was exported" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_interrupted_export_is_completed_by_the_next(fleet: Fleet, tmp_path: Path) -> None:
    manifest = fleet.publish(1, graphs.graph())
    out = tmp_path / "out"
    (out / "targets" / "1").mkdir(parents=True)
    (out / "targets" / "1" / ".half.onnx.0a1b2c3d.part").write_bytes(b"half")
    (out / "metadata").mkdir()
    (out / "metadata" / "1.root.json").write_bytes(fleet.repository.root_bytes)
    website.export(fleet.repository, out)
    assert {str(place.relative_to(out / "targets")) for place in out.glob("targets/*/*")} == {
        *paths(manifest)
    }


def test_an_export_does_not_touch_a_folder_with_other_content(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.publish(1, graphs.graph())
    mine = tmp_path / "photos" / "metadata" / "faces.json"
    mine.parent.mkdir(parents=True)
    mine.write_text("{}")
    for folder, word in ((tmp_path / "photos", "something else"), (fleet.repository.folder, "keys")):
        command = ["release", "export", str(folder), "--home", str(tmp_path / "home"), "--fleet", "main"]
        assert main(command) == 4
        assert word in capsys.readouterr().err
        assert not (folder / "targets").exists()
    assert mine.exists()
