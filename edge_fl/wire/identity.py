"""A client's identity: a folder with a CA certificate, a client certificate and its key, or with a one-time claim, or with a login.

    ca.crt        the CA that signs every certificate of the fleet, the broker's included (PEM)
    client.crt    the certificate; its common name is the user name, the client id and, on a device, the device id
    client.key    its key (P-256, PKCS #8, mode 0600), generated in this folder and never sent anywhere
    token         only with a claim: the device it is for, and the secret that is good for one certificate

The folder has mode 0700. `edge-fl fleet enrol` creates such folders; a device with a claim generates its own key and replaces the claim by
the certificate that it gets for it.

For a broker with user names and passwords the folder contains a login (`edge_fl.wire.endpoint`) instead of or in addition to certificate
and key. Without a certificate `ca.crt` is optional: the CA of the broker's certificate, if that is not one of the system's.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from datetime import datetime
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from msgspec import Struct

from edge_fl.errors import ConfigError, EdgeFLError
from edge_fl.fields import EXPECTED_NAME
from edge_fl.files import atomic
from edge_fl.files.paths import text
from edge_fl.untrusted import NOT_JSON
from edge_fl.wire.endpoint import PORT, TLS_PORT, Endpoint, has_login, read_login
from edge_fl.wire.topics import NAME, Role, role_of

CA_FILE, CERT_FILE, KEY_FILE, TOKEN_FILE = "ca.crt", "client.crt", "client.key", "token"
DENIED_FILE = "denied"
NEW = ".new"
RENEW_AFTER = 2 / 3  # share of a certificate's life
MAX_PEM_BYTES = 64 * 1024

Key = ec.EllipticCurvePrivateKey


class IdentityError(EdgeFLError):
    """An invalid certificate, or an invalid request for one."""


class Token(Struct, frozen=True, forbid_unknown_fields=True):
    """A claim's right to one certificate: the device it is for, a secret, and an expiry date."""

    device: str
    secret: str
    expires: datetime


@dataclass(frozen=True)
class Identity:
    """The verified contents of an identity folder: name, validity and serial number of the certificate."""

    folder: Path
    name: str
    begins: datetime
    expires: datetime
    serial: int
    token: Token | None = None

    @property
    def role(self) -> Role:
        """Server, operator, device, claim, ..."""
        return role_of(self.name)

    @property
    def device(self) -> str:
        """The name, or for a claim the device that it is for."""
        return self.token.device if self.token else self.name

    @property
    def renew_at(self) -> datetime:
        """When to request the next certificate: after two thirds of the life of this one."""
        return self.begins + RENEW_AFTER * (self.expires - self.begins)

    def endpoint(self, host: str, port: int = TLS_PORT) -> Endpoint:
        """The broker as an endpoint with this identity."""
        ca, cert, key = (self.folder / file for file in (CA_FILE, CERT_FILE, KEY_FILE))
        return Endpoint(host, port, ca, cert, key, self.folder if has_login(self.folder) else None)


def certificate_in(folder: Path | str | None) -> Identity | None:
    """The certificate's identity in a folder; None without a folder, or if it contains only a login. Raises ConfigError."""
    if not folder:
        return None
    folder = Path(folder)
    if has_login(folder) and not (folder / CERT_FILE).exists():
        return None
    return read(folder)


def read(folder: Path) -> Identity:
    """Read the identity in a folder. Raises ConfigError if it is incomplete, inconsistent or readable by others.

    Expiry is left to TLS: a board without a clock cannot check it.
    """
    with _locked(folder):
        _complete_replacement(folder)
        key_mode = _mode(folder / KEY_FILE)
        if key_mode & 0o077:
            raise ConfigError(
                f"{text(folder / KEY_FILE)}: mode {key_mode:04o} lets others read the key; expected 0600 (chmod 600)"
            )
        certificate, key = _bytes(folder / CERT_FILE), _bytes(folder / KEY_FILE)
        return replace_fields(_checked(folder, certificate, key), token=_token(folder))


def _checked(folder: Path, certificate_pem: bytes, key_pem: bytes) -> Identity:
    """Verify a certificate and a key against the CA in `folder`. Raises ConfigError."""
    try:
        cas = x509.load_pem_x509_certificates(_bytes(folder / CA_FILE))
        certificate, key = x509.load_pem_x509_certificate(certificate_pem), load_key(key_pem)
        name = common_name(certificate.subject)
    except (ValueError, TypeError, IdentityError) as error:
        raise ConfigError(
            f"{text(folder)}: {error}; expected {CA_FILE}, {CERT_FILE} and {KEY_FILE} in PEM"
        ) from error
    if certificate.public_key() != key.public_key():
        raise ConfigError(
            f"{text(folder)}: {KEY_FILE} is not the key of {CERT_FILE} ({name}); expected a pair"
        )
    if not any(is_signed_by(certificate, ca) for ca in cas):
        raise ConfigError(
            f"{text(folder)}: {CERT_FILE} ({name}) is not signed by {CA_FILE}; expected one of this fleet"
        )
    begins, expires = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return Identity(folder, name, begins, expires, certificate.serial_number)


