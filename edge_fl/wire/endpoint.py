"""Address of a broker, and the certificates or login for connecting to it."""

import ssl
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from edge_fl.errors import ConfigError
from edge_fl.files.paths import text

PORT = 1883
TLS_PORT = 8883


@dataclass(frozen=True)
class Endpoint:
    """Host and port of a broker, plaintext unless a CA or a login is given.

    `ca`, `cert` and `key` are PEM files; `cert` and `key` are the client's own. `login` is a folder with a user name and a password
    (edge_fl/wire/login.py), which are sent over TLS only. Without `ca` the broker's certificate must be signed by a CA of this system.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    login: Path | None = None

    def __str__(self) -> str:
        return f"{'mqtts' if self.uses_tls else 'mqtt'}://{self.host}:{self.port}"

    @property
    def uses_tls(self) -> bool:
        return bool(self.ca or self.login)

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
