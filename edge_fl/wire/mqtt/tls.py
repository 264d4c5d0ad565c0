"""TLS on machines whose clock may be wrong: a board without a battery starts in the past until it is set.

The time cannot be earlier than the start of our own certificate or our last connection. If the clock is earlier, certificates are verified
without their dates, so that the device is not locked out, except that the broker's must not have expired by the latest known time. A clock
that is right or ahead is trusted; errors about dates quote it.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from edge_fl.files import atomic
from edge_fl.wire import host_names
from edge_fl.wire.endpoint import Endpoint

NO_CHECK_TIME = ssl.VerifyFlags(0x200000)  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python does not name
NOT_YET_VALID, EXPIRED = 9, 10
OTHER_HOST = (62, 64)  # OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
NAMES_S = 5.0
SEEN_FILE = "last_seen"
SEEN_EVERY = timedelta(days=1)  # spares the SD card


def kept_fresh(endpoint: Endpoint) -> Callable[[], ssl.SSLContext | None]:
    """Return a function that gives the endpoint's TLS context and reloads it after the certificate was replaced.

    Both raise ConfigError for unusable files. After the certificate is deleted the last context stays in use.
    """
    seen, context = _changed(endpoint), endpoint.tls_context()

    def current() -> ssl.SSLContext | None:
        nonlocal seen, context
        now = _changed(endpoint)
        if now and now != seen:
            context = endpoint.tls_context()
            seen = now
        return context

    return current


def earliest(endpoint: Endpoint) -> datetime | None:
    """A lower bound of the current time; None without a certificate of our own."""
    dates = _dates(endpoint)
    if dates is None or endpoint.cert is None:
        return None
    return max(dates[0], _seen(endpoint.cert.parent))


def record_time(folder: Path, now: datetime) -> None:
    """Record the time of a connection. Raises OSError."""
    if now - _seen(folder) >= SEEN_EVERY:
        atomic.write(folder / SEEN_FILE, now.isoformat())


def secure(sock: socket.socket, context: ssl.SSLContext, host: str, since: datetime | None) -> ssl.SSLSocket:
    """Wrap the socket in TLS; `since` is the `earliest` possible time. Raises OSError, see `explain`."""
    if since is None or datetime.now(UTC) >= since:
        context.verify_flags &= ~NO_CHECK_TIME
        return context.wrap_socket(sock, server_hostname=host)
    context.verify_flags |= NO_CHECK_TIME
    wrapped = context.wrap_socket(sock, server_hostname=host)
    ends = (wrapped.getpeercert() or {}).get("notAfter")
    if not isinstance(ends, str) or ssl.cert_time_to_seconds(ends) < since.timestamp():
        wrapped.close()
        raise OSError(f"the broker's certificate expired {ends}, and it is at least {since:%Y-%m-%d}")
    return wrapped


def explain(error: BaseException, endpoint: Endpoint) -> str:
    """Explain a failed connection; quotes the clock for errors about dates, and the certificate's names for errors about the host."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in (NOT_YET_VALID, EXPIRED):
            return f"{text} ({clock()})"
        if error.verify_code in OTHER_HOST and (names := broker_names(endpoint)):
            return other_host(names, endpoint.host)
        return f"{text} (expected a certificate for this host, signed by the CA in ca.crt; without that file, by a CA of this system)"
    return str(text)


def other_host(names: tuple[str, ...], host: str) -> str:
    """Explain that a broker's certificate for `names` is not valid for `host`, and what to do."""
    return (
        f"the broker's certificate is valid for {', '.join(names)}, not for {host!r}: connect to one of these, or on the broker's computer"
        f" run 'edge-fl broker certificate --add {host}'"
    )


def broker_names(endpoint: Endpoint) -> tuple[str, ...]:
    """The names in the certificate of the broker at `endpoint`, which must be signed by its CA; empty if it cannot be read."""
    if not endpoint.uses_tls:
        return ()
    try:
        # its own context: those of connections must check the host
        context = ssl.create_default_context(cafile=endpoint.ca)
        if endpoint.cert:
            context.load_cert_chain(endpoint.cert, endpoint.key)
        context.check_hostname = False
        with (
            socket.create_connection((endpoint.host, endpoint.port), NAMES_S) as plain,
            context.wrap_socket(plain, server_hostname=endpoint.host) as secured,
        ):
            content = secured.getpeercert(binary_form=True)
    except OSError:  # includes ssl.SSLError
        return ()
    return host_names.certified(x509.load_der_x509_certificate(content)) if content else ()


def explain_rejection(endpoint: Endpoint) -> str:
    """Explain why a broker may have closed the connection before accepting the client."""
    dates = _dates(endpoint)
    if dates is None:
        return "closed before the client was accepted"
    begins, ends = dates
    return (
        f"closed before the client was accepted: its certificate may be revoked, or of another fleet; it is valid from {begins:%Y-%m-%d}"
        f" to {ends:%Y-%m-%d}, and {clock()}"
    )


def clock() -> str:
    """Describe this machine's clock."""
    return f"this machine's clock says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, which may be wrong"


def _changed(endpoint: Endpoint) -> int:
    """When our certificate was last replaced, which happens after its key; 0 without one."""
    try:
        return endpoint.cert.stat().st_mtime_ns if endpoint.cert else 0
    except OSError:
        return 0


def _dates(endpoint: Endpoint) -> tuple[datetime, datetime] | None:
    """Validity period of our certificate."""
    if endpoint.cert is None:
        return None
    try:
        certificate = x509.load_pem_x509_certificate(endpoint.cert.read_bytes())
    except (OSError, ValueError):  # reported when the file is loaded
        return None
    return certificate.not_valid_before_utc, certificate.not_valid_after_utc


def _seen(folder: Path) -> datetime:
    try:
        return datetime.fromisoformat((folder / SEEN_FILE).read_text()).astimezone(UTC)
    except (OSError, ValueError):
        return datetime.fromtimestamp(0, UTC)
