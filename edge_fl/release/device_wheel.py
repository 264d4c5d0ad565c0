"""Pack the wheel of edge-fl that a device needs from the installed packages, reproducibly, without network or build tool.

A wheel is a zip of the import packages, the metadata and the entry points, with a list of hashes; editable installs have all of these.
The packages of the server's and the broker's side are left out, with their entry points.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path

from edge_fl.errors import ConfigError
from edge_fl.files.paths import text

NAME = "edge-fl"
PACKAGES = ("edge_fl", "edge_fl_devices")
EXTENSION = "edge_fl_maker"  # taken along where it is installed
WHEEL = "Wheel-Version: 1.0\nGenerator: edge-fl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time in a zip
MODE = 0o644 << 16


def pack() -> tuple[str, bytes]:
    """Return (file name, wheel) of the running edge-fl. Raises ConfigError when it is not installed."""
    try:
        installed = metadata.distribution(NAME)
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"{NAME} is not installed here; expected an installed package to put on the device"
        ) from error
    stem = f"{NAME.replace('-', '_')}-{installed.version}"
    files = dict(_sources()) | {
        f"{stem}.dist-info/METADATA": (installed.read_text("METADATA") or "").encode(),
        f"{stem}.dist-info/entry_points.txt": _entry_points(installed.read_text("entry_points.txt") or ""),
    }
    return f"{stem}-py3-none-any.whl", _zip(files, f"{stem}.dist-info")


def _entry_points(text: str) -> bytes:
    """The entry points whose packages are in the wheel."""
    lines = [
        line
        for line in text.splitlines()
        if "=" not in line or line.partition("=")[2].strip().partition(".")[0] in (*PACKAGES, EXTENSION)
    ]
    return "\n".join([*lines, ""]).encode()


def _sources() -> Iterator[tuple[str, bytes]]:
    for package in (*PACKAGES, EXTENSION):
        try:
            root = Path(str(import_module(package).__file__)).parent
        except ModuleNotFoundError:
            if package == EXTENSION:
                continue
            raise
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{package}/{text(path.relative_to(root).as_posix())}", path.read_bytes()


def _zip(files: dict[str, bytes], info: str) -> bytes:
    files = files | {f"{info}/WHEEL": WHEEL.encode()}
    record = "".join(f"{name},{_digest(content)},{len(content)}\n" for name, content in files.items())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in (files | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}).items():
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, MODE
            wheel.writestr(entry, content)
    return buffer.getvalue()


def _digest(content: bytes) -> str:
    plain = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"sha256={plain}"
