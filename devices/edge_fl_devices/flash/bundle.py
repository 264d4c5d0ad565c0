"""Plan the bundle, the files in the folder `edge-fl` of a card, without writing anything."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w
from msgspec import to_builtins

from edge_fl.files import shared
from edge_fl_devices.flash import templates
from edge_fl_devices.flash.card_contents import CardContents, data_folder
from edge_fl_devices.update import launcher

FOLDER = "edge-fl"
MANIFEST = f"{FOLDER}/bundle.sha256"
LOG = f"{FOLDER}/install.log"
INSTALL = f"{FOLDER}/install.sh"
PLAIN, SECRET, SCRIPT = 0o644, 0o600, 0o755


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
        _text(templates.SCRIPT, templates.install_script(images, label_page=contents.label_page), SCRIPT),
        _text("config.toml", tomli_w.dumps(to_builtins(contents.config))),
        _text(templates.SERVICE, templates.service(host)),
        _text(templates.INSTALLER, templates.template(templates.INSTALLER)),
        *([_text(templates.LABEL_SERVICE, templates.label_service(images))] if images else []),
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
