"""Contents of a card: one device's settings with the Pi's paths, its identity, wheels, and data with names that the card can hold."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from msgspec.structs import replace

from edge_fl.errors import ConfigError, shortened
from edge_fl.files.folder import walk
from edge_fl.files.paths import text
from edge_fl.modalities import of_most
from edge_fl.untrusted import whole
from edge_fl.wire import host_names, identity
from edge_fl.wire.mqtt import tls
from edge_fl_devices.board.installation import ETC, VAR
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.flash.wheels import Wheelhouse

MAX_UNITS = 255  # UTF-16 code units of one name
MOST_NAMED = 5
NOT_TEXT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # surrogates stand for bytes that are not UTF-8
NOT_IN_FAT = re.compile(r'["*:<>?\\|\U00010000-\U0010ffff]')  # mtools cannot write the last range: emoji
DEVICES = re.compile(
    r"(con|prn|aux|nul|com[1-9]|lpt[1-9])(\..*)?", re.IGNORECASE
)  # reserved by Linux and Windows
IDENTITY = f"{ETC}/identity"
IDENTITY_FILES = (identity.CA_FILE, identity.CERT_FILE, identity.KEY_FILE, identity.TOKEN_FILE)
RELEASES = "/opt/edge-fl/releases"
MAX_NUMBER = 10**15
HIDDEN = ("/home/", "/root/", "/tmp/", "/var/tmp/", "/run/user/")


def require_names(paths: Iterable[str], where: str, *, fat: bool) -> None:
    """Raise ConfigError that names the first few paths that cannot be written, to a FAT partition if `fat`."""
    if problems := list(_problems(paths, fat)):
        raise ConfigError(
            f"{where}: names that cannot be written: {shortened(problems, MOST_NAMED)}; expected other names",
            consequence="nothing was written",
        )


def _problems(paths: Iterable[str], fat: bool) -> Iterator[str]:
    written: dict[str, str] = {}  # every file and folder by its name in upper case
    for path in paths:
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            name, here = parts[end - 1], "/".join(parts[:end])
            key = _upper(here) if fat else here
            if key not in written:
                written[key] = here
                if problem := _problem(name, fat):
                    yield f"{here!r} ({problem})"
            elif written[key] != here:
                yield f"{here!r} (FAT does not distinguish it from {written[key]!r})"


def _problem(name: str, fat: bool) -> str:
    if NOT_TEXT.search(name):
        return "control characters, or not UTF-8"
    if not fat:
        return ""
    if found := NOT_IN_FAT.search(name):
        return f"contains {found[0]}, which FAT cannot hold"
    if name.endswith((".", " ")):
        return "ends in a dot or space, which FAT drops"
    if DEVICES.fullmatch(name):
        return "reserved for a device"
    units = len(name.encode("utf-16-le")) // 2
    return f"{units} characters, FAT holds {MAX_UNITS}" if units > MAX_UNITS else ""


def _upper(text: str) -> str:
    """Return upper case as FAT does, one character for one."""
    return "".join(up if len(up := character.upper()) == 1 else character for character in text)


@dataclass(frozen=True)
class CardContents:
    """`label_page`: whether the page for labels starts at every boot. `config` contains the paths on the Pi.
    `identity` contains private keys and is excluded from the repr.

    `images` are pairs of path below the device's data folder and local file; `releases` likewise, below the folder of releases.
    """

    config: DeviceConfig
    wheels: Wheelhouse
    identity: dict[str, bytes] = field(default_factory=dict, repr=False)
    root: bytes = b""
    images: tuple[tuple[str, Path], ...] = ()
    releases: tuple[tuple[str, Path], ...] = ()
    label_page: bool = False


def with_pi_paths(
    config: DeviceConfig, *, identified: bool, root: bool, releases: bool = False
) -> DeviceConfig:
    """Replace the paths by those on the Pi. Raises ConfigError for a data folder that the service cannot read."""
    source = config.data.partition(":")[2] or config.data
    if source.startswith(HIDDEN):
        raise ConfigError(
            f"data {config.data}: the service runs as its own user and can read no home or temporary folder; "
            "expected a folder such as /srv/images"
        )
    broker = replace(config.broker, identity=IDENTITY if identified else "")
    mirror = f"file://{RELEASES}" if releases else config.mirror
    return replace(config, folder=VAR, root=f"{ETC}/root.json" if root else "", broker=broker, mirror=mirror)


def read_releases(folder: Path) -> tuple[bytes, tuple[tuple[str, Path], ...]]:
    """Read an exported repository: its root of trust, and the files of its newest release. Raises ConfigError."""
    roots = sorted(folder.glob("metadata/*.root.json"), key=_number)
    releases = sorted(folder.glob("targets/*/"), key=_number)
    if not (roots and releases):
        raise ConfigError(
            f"{text(folder)}: no releases in it; expected a folder written by 'edge-fl release export'"
        )
    files = sorted(releases[-1].iterdir())
    return roots[-1].read_bytes(), tuple((path.relative_to(folder).as_posix(), path) for path in files)


def _number(path: Path) -> int:
    number = whole(path.name.partition(".")[0], MAX_NUMBER)
    return -1 if number is None else number


def read_images(folder: Path, config: DeviceConfig, *, fat: bool) -> tuple[tuple[tuple[str, Path], ...], int]:
    """List the files of the most frequent kind to copy to the device's data folder, one folder per class, and count the others.

    Raises ConfigError, also for names that cannot be written, to a FAT partition if `fat`.
    """
    if not data_folder(config):
        raise ConfigError(f"data {config.data}: --images needs a folder such as folder:/srv/images")
    if not folder.is_dir():
        raise ConfigError(f"{text(folder)}: no such folder; expected one with a folder of samples per class")
    root = folder.absolute()
    listing = walk(root)
    found = [path for path in listing.files if path.parent.parent == root and os.access(path, os.R_OK)]
    images = tuple((path.relative_to(root).as_posix(), path) for path in of_most(found))
    if not images:
        raise ConfigError(
            f"{text(folder)}: no pictures or recordings in it; expected a folder of them per class"
        )
    require_names((name for name, _ in images), text(folder), fat=fat)
    return images, len(listing.files) + len(listing.skipped) - len(images)


def data_folder(config: DeviceConfig) -> str:
    """Return the folder with the device's data, "" when its data source is not a folder."""
    kind, colon, path = config.data.partition(":")
    folder = path if colon and kind == "folder" else "" if colon else config.data
    return folder if folder.startswith("/") else ""


