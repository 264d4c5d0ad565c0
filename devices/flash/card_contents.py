"""What a person wants on a card: one device's settings, its identity and what pip installs, and where all of it ends up on the Pi."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from devices.config import DeviceConfig
from devices.flash.wheels import Wheelhouse
from edge_fl.errors import ConfigError
from edge_fl.wire import identity

ETC, VAR = "/etc/edge-fl", "/var/lib/edge-fl"
IDENTITY = f"{ETC}/identity"
IDENTITY_FILES = (identity.CA_FILE, identity.CERT_FILE, identity.KEY_FILE, identity.TOKEN_FILE)
HIDDEN = ("/home/", "/root/", "/tmp/", "/var/tmp/", "/run/user/")


@dataclass(frozen=True)
class CardContents:
    """`config` holds the paths that are valid on the Pi. `identity` is never shown: keys are in it.

    `images` are (path below the device's data folder, file here).
    """

    config: DeviceConfig
    wheels: Wheelhouse
    identity: dict[str, bytes] = field(default_factory=dict, repr=False)
    root: bytes = b""
    images: tuple[tuple[str, Path], ...] = ()


def on_the_pi(config: DeviceConfig, *, identified: bool, root: bool) -> DeviceConfig:
    """The same settings with the paths of the Pi. Raises ConfigError for a data folder that the service cannot see."""
    source = config.data.partition(":")[2] or config.data
    if source.startswith(HIDDEN):
        raise ConfigError(
            f"data {config.data}: the service runs as its own user and sees no home or temporary folder; "
            "expected a folder such as /srv/images"
        )
    broker = replace(config.broker, identity=IDENTITY if identified else "")
    return replace(config, folder=VAR, root=f"{ETC}/root.json" if root else "", broker=broker)


def read_images(folder: Path, config: DeviceConfig) -> tuple[tuple[str, Path], ...]:
    """The pictures in a folder that go to where the device looks for its data, a folder per class. Raises ConfigError."""
    if not data_folder(config):
        raise ConfigError(f"data {config.data}: --images goes into a folder such as folder:/srv/images")
    found = tuple(
        (path.relative_to(folder).as_posix(), path) for path in sorted(folder.rglob("*")) if path.is_file()
    )
    if not found:
        raise ConfigError(f"{folder}: holds no files; expected a folder of pictures per class")
    return found


def data_folder(config: DeviceConfig) -> str:
    """Where the device looks for pictures, "" when its data come from something else."""
    kind, colon, path = config.data.partition(":")
    folder = path if colon and kind == "folder" else "" if colon else config.data
    return folder if folder.startswith("/") else ""


def read_identity(folder: Path, device: str) -> dict[str, bytes]:
    """The device's identity, or its claim to one, as `edge-fl fleet enrol` made it: file name -> content. Raises ConfigError."""
    found = identity.read(folder)
    if found.device != device:
        raise ConfigError(f"{folder}: is the identity of {found.device}, not of {device}")
    return {name: (folder / name).read_bytes() for name in IDENTITY_FILES if (folder / name).exists()}
