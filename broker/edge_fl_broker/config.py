"""Render mosquitto's configuration and access list, for versions 2.0 and 2.1.

A listener uses TLS and identifies its clients by their certificates, or it is plaintext, without authentication, on loopback only. The
access list is derived from `edge_fl.wire.topics`. It requires authenticated names, so a plaintext listener has none.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from edge_fl.errors import ConfigError
from edge_fl.files.paths import text
from edge_fl.wire.endpoint import PORT
from edge_fl.wire.host_names import is_loopback
from edge_fl.wire.topics import RESERVED, access_rules, checked, role_of
from edge_fl_broker.find import Program


@dataclass(frozen=True)
class Certificates:
    """PEM files: the CA that signs every client, the broker's certificate and key, and the revocation list."""

    ca: Path
    cert: Path
    key: Path
    revoked: Path | None = None


@dataclass(frozen=True)
class MosquittoLimits:
    """Limits of the broker. `max_queued_messages` must not be 0, which older versions read as unlimited.

    The whole database is saved after `autosave_changes` changes. Saving every 50 quadruples the time to retain 45 MB and delays pings by 80
    ms; saving by time wears out the card of an idle broker. Publishing a release of 45 MB is 687 changes, fetching it none. A clean stop
    saves too; a crash may lose later changes, which the server publishes again.
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
class BrokerSettings:
    """Address, fleet and folder of a broker.

    `named`: claims, workers and people, which have rights by name; `denied`: revoked names. Raises ConfigError for an unsafe combination.
    """

    folder: Path
    host: str = "127.0.0.1"
    port: int = PORT
    fleet: str = "main"
    certificates: Certificates | None = None
    limits: MosquittoLimits = LIMITS
    named: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checked(self.fleet, "fleet")
        if not self.certificates and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host!r}: a broker without certificates listens on loopback only;"
                " create some with 'edge-fl fleet enrol', or give --listen 127.0.0.1"
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


def render(settings: BrokerSettings, program: Program) -> str:
    """Render mosquitto.conf for this program's version."""
    sections = {
        "listener": _listener(settings, program),
        "limits": _limits(settings.limits),
        "persistence": _persistence(settings),
        "log to stderr": _LOG,
    }
    return "\n".join(
        f"# {title}\n" + "".join(f"{line}\n" for line in lines) for title, lines in sections.items()
    )


def render_access(settings: BrokerSettings) -> str:
    """Render the access list of the fleet, with its claims, workers, people and denied names.

    mosquitto warns about patterns without %u, which are intended. Patterns apply to every name, so claims and people are denied other
    topics by name; a denied name loses all topics, which also silences a session from before the revocation.
    """
    rules = list(access_rules(settings.fleet))

    lines = [f"# fleet {settings.fleet}: derived from the topics"]
    for name in (*RESERVED, *settings.named):
        if granted := [rule for rule in rules if rule[0] == role_of(name)]:
            rights = (f"topic {right} {topic.replace('%u', name)}" for _, right, topic in granted)
            lines += [f"user {name}", *dict.fromkeys(rights), ""]
    for name in settings.denied:
        lines += [f"user {name}", "topic deny #", ""]
    lines += [f"pattern {right} {pattern}" for who, right, pattern in rules if who == "device"]
    return "\n".join(lines) + "\n"


def _listener(settings: BrokerSettings, program: Program) -> list[str]:
    lines = [f"listener {settings.port} {settings.host}"]
    if (files := settings.certificates) is None:
        return [*lines, "allow_anonymous true"]
    lines += [
        f"cafile {text(files.ca.resolve())}",
        f"certfile {text(files.cert.resolve())}",
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


def _persistence(settings: BrokerSettings) -> list[str]:
    lines = [
        "persistence true",
        f"persistence_location {settings.folder.resolve()}/",
        "autosave_on_changes true",
        f"autosave_interval {settings.limits.autosave_changes}",
    ]
    # as root mosquitto would switch to a user without access to these files
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
