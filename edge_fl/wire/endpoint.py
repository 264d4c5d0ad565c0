"""Where a broker listens, and with which certificates one talks to it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from edge_fl.errors import ConfigError

PORT = 1883
TLS_PORT = 8883


@dataclass(frozen=True)
class Endpoint:
    """A host and a port. With `ca` it speaks TLS; `cert` and `key` are the client's own. All three are PEM files."""

    host: str = "127.0.0.1"
    port: int = PORT
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __str__(self) -> str:
        return f"{'mqtts' if self.ca else 'mqtt'}://{self.host}:{self.port}"

    def tls_context(self) -> ssl.SSLContext | None:
        """A context that verifies the broker against `ca`, or None without one. Raises ConfigError for a file that cannot be used."""
        if self.ca is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:  # ssl.SSLError is one
            files = ", ".join(str(file) for file in (self.ca, self.cert, self.key) if file)
            raise ConfigError(f"{files}: {error}; expected a CA, a certificate and its key as PEM") from error
        return context