def endpoint(host: str, port: int = 0, folder: Path | str | None = None) -> Endpoint:
    """The broker as an endpoint:

    TLS with the identity in `folder`, plaintext without one; port 0 is the default port. Raises ConfigError.
    """
    if not folder:
        return Endpoint(host, port or PORT)
    if certificate := certificate_in(folder):
        return certificate.endpoint(host, port or TLS_PORT)
    read_login(folder := Path(folder))
    ca = folder / CA_FILE
    return Endpoint(host, port or TLS_PORT, ca if ca.exists() else None, login=folder)


def write(folder: Path, ca: bytes, certificate: bytes, key: Key, token: Token | None = None) -> Identity:
    """Create an identity folder atomically. Raises ConfigError if the folder exists: keys are never overwritten."""
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    files = {CA_FILE: ca, CERT_FILE: certificate, KEY_FILE: key_bytes(key)}
    if token:
        files[TOKEN_FILE] = msgspec.json.encode(token)
    try:
        if folder.exists():
            raise ConfigError(f"{text(folder)}: exists already, expected a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir(mode=0o700)
        try:
            for name, content in files.items():
                write_private(part / name, content)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{text(folder)}: {error.strerror}; expected a folder to write to") from error
    return read(folder)


def replace(folder: Path, certificate: bytes, key: Key) -> Identity:
    """Replace certificate and key, and delete a claim's token. After an interruption one of the two pairs is complete.

    The new certificate is stored in addition to the old one until its key is in place; `read` completes an interrupted replacement. Raises
    OSError, and ConfigError for a certificate that does not fit.
    """
    name = _checked(folder, certificate, key_bytes(key)).name
    if name != (device := read(folder).device):
        raise ConfigError(
            f"{text(folder)}: certificate for {name!r}, expected {device!r}",
            consequence="keeping the old one",
        )
    with _locked(folder):
        atomic.write(folder / (CERT_FILE + NEW), certificate)
        atomic.write(folder / KEY_FILE, key_bytes(key), private=True)
        os.replace(folder / (CERT_FILE + NEW), folder / CERT_FILE)
        _delete_obsolete(folder)
    return read(folder)


def new_key() -> Key:
    """Generate a P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def pending_key(folder: Path) -> Key:
    """The key for the next certificate, generated at the first call and stored, so that a repeated request uses the same key.

    Raises OSError.
    """
    path = folder / (KEY_FILE + NEW)
    try:
        return load_key(_bytes(path))
    except (ConfigError, ValueError, TypeError):  # none yet, or incomplete
        key = new_key()
        atomic.write(path, key_bytes(key), private=True)
        return key


def request(name: str, key: Key) -> bytes:
    """Create a certificate request for `name`, signed with `key` as proof of possession (PEM)."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject(name))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def subject(name: str) -> x509.Name:
    """`name` as an X.509 name."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def common_name(name: x509.Name) -> str:
    """The single common name, valid in a topic. Raises IdentityError."""
    names = [str(attribute.value) for attribute in name.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if len(names) != 1 or not NAME.match(names[0]):
        raise IdentityError(f"common name {names}: {EXPECTED_NAME}")
    return names[0]


def is_signed_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    """Whether the CA signed the certificate; its validity period is not checked."""
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def load_key(pem: bytes) -> Key:
    """Load a P-256 key from PEM. Raises ValueError, TypeError."""
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("the key is not on the curve P-256")
    return key


def key_bytes(key: Key) -> bytes:
    """Encode the key as PKCS #8 PEM, for a file of mode 0600."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder: a reader must not mistake a replacement in progress for an interrupted one."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _unreadable(folder, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _complete_replacement(folder: Path) -> None:
    """Complete an interrupted `replace`: install a stored certificate if its key is in place, else delete it."""
    waiting = folder / (CERT_FILE + NEW)
    if not waiting.exists():
        return
    try:
        fits = (
            x509.load_pem_x509_certificate(_bytes(waiting)).public_key()
            == load_key(_bytes(folder / KEY_FILE)).public_key()
        )
    except (ValueError, TypeError):
        fits = False
    if fits:
        os.replace(waiting, folder / CERT_FILE)
        _delete_obsolete(folder)
    else:
        waiting.unlink()


def _delete_obsolete(folder: Path) -> None:
    """Delete files that are useless after a replacement."""
    for name in (TOKEN_FILE, KEY_FILE + NEW):
        (folder / name).unlink(missing_ok=True)


def _token(folder: Path) -> Token | None:
    path = folder / TOKEN_FILE
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(_bytes(path), type=Token)
    except NOT_JSON as error:
        raise ConfigError(f"{text(path)}: {error}; expected a token of 'edge-fl fleet enrol'") from error


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_PEM_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode & 0o777
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{text(path)}: {error.strerror}; expected an identity ({CA_FILE}, {CERT_FILE}, {KEY_FILE}) as created by"
        " 'edge-fl fleet enrol', or the files username and password of a broker's account"
    )


def write_private(path: Path, content: bytes) -> None:
    """Create a file with mode 0600. Raises OSError, also if it exists."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
