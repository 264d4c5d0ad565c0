"""Back up a device's heads, settings, ledgers and identity into one private file, and restore them.

The file is one line of JSON and then a tar archive, encrypted with a passphrase (scrypt and Fernet of the package cryptography) or
protected against damage alone (sha256). Releases and caches are not in it: the device fetches and computes them again.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import tarfile
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from msgspec import Meta, Struct

from edge_fl.errors import InputError
from edge_fl.fields import Name
from edge_fl.files import atomic
from edge_fl.files.paths import text
from edge_fl.files.shared import make_folder, open_private
from edge_fl.untrusted import NOT_JSON
from edge_fl_devices.config import DeviceConfig
from edge_fl_maker.upkeep.device_folder import give_to_owner, stopped

KEPT = (
    "heads",
    "immediate",
    "own",
    "memory.json",
    "answers.json",
    "settings.json",
    "privacy.safetensors",
    "statistics",
    "tuf",
)
IDENTITY = ("ca.crt", "client.crt", "client.key", "client.key.new", "token", "username", "password")
MEMBER = re.compile(
    rf"(?:{'|'.join(map(re.escape, KEPT))})(?:/[\w.-]+){{0,3}}|identity/(?:{'|'.join(map(re.escape, IDENTITY))})"
)
MAX_BYTES = 2**30
MAX_HEADER = 4096
SCRYPT = {"length": 32, "n": 2**15, "r": 8, "p": 1}  # 32 MB
LEDGERS = ("privacy.safetensors", "statistics")
"""What only grows: an older one would allow updates beyond the budget, and pictures in a second sum."""


class BackupHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """First line of a backup. `salt`: of the passphrase, empty without one; `sha256`: of what follows."""

    edge_fl_backup: Annotated[int, Meta(ge=1, le=1)]
    device: Name
    salt: Annotated[str, Meta(max_length=64)] = ""
    sha256: Annotated[str, Meta(max_length=64)] = ""


def back_up(folder: Path, settings: DeviceConfig, file: Path, passphrase: str = "") -> int:
    """Write a new file of mode 0600 and return its size. Raises InputError if it exists or the agent runs."""
    if file.exists():
        raise InputError(f"{text(file)}: exists already, expected a new file")
    with stopped(folder):
        sources = {
            os.fspath(path.relative_to(folder)): path
            for name in KEPT
            for path in (folder / name, *(folder / name).rglob("*"))
            if path.is_file()
        }
        if settings.broker.identity:
            found = {f"identity/{name}": Path(settings.broker.identity) / name for name in IDENTITY}
            sources |= {name: path for name, path in found.items() if path.is_file()}
        archive = io.BytesIO()
        # as files: python-tuf keeps its newest root as a symbolic link, and a restore takes only files
        with tarfile.open(fileobj=archive, mode="w:gz", dereference=True) as tar:
            for name, path in sources.items():
                if MEMBER.fullmatch(name):
                    tar.add(path, name, recursive=False)
    payload, salt = archive.getvalue(), b""
    if passphrase:
        salt = os.urandom(16)
        payload = Fernet(_key(passphrase, salt)).encrypt(payload)
    header = BackupHeader(
        1, settings.id, base64.b64encode(salt).decode(), hashlib.sha256(payload).hexdigest()
    )
    content = msgspec.json.encode(header) + b"\n" + payload
    try:
        atomic.write(file, content, private=True)
    except OSError as error:
        raise InputError(f"{text(file)}: {error.strerror}; expected a writable folder") from error
    return len(content)


def read(file: Path, passphrase: str = "") -> tuple[BackupHeader, dict[str, bytes]]:
    """The contents of a backup by name. Raises InputError for anything but a complete backup with this passphrase."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise InputError(f"{text(file)}: larger than 1 GiB, expected a backup")
        line, _, payload = file.read_bytes().partition(b"\n")
        header = msgspec.json.decode(line[:MAX_HEADER], type=BackupHeader)
    except OSError as error:
        raise InputError(f"{text(file)}: {error.strerror}; expected a backup") from error
    except NOT_JSON as error:
        raise InputError(f"{text(file)}: not a backup of 'edge-fl device backup'") from error
    if hashlib.sha256(payload).hexdigest() != header.sha256:
        raise InputError(f"{text(file)}: damaged or incomplete")
    if bool(header.salt) != bool(passphrase):
        raise InputError(
            f"{text(file)}: {'encrypted; expected --passphrase-file' if header.salt else 'not encrypted; expected no --passphrase-file'}"
        )
    try:
        if header.salt:
            payload = Fernet(_key(passphrase, base64.b64decode(header.salt))).decrypt(payload)
        return header, dict(_members(payload))
    except InvalidToken as error:
        raise InputError(f"{text(file)}: wrong passphrase") from error
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise InputError(f"{text(file)}: {error}; expected a backup") from error


def restore(contents: dict[str, bytes], folder: Path, identity: Path | None) -> None:
    """Write the contents of a backup into a device's folder and an identity folder; may be repeated after an interruption.

    Records in LEDGERS that are there stay. Raises InputError, OSError.
    """
    make_folder(folder, 0o700)
    os.close(open_private(folder / "lock", os.O_WRONLY))
    with stopped(folder):
        for name, content in contents.items():
            top, _, rest = name.partition("/")
            if top == "identity":
                if identity is None:
                    continue
                make_folder(identity, 0o700)
                path = identity / rest
            else:
                path = folder / name
            if top in LEDGERS and path.exists():
                continue
            make_folder(path.parent, 0o700)
            atomic.write(path, content, private=True)
            for written in (path, path.parent):
                give_to_owner(written, folder)


def _members(archive: bytes) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    left = MAX_BYTES
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for member in tar:
            left -= member.size
            if not member.isfile() or not MEMBER.fullmatch(member.name) or ".." in member.name or left < 0:
                raise ValueError(f"unexpected content {member.name[:80]!r}")
            if file := tar.extractfile(member):
                found[member.name] = file.read()
    return found


def _key(passphrase: str, salt: bytes) -> bytes:
    return base64.urlsafe_b64encode(Scrypt(salt=salt, **SCRYPT).derive(passphrase.encode()))
