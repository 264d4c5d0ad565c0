"""Address of a broker and the certificates for connecting to it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from edge_fl.errors import ConfigError

PORT = 1883
TLS_PORT = 8883


@dataclass(frozen=True)
class Endpoint:
    """Host and port. With `ca` the connection uses TLS; `cert` and `key` are the client's own. All three are PEM files."""

    host: str = "127.0.0.1"
    port: int = PORT
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __str__(self) -> str:
        return f"{'mqtts' if self.ca else 'mqtt'}://{self.host}:{self.port}"

    def tls_context(self) -> ssl.SSLContext | None:
        """TLS context that verifies the broker against `ca`; None without one. Raises ConfigError for an unusable file."""
        if self.ca is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:  # includes ssl.SSLError
            files = ", ".join(str(file) for file in (self.ca, self.cert, self.key) if file)
            raise ConfigError(f"{files}: {error}; expected a CA, a certificate and its key as PEM") from error
        return context