def require_valid_host(folder: Path, host: str, port: int) -> str:
    """Compare `host` with the certificate of the fleet's broker: next to the device's identity in `folder`, else of the broker itself.

    Return a line that says what was compared. Raises ConfigError if the device could never connect.
    """
    stored = folder.absolute().parent.parent / "broker" / identity.CERT_FILE
    same_fleet = stored.is_file() and _content(folder / identity.CA_FILE) == _content(
        stored.with_name(identity.CA_FILE)
    )
    if same_fleet:
        names = host_names.certified(x509.load_pem_x509_certificate(stored.read_bytes()))
    else:
        names = tls.broker_names(identity.endpoint(host, port, folder))
    if not names:
        return f"the broker's certificate was not compared with --host {host}: no broker answers there now"
    if not host_names.covers(names, host):
        raise ConfigError(f"--host {host}: {tls.other_host(names, host)}", consequence="nothing was written")
    return f"the broker's certificate is valid for {', '.join(names)}"


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def read_identity(folder: Path, device: str) -> dict[str, bytes]:
    """Read the device's identity or claim, written by `edge-fl fleet enrol`: contents by file name. Raises ConfigError."""
    owner = identity.read(folder).device
    if owner != device:
        raise ConfigError(f"{text(folder)}: is the identity of {owner}, not of {device}")
    return {name: (folder / name).read_bytes() for name in IDENTITY_FILES if (folder / name).exists()}
