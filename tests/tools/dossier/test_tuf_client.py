"""The adaptor for `tuf-conformance`, on a repository of ours; the suite itself where a checkout is given."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from edge_fl_server.release import website
from edge_fl_server.release.repository import Repository
from tools.dossier.conformance import CLIENT, reasons, run


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def site(tmp_path: Path, released: Repository) -> Iterator[str]:
    website.export(released, tmp_path / "www")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "www"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def call(folder: Path, *arguments: str) -> int:
    (folder / "metadata").mkdir(exist_ok=True)
    (folder / "targets").mkdir(exist_ok=True)
    command = [sys.executable, str(CLIENT), "--metadata-dir", str(folder / "metadata"), *arguments]
    return subprocess.run(command, timeout=60, check=False, capture_output=True).returncode


def test_the_client_refreshes_downloads_and_rejects(tmp_path: Path, site: str, released: Repository) -> None:
    device = tmp_path / "device"
    device.mkdir()
    (tmp_path / "root.json").write_bytes(released.root_bytes)
    assert call(device, "init", str(tmp_path / "root.json")) == 0
    at = ("--metadata-url", f"{site}/metadata/", "--target-dir", str(device / "targets"))
    base = ("--target-base-url", f"{site}/targets/")
    assert call(device, *at, "refresh") == 0
    assert {path.name for path in (device / "metadata").glob("*.json")} >= {"root.json", "timestamp.json"}
    assert call(device, *at, *base, "--target-name", "9/none.onnx", "download") == 1
    (extractor,) = (tmp_path / "www/targets/1").glob("*.extractor.onnx")
    good = extractor.read_bytes()
    extractor.write_bytes(b"x" * len(good))
    assert call(device, *at, *base, "--target-name", "1/extractor.onnx", "download") == 1
    assert not list((device / "targets").iterdir())
    extractor.write_bytes(good)
    assert call(device, *at, *base, "--target-name", "1/extractor.onnx", "download") == 0
    assert [path.read_bytes() for path in (device / "targets").iterdir()] == [good]


def test_every_expected_failure_has_a_reason() -> None:
    assert all(len(reason) > 40 for reason in reasons().values())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_suite_passes(tmp_path: Path) -> None:
    checkout = os.environ.get("TUF_CONFORMANCE", "")
    if not checkout:
        pytest.skip("TUF_CONFORMANCE names no checkout of theupdateframework/tuf-conformance")
    result = run(Path(checkout), tmp_path)
    assert result.passed > 100
    assert not result.failed
