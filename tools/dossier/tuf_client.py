#!/usr/bin/env python3
"""The device's TUF client as `tuf-conformance` calls it: `edge_fl_devices.install.trust` for metadata, `Mirror` and `Chunks` for targets.

    tuf_client.py --metadata-dir DIR init ROOT
    tuf_client.py --metadata-dir DIR --metadata-url URL refresh
    tuf_client.py --metadata-dir DIR --metadata-url URL --target-name NAME --target-base-url URL --target-dir DIR download

The trusted files are copied to DIR after each command, because `Trust` keeps them in a folder of its own. A target is one chunk.
Expected failures are in tuf_client.py.xfails, each with its reason.
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import urllib3

from edge_fl.blob import Blob
from edge_fl.errors import ArtefactError, EdgeFLError
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.storage.chunks import Chunks, ChunkSink
from edge_fl_devices.workers.releases import Mirror

CHUNK_BYTES = 256 * 1024  # the largest chunk


def main() -> int:
    parser = argparse.ArgumentParser()
    for option in ("metadata-dir", "target-dir"):
        parser.add_argument(f"--{option}", type=Path)
    for option in ("metadata-url", "target-base-url"):
        parser.add_argument(f"--{option}")
    parser.add_argument("--target-name", action="append", default=[])
    parser.add_argument("command", choices=("init", "refresh", "download"))
    parser.add_argument("root", nargs="?", type=Path)
    given = parser.parse_args()
    own = given.metadata_dir / "trust"
    if given.command == "init":
        own.mkdir(parents=True)
        shutil.copy(given.root, own / "shipped.json")
        shutil.copy(given.root, given.metadata_dir / "root.json")
        return 0
    trust = Trust(own, (own / "shipped.json").read_bytes())
    try:
        with trust.refreshed(_over_http(given.metadata_url)) as updater:
            for name in given.target_name:
                found = updater.get_targetinfo(name)
                if found is None:
                    raise ArtefactError(f"{name}: not signed")
                download(name, found.hashes, found.length, given.target_base_url, given.target_dir)
    except (EdgeFLError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        for path in (own / "metadata").glob("*.json"):
            shutil.copy(path, given.metadata_dir / path.name)
    return 0


def download(name: str, hashes: dict[str, str], length: int, base: str, folder: Path) -> None:
    """Download a target as a device does a blob. Raises ArtefactError."""
    if "sha256" not in hashes:
        raise ArtefactError(f"{name}: no sha256")
    sha256 = hashes["sha256"]
    blob = Blob(sha256, length, [sha256], CHUNK_BYTES)
    chunks, path = Chunks(folder.with_name("chunks")), folder / quote(name, "")
    sink = ChunkSink(chunks, blob)
    above, _, last = name.rpartition("/")
    Mirror(base.rstrip("/").removesuffix("/targets")).fetch(
        f"{above}/{sha256}.{last}".lstrip("/"), blob, sink
    )
    if sink.missing:
        raise ArtefactError(f"{name}: {base} has no file of this sha256")
    chunks.assemble(blob, path)


def _over_http(base: str) -> Callable[[str], bytes]:
    def fetch(name: str) -> bytes:
        response = urllib3.request("GET", base + name, retries=False)
        if response.status != 200:
            raise KeyError(name)
        return response.data

    return fetch


if __name__ == "__main__":
    sys.exit(main())
