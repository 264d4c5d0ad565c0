"""Names and addresses for which a broker's certificate is valid, and this machine's own."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from edge_fl.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509

ANYWHERE = frozenset({"0.0.0.0", "::"})
"""Addresses to listen on, not to connect to."""
MAX_NAME = 253
LOCAL = re.compile(r"([\d.]+)\n\s*/32 host LOCAL")


def address(host: str) -> IPv4Address | IPv6Address | None:
    """The address that `host` is, without its zone; None for a name."""
    try:
        return ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a name or address is always this machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.rstrip(".").lower() == "localhost"


def canonical(host: str) -> str:
    """One spelling of a name or address, as in a certificate. Raises ConfigError if it can be neither.

    >>> canonical("[FD00:0::1]"), canonical("Büro.local")
    ('fd00::1', 'xn--bro-hoa.local')
    """
    if found := address(host):
        return str(found)
    try:
        name = host if host.isascii() else host.encode("idna").decode()
        labels = name.lower().removeprefix("*.").split(".")
        valid = len(name) <= MAX_NAME and all(label and len(label) <= 63 for label in labels)
        if not valid or not all(label.replace("-", "").replace("_", "").isalnum() for label in labels):
            raise ValueError
    except ValueError as error:  # includes UnicodeError
        raise ConfigError(
            f"host {host!r}: neither a name nor an address; expected for example broker.local or 192.168.1.20"
        ) from error
    return name.lower()


def certified(certificate: x509.Certificate) -> tuple[str, ...]:
    """The names and addresses of a certificate, sorted."""
    from cryptography import x509  # here: it takes 9 MB, which a service on loopback saves

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    names = [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]
    return tuple(sorted(name.lower() for name in names))


def covers(names: Iterable[str], host: str) -> bool:
    """Whether a certificate for `names` is valid for `host`; "*" stands for one whole first label of a name."""
    if found := address(host):
        return any(address(name) == found for name in names)
    wanted = canonical(host)
    parent = wanted.partition(".")[2]
    return any(name.lower() in (wanted, f"*.{parent}" if parent else wanted) for name in names)


def own_addresses() -> tuple[str, ...]:
    """Addresses of this machine's network interfaces under which others may reach it: no loopback, no link-local ones."""
    found = {*_interfaces(), *_routes()}
    usable = (each for each in found if not (each.is_loopback or each.is_link_local or each.is_unspecified))
    return tuple(map(str, sorted(usable, key=lambda each: (each.version, int(each)))))


def _interfaces() -> Iterator[IPv4Address | IPv6Address]:
    """Addresses of all interfaces, on Linux."""
    with suppress(OSError):
        for local in LOCAL.findall(Path("/proc/net/fib_trie").read_text()):
            yield IPv4Address(local)
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            yield IPv6Address(int(line.split()[0], 16))


def _routes() -> Iterator[IPv4Address | IPv6Address]:
    """The address from which this machine would reach others; nothing is sent."""
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((target, 9))
            if found := address(sock.getsockname()[0]):
                yield found
