"""Diagnostics bundles as files: the bytes that the device signed, its signature, and its recent errors as text.

FOLDER/diagnostics.json    what the device sent
FOLDER/signature.json      fleet, device, query and sha256 as signed, the certificate (PEM) and the signature (base64)
FOLDER/errors.txt          its recent warnings and errors, one per line
"""

import base64
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from edge_fl.errors import InputError
from edge_fl.files import atomic
from edge_fl.files.paths import text
from edge_fl.wire.messages import Diagnostics, answer_content
from edge_fl_server.mqtt.device_text import one_line
from edge_fl_server.mqtt.devices.queries import QueryAnswer


def require_new(out: Path | None) -> None:
    """Raise InputError if `out` exists: a bundle is evidence and not overwritten."""
    if out and out.exists():
        raise InputError(f"--out {text(out)}: exists already, expected a new folder or .zip file")


def write(answer: QueryAnswer, fleet: str, out: Path | None = None) -> Path:
    """Write a bundle to a new folder or .zip file and return it. Raises InputError if that is not possible."""
    time = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    out = out or Path(f"diagnostics-{answer.device}-{time}")
    files = _files(answer, fleet)
    try:
        if out.suffix == ".zip":
            out.parent.mkdir(parents=True, exist_ok=True)
            with (
                atomic.writing(out, private=True) as file,
                zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
            ):
                for name, content in files.items():
                    archive.writestr(name, content)
        else:
            out.mkdir(mode=0o700, parents=True)
            for name, content in files.items():
                atomic.write(out / name, content, private=True)
    except OSError as error:
        raise InputError(f"--out {text(out)}: {error.strerror}; expected a writable folder") from error
    return out


def _files(answer: QueryAnswer, fleet: str) -> dict[str, bytes]:
    assert isinstance(answer.content, Diagnostics) and answer.reply.blob
    content = answer_content(fleet, answer.device, answer.reply.id, answer.reply.blob.sha256)
    certificate = ""
    if answer.signed:
        pem = x509.load_der_x509_certificate(answer.reply.certificate).public_bytes(Encoding.PEM)
        certificate = pem.decode()
    signature = base64.b64encode(answer.reply.signature).decode() if answer.signed else ""
    signed = msgspec.json.encode({**content, "certificate": certificate, "signature": signature})
    lines = (f"{line.at} {line.level} {one_line(line.text)}\n" for line in answer.content.errors)
    return {
        "diagnostics.json": answer.payload,
        "signature.json": msgspec.json.format(signed, indent=2),
        "errors.txt": "".join(lines).encode(),
    }
