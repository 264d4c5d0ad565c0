"""mosquitto's configuration and access list, rendered: versions 2.0 and 2.1 spell a few things differently.

A listener speaks TLS and knows its clients by their certificates, or it is plaintext, for anybody, and on loopback only. The access
list is derived from `edge_fl.wire.topics`: the server may use all of its fleet's topics, a device its own. It needs names that cannot
be borrowed, so a plaintext listener has none.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from broker.find import Program
from edge_fl.errors import ConfigError
from edge_fl.wire.endpoint import PORT
from edge_fl.wire.topics import RESERVED, access_rules, checked


@dataclass(frozen=True)
class Certificates:
    """PEM files: the CA that signs every client, the broker's own certificate and key, and who is revoked."""

    ca: Path
    cert: Path
    key: Path
    revoked: Path | None = None


@dataclass(frozen=True)
class MosquittoLimits:
    """What the broker allows. `max_queued_messages` is never 0, which older versions take for none at all.

    The database is saved after so many changes, whole: after every 50, retaining 45 MB takes four times as long and every ping behind a
    save 80 ms; by the clock, an idle broker wears out its card. A release of 45 MB is 687 changes, and fetching it none. A clean stop
    saves it too; a crash may lose what came since, which the server publishes again.
    """

    max_packet_bytes: int = 300_000
    max_inflight_messages: int = 20
    max_queued_messages: int = 20_000
    max_queued_bytes: int = 256 * 1024 * 1024
    max_keepalive_s: int = 120
    session_days: int = 7
    autosave_changes: int = 1000


LIMITS = MosquittoLimits()


@dataclass(frozen=True)
class Settings:
    """Where a broker listens, for which fleet, and the folder that holds its files; which claims are open and who is denied.

    Raises ConfigError for what would be unsafe.
    """

    folder: Path
    host: str = "127.0.0.1"
    port: int = PORT
    fleet: str = "main"
    certificates: Certificates | None = None
    limits: MosquittoLimits = LIMITS
    claims: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checked(self.fleet, "fleet")
        if not self.certificates and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host!r}: a broker without certificates listens on loopback only;"
                " 'edge-fl fleet enrol' makes some, or give --host 127.0.0.1"
            )

    @property
    def config_path(self) -> Path:
        return self.folder / "mosquitto.conf"

    @property
    def access_path(self) -> Path:
        return self.folder / "access"

    @property
    def log_path(self) -> Path:
        return self.folder / "mosquitto.log"


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def render(settings: Settings, program: Program) -> str:
    """mosquitto.conf for this program's version."""
    sections = {
        "who may connect, and where": _listener(settings, program),
        "limits": _limits(settings.limits),
        "what survives a restart": _persistence(settings),
        "the log goes to stderr, whoever runs it keeps it": _LOG,
    }
    return "\n".join(
        f"# {title}\n" + "".join(f"{line}\n" for line in lines) for title, lines in sections.items()
    )


def render_access(
    fleet: str, claims: Iterable[str] = (), denied: Iterable[str] = (), workers: Iterable[str] = ()
) -> str:
    """The access list of one fleet, with the claims that are open and the names that were revoked.

    mosquitto warns about patterns that hold no %u; they are meant so. They hold for claims too, so claims are refused what is not theirs
    by name; a revoked name is refused everything, which also silences a session that is older than the revocation.
    """
    rules = list(access_rules(fleet))

    def user(name: str, role: str) -> list[str]:
        return [f"user {name}", *(f"topic {right} {topic}" for who, right, topic in rules if who == role), ""]

    lines = [f"# fleet {fleet}: derived from the topics"]
    for role in RESERVED:
        if any(who == role for who, _, _ in rules):
            lines += user(role, role)
    for claim in claims:
        lines += user(claim, "claim")
    for worker in workers:
        lines += user(worker, "worker")
    for name in denied:
        lines += [f"user {name}", "topic deny #", ""]
    lines += [f"pattern {right} {pattern}" for who, right, pattern in rules if who == "device"]
    return "\n".join(lines) + "\n"


def _listener(settings: Settings, program: Program) -> list[str]:
    lines = [f"listener {settings.port} {settings.host}"]
    if (files := settings.certificates) is None:
        return [*lines, "allow_anonymous true"]
    lines += [
        f"cafile {files.ca.resolve()}",
        f"certfile {files.cert.resolve()}",
        f"keyfile {files.key.resolve()}",
        *([f"crlfile {files.revoked.resolve()}"] if files.revoked else []),
        "tls_version tlsv1.2",
        "require_certificate true",
        "use_identity_as_username true",
        "use_username_as_clientid true",
        "allow_anonymous false",
    ]
    if plugin := program.acl_plugin:
        return [*lines, f"plugin {plugin}", f"plugin_opt_acl_file {settings.access_path.resolve()}"]
    return [*lines, f"acl_file {settings.access_path.resolve()}"]


def _limits(limits: MosquittoLimits) -> list[str]:
    return [
        f"max_packet_size {limits.max_packet_bytes}",
        f"max_inflight_messages {limits.max_inflight_messages}",
        f"max_queued_messages {limits.max_queued_messages}",
        f"max_queued_bytes {limits.max_queued_bytes}",
        "max_connections -1",
        f"max_keepalive {limits.max_keepalive_s}",
        f"persistent_client_expiration {limits.session_days}d",
        "set_tcp_nodelay true",
    ]


def _persistence(settings: Settings) -> list[str]:
    lines = [
        "persistence true",
        f"persistence_location {settings.folder.resolve()}/",
        "autosave_on_changes true",
        f"autosave_interval {settings.limits.autosave_changes}",
    ]
    # As root mosquitto would become a user who may neither read nor write here.
    return [*lines, "user root"] if os.geteuid() == 0 else lines


_LOG = [
    "log_dest stderr",
    "log_type error",
    "log_type warning",
    "log_type notice",
    "log_type information",
    "log_timestamp_format %Y-%m-%dT%H:%M:%S",
    "connection_messages false",
]
