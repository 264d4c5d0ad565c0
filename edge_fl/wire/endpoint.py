"""Address of a broker, and the certificates or login for connecting to it.

A login is the user name and password of an account on a broker, in two files of the identity folder:

    username      the account's name; may be missing where a token alone is enough
    password      the password or token, mode 0600

They are read at every attempt to connect, so a token can be replaced while a client runs. No message or log contains the password.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from edge_fl.errors import ConfigError
from edge_fl.files import user_text
from edge_fl.files.paths import text
from edge_fl.files.user_text import EncodingError

PORT = 1883
TLS_PORT = 8883
USERNAME_FILE, PASSWORD_FILE = "username", "password"
MAX_BYTES = 65_535  # MQTT's limit


@dataclass(frozen=True)
class Endpoint:
    """Host and port of a broker, plaintext unless a CA or a login is given.

    `ca`, `cert` and `key` are PEM files; `cert` and `key` are the client's own. `login` is a folder with a user name and a
    password, which are sent over TLS only. Without `ca` the broker's certificate must be signed by a CA of this system.
    A `Login` belongs to a broker of other programs, to which `tls` says whether to speak TLS.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    login: Path | Login | None = None
    tls: bool | None = None

    def __str__(self) -> str:
        return f"{'mqtts' if self.uses_tls else 'mqtt'}://{self.host}:{self.port}"

    @property
    def uses_tls(self) -> bool:
        return bool(self.ca or self.login) if self.tls is None else self.tls

    def client_id(self, fleet: str, device: str) -> str:
        """MQTT client id of a device: the name on its certificate, else with its fleet, since fleets on one broker may use equal names."""
        return device if self.cert else f"{fleet}_{device}"

    def tls_context(self) -> ssl.SSLContext | None:
        """TLS context that verifies the broker; None in plaintext. Raises ConfigError for an unusable file."""
        if not self.uses_tls:
            return None
        if self.ca is None:
            return _system_context()
        context = _new_context()
        try:
            context.load_verify_locations(self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:  # includes ssl.SSLError
            files = ", ".join(text(file) for file in (self.ca, self.cert, self.key) if file)
            raise ConfigError(f"{files}: {error}; expected a CA, a certificate and its key as PEM") from error
        return context


@cache
def _system_context() -> ssl.SSLContext:
    """Trusts the system's CAs; shared by all clients, because these are many."""
    context = _new_context()
    context.load_default_certs()
    return context


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


@dataclass(frozen=True)
class Login:
    """User name and password as sent to the broker."""

    username: str
    password: str = field(repr=False)


def has_login(folder: Path) -> bool:
    """Whether the folder contains a password."""
    return (folder / PASSWORD_FILE).exists()


def read_login(folder: Path) -> Login:
    """Read the login in a folder. Raises ConfigError if the password is missing, invalid or readable by others."""
    password, mode = _line(folder / PASSWORD_FILE)
    if mode & 0o077:
        raise ConfigError(
            f"{text(folder / PASSWORD_FILE)}: mode {mode:04o} lets others read the password; expected 0600 (chmod 600)"
        )
    if not password:
        raise ConfigError(
            f"{text(folder / PASSWORD_FILE)}: is empty; expected a password or token in one line"
        )
    if not (folder / USERNAME_FILE).exists():
        return Login("", password)
    return Login(_line(folder / USERNAME_FILE)[0], password)


def _line(path: Path) -> tuple[str, int]:
    """The only line of a file, and the file's mode."""
    try:
        with path.open("rb") as file:
            content, mode = file.read(MAX_BYTES + 3), os.fstat(file.fileno()).st_mode & 0o777
        line = user_text.decode(content).removesuffix("\n")
    except (OSError, EncodingError) as error:
        why = getattr(error, "strerror", error)
        raise ConfigError(f"{text(path)}: {why}; expected a file with one line") from error
    if len(content) > MAX_BYTES or set(line) & set("\n\0"):
        raise ConfigError(
            f"{text(path)}: {len(content)} bytes or several lines; expected one line of up to {MAX_BYTES} bytes"
        )
    return line, mode
