"""TLS for machines whose clock may be wrong: a board without a battery starts in the past, until somebody tells it the time.

It cannot be earlier than when our own certificate began, or than the last time at which we were connected. A clock that says so is wrong,
and instead of locking the device out, certificates are then checked without it: everything but the dates, and the broker's must not have
run out by the latest time that we know of. A clock that is right, or ahead, is believed; what fails over dates quotes the clock.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from edge_fl.files import atomic
from edge_fl.wire.endpoint import Endpoint

NO_CHECK_TIME = ssl.VerifyFlags(0x200000)  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python does not name
NOT_YET_VALID, EXPIRED = 9, 10
SEEN_FILE = "last_seen"
SEEN_EVERY = timedelta(days=1)  # an SD card is not to be written at every connection


def kept_fresh(endpoint: Endpoint) -> Callable[[], ssl.SSLContext | None]:
    """What gives the endpoint's context, for each connection anew: a certificate that took the old one's place serves from then on.

    Raises ConfigError for files that cannot be used, and so does what it returns, for new ones. A certificate that is gone serves on.
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
    """It is later than this; None without a certificate of our own."""
    dates = _dates(endpoint)
    if dates is None or endpoint.cert is None:
        return None
    return max(dates[0], _seen(endpoint.cert.parent))


def saw(folder: Path, now: datetime) -> None:
    """Remembers that we were connected now. Raises OSError."""
    if now - _seen(folder) >= SEEN_EVERY:
        atomic.write(folder / SEEN_FILE, now.isoformat())


def secure(sock: socket.socket, context: ssl.SSLContext, host: str, since: datetime | None) -> ssl.SSLSocket:
    """The socket in TLS, to `host`; `since` is the `earliest` time that it can be. Raises OSError, which `reason` puts in words."""
    if since is None or datetime.now(UTC) >= since:
        context.verify_flags &= ~NO_CHECK_TIME
        return context.wrap_socket(sock, server_hostname=host)
    context.verify_flags |= NO_CHECK_TIME
    wrapped = context.wrap_socket(sock, server_hostname=host)
    ends = (wrapped.getpeercert() or {}).get("notAfter")
    if not isinstance(ends, str) or ssl.cert_time_to_seconds(ends) < since.timestamp():
        wrapped.close()
        raise OSError(f"the broker's certificate ended {ends}, and it is {since:%Y-%m-%d} at least")
    return wrapped


def reason(error: BaseException) -> str:
    """Why a connection could not be made, with the clock where that may be at fault."""
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in (NOT_YET_VALID, EXPIRED):
        return f"{said} ({clock()})"
    return str(said)


def turned_away(endpoint: Endpoint) -> str:
    """Why a broker may have closed the connection before it let us in."""
    dates = _dates(endpoint)
    if dates is None:
        return "closed before we were let in"
    begins, ends = dates
    return (
        f"closed before we were let in: our certificate may be revoked, or of another fleet; it holds from {begins:%Y-%m-%d}"
        f" to {ends:%Y-%m-%d}, and {clock()}"
    )


def clock() -> str:
    """What this machine takes for the time."""
    return f"this machine's clock says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC; is that right?"


def _changed(endpoint: Endpoint) -> int:
    """When our own certificate was last replaced, which comes after its key; 0 without one."""
    try:
        return endpoint.cert.stat().st_mtime_ns if endpoint.cert else 0
    except OSError:
        return 0


def _dates(endpoint: Endpoint) -> tuple[datetime, datetime] | None:
    """From when to when our own certificate holds."""
    if endpoint.cert is None:
        return None
    try:
        found = x509.load_pem_x509_certificate(endpoint.cert.read_bytes())
    except (OSError, ValueError):  # whoever loads it says so
        return None
    return found.not_valid_before_utc, found.not_valid_after_utc


def _seen(folder: Path) -> datetime:
    try:
        return datetime.fromisoformat((folder / SEEN_FILE).read_text()).astimezone(UTC)
    except (OSError, ValueError):
        return datetime.fromtimestamp(0, UTC)
