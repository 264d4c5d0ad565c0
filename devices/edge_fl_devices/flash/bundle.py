"""Plan the bundle, the files in the folder `edge-fl` of a card, from templates, without writing anything."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path

import tomli_w
from msgspec import to_builtins

from edge_fl import TELEMETRY_OFF
from edge_fl.files import shared
from edge_fl_devices.agent_update import launcher
from edge_fl_devices.board.installation import INSTALLER, LABEL_PORT, LABEL_SERVICE, SERVICE
from edge_fl_devices.flash.card_contents import CardContents, data_folder

SCRIPT = "install.sh"
FOLDER = "edge-fl"
MANIFEST = f"{FOLDER}/bundle.sha256"
LOG = f"{FOLDER}/install.log"
INSTALL = f"{FOLDER}/{SCRIPT}"
PLAIN, SECRET, EXECUTABLE = 0o644, 0o600, 0o755


def install_script(images: str, *, label_page: bool = False) -> str:
    """Return the installation script; `images` is the device's data folder, "" if its data source is not a folder.

    `label_page`: also enable the label page.
    """
    text = template(SCRIPT).replace("@IMAGES@", shlex.quote(images))
    return text.replace("@LABEL@", "yes" if label_page else "")


def service(host: str) -> str:
    """Return the agent's unit for a broker at `host`: own user, always restarted, minimal file and network access."""
    return _unit(SERVICE).replace("@ADDRESSES@", _addresses(host))


def label_service(images: str) -> str:
    """Return the unit of the label page, which may write to the folder of the pictures."""
    escaped = images.replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return _unit(LABEL_SERVICE).replace("@IMAGES@", escaped).replace("@PORT@", str(LABEL_PORT))


def _unit(name: str) -> str:
    switches = "\n".join(f"Environment={name}={value}" for name, value in TELEMETRY_OFF.items())
    return template(name).replace("@HARDENING@\n", template("hardening")).replace("@ENVIRONMENT@", switches)


def template(name: str) -> str:
    """Read a template of this package."""
    return files(__package__).joinpath(name).read_text("utf-8")


def _addresses(host: str) -> str:
    """Allow only the broker if it is given as an IP address; for a name no restriction is possible, it must be resolved first."""
    try:
        address = ip_address(host)
    except ValueError:
        return f"# no IPAddressAllow: {host} is a name whose address is not known here"
    return f"IPAddressDeny=any\nIPAddressAllow=localhost\nIPAddressAllow={address}"


@dataclass(frozen=True)
class File:
    """A file with its path from the root of the boot partition; the content of wheels and pictures is read only when written."""

    path: str
    content: bytes | Path = field(repr=False)
    mode: int = PLAIN

    @property
    def size(self) -> int:
        return self.content.stat().st_size if isinstance(self.content, Path) else len(self.content)

    @property
    def sha256(self) -> str:
        if isinstance(self.content, bytes):
            return hashlib.sha256(self.content).hexdigest()
        with self.content.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def read(self) -> bytes:
        return self.content.read_bytes() if isinstance(self.content, Path) else self.content


def bundle_files(contents: CardContents) -> tuple[File, ...]:
    """Return all files, the manifest last: its presence shows that the bundle is complete."""
    host, images = contents.config.broker.host, data_folder(contents.config)
    planned = [
        _text(SCRIPT, install_script(images, label_page=contents.label_page), EXECUTABLE),
        _text("config.toml", tomli_w.dumps(to_builtins(contents.config))),
        _text(SERVICE, service(host)),
        _text(INSTALLER, template(INSTALLER)),
        *([_text(LABEL_SERVICE, label_service(images))] if images else []),
        _text("launcher.py", Path(launcher.__file__).read_text("utf-8")),
        _text("shared.py", Path(shared.__file__).read_text("utf-8")),
        *(_text(f"requirements-{python}.txt", text) for python, text in contents.wheels.requirements.items()),
        *(File(f"{FOLDER}/wheels/{path.name}", path) for path in contents.wheels.files),
        *(File(f"{FOLDER}/releases/{path}", file) for path, file in contents.releases),
        *(File(f"{FOLDER}/images/{path}", file) for path, file in contents.images),
        *(
            File(f"{FOLDER}/identity/{name}", contents.identity[name], SECRET)
            for name in sorted(contents.identity)
        ),
    ]
    if contents.root:
        planned.append(File(f"{FOLDER}/root.json", contents.root))
    return (*planned, File(MANIFEST, manifest(planned).encode()))


def manifest(planned: Iterable[File]) -> str:
    """Return one line per file in the format of `sha256sum`, with paths relative to the bundle's folder."""
    return "".join(f"{file.sha256}  {file.path.removeprefix(f'{FOLDER}/')}\n" for file in planned)


def parse_manifest(manifest: str) -> dict[str, str]:
    """Return the hash of each file by its path from the root of the boot partition."""
    lines = (line.partition("  ") for line in manifest.splitlines())
    return {f"{FOLDER}/{path}": digest for digest, _, path in lines}


def _text(name: str, text: str, mode: int = PLAIN) -> File:
    return File(f"{FOLDER}/{name}", text.encode(), mode)
