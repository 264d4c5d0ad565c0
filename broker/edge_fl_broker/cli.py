"""Commands `edge-fl broker up | config | check`; the `edge-fl fleet` commands about certificates are in `provision.cli`."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from edge_fl import process_limits, signals
from edge_fl.cli import App
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.console.tables import Column, Columns
from edge_fl.errors import ConfigError, RunError
from edge_fl.files.paths import text
from edge_fl.options import (
    CONNECTION,
    FOLDERS,
    IDENTITIES,
    LOOPBACK,
    WAIT,
    CertOption,
    FormatOption,
    IdentitiesOption,
    KeyOption,
    fleet_name,
    option,
)
from edge_fl_broker.provision import cli

if TYPE_CHECKING:
    from edge_fl_broker.config import BrokerSettings
    from edge_fl_broker.provision.authority import Authority

WATCH_S = 0.5
_SECURITY = {True: "plaintext, loopback only", False: "TLS"}


Port = Annotated[
    int | None,
    option("--port N", "Port of the broker [8883, without TLS 1883].", CONNECTION, min=1, max=65535),
]


@dataclass(frozen=True, kw_only=True)
class BrokerOptions:
    """Where a broker listens, and who may connect."""

    host: Annotated[
        str, option("--listen HOST", "Address to listen on; without TLS loopback only.", CONNECTION)
    ] = LOOPBACK
    port: Port = None
    fleet: Annotated[
        str,
        option(
            "--fleet FLEET",
            "Name of the fleet, whose topics clients may use; it may be a new one.",
            CONNECTION,
            callback=fleet_name,
        ),
    ] = "main"
    insecure: Annotated[
        bool,
        option("--insecure", "Plaintext, without authentication; on loopback only.", CONNECTION),
    ] = False
    folder: Annotated[
        Path, option("--dir FOLDER", "Folder for configuration, log and retained messages.", FOLDERS)
    ] = Path("runs/broker")
    identities: IdentitiesOption = IDENTITIES
    ca: Annotated[
        Path | None,
        option("--ca FILE", "CA that signs every client (PEM); replaces --identities.", CONNECTION),
    ] = None
    cert: CertOption = None
    key: KeyOption = None

    def settings(self) -> tuple[BrokerSettings, Authority | None]:
        """Plaintext only on request; else TLS with given certificates, or with the CA in `identities`, whose register admits clients."""
        from edge_fl.wire.endpoint import PORT, TLS_PORT
        from edge_fl_broker.config import BrokerSettings, Certificates
        from edge_fl_broker.provision import register_sync
        from edge_fl_broker.provision.authority import Authority

        at = partial(
            BrokerSettings,
            self.folder,
            self.host,
            self.port or (PORT if self.insecure else TLS_PORT),
            self.fleet,
        )
        if self.insecure and not (self.ca or self.cert or self.key):
            return at(), None
        if self.ca and self.cert and self.key and not self.insecure:
            return at(Certificates(self.ca, self.cert, self.key)), None
        if self.ca or self.cert or self.key:
            raise ConfigError("TLS takes --ca, --cert and --key together, and no --insecure")
        register_sync.require(self.identities)
        authority = Authority.open(self.identities)
        settings = at(register_sync.certificates(authority, self.host))
        return register_sync.with_register(settings, authority), authority


def register(app: App) -> None:
    """Add the group `broker`."""
    group = app.group(
        "broker", "The MQTT broker: run mosquitto, print its configuration, test a broker.", "Fleet"
    )
    group.add(up, "edge-fl broker up --insecure")
    group.add(config, "edge-fl broker config --insecure")
    group.add(check, "edge-fl broker check --insecure")
    group.add(certificate, "edge-fl broker certificate --add 192.168.1.20")
    cli.register(app)


def up(
    options: BrokerOptions,
    enrol: Annotated[
        list[str] | None,
        option("--enrol DEVICE", "Enrol this device first, unless it is enrolled; may be repeated."),
    ] = None,
    foreground: Annotated[
        bool,
        option(
            "--foreground",
            "Replace this process by mosquitto, with its log on the terminal (for systemd, containers).",
        ),
    ] = False,
) -> None:
    """Run mosquitto until Ctrl-C, over TLS, for enrolled clients only; retained messages survive a restart."""
    from edge_fl_broker.mosquitto import Mosquitto, choose, replace_process
    from edge_fl_broker.provision.register_sync import RegisterSync
    from edge_fl_broker.provision.registrar import Registrar
    from edge_fl_broker.supervisor import StopRequest, Supervisor

    if enrol:
        if options.insecure or options.ca or options.cert or options.key:
            raise ConfigError(
                "--enrol: expected a broker with the CA in --identities, without --insecure and --ca"
            )
        cli.enrol_new(enrol, options.identities)
    settings, authority = options.settings()
    files = (options.ca, options.cert, options.key)
    if missing := [text(file) for file in files if file and not file.is_file()]:
        raise ConfigError(f"{', '.join(missing)}: no such file; expected PEM")
    if settings.certificates:
        print_status(_validity(settings))
    program = choose(settings, print_status)
    process_limits.raise_open_files()
    if foreground:
        if authority:
            print_status(
                "--foreground runs mosquitto only: claims get no certificates, and revocations take effect at its restart"
            )
        replace_process(settings, program, print_status)
    broker = Mosquitto(settings, program, print_status)
    stopping = StopRequest()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set(signals.STOPS[signal.Signals(number)].words)

    for number in signals.STOPS:
        signal.signal(number, stop)
    at = broker.endpoint
    registrar = Registrar(authority, at.host, at.port, options.fleet) if authority else nullcontext()
    with broker, registrar:
        version = ".".join(map(str, program.version))
        security = (
            f"TLS, clients enrolled in {text(options.identities)}"
            if authority
            else _SECURITY[settings.certificates is None]
        )
        print_status(
            f"mosquitto {version} on {broker.endpoint} ({security}), fleet {options.fleet!r}; log {broker.log_path}; stop with Ctrl-C"
        )
        supervisor = Supervisor(broker, RegisterSync(broker, authority) if authority else None, print_status)
        while not stopping.wait(WATCH_S):
            supervisor.update(stopping)
    print_status(f"mosquitto: {stopping.how}")


def config(options: BrokerOptions) -> None:
    """Print the configuration and the access list that 'broker up' would use."""
    from edge_fl_broker.config import render, render_access
    from edge_fl_broker.mosquitto import choose

    settings, _ = options.settings()
    program = choose(settings, print_status)
    print(f"# {program.path}, for {settings.config_path}\n")
    print(render(settings, program))
    if settings.certificates:
        print(f"# ---- {settings.access_path}\n")
        print(render_access(settings), end="")


def certificate(
    hosts: Annotated[
        list[str] | None,
        option(
            "--add HOST", "Name or address under which devices reach the broker, to add; may be repeated."
        ),
    ] = None,
    identities: IdentitiesOption = IDENTITIES,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the names and addresses for which the broker's certificate is valid. With --add renew it for more of them: the CA stays, so
    devices need nothing, and a running 'broker up' uses it within a second.
    """
    from edge_fl_broker.provision import register_sync
    from edge_fl_broker.provision.authority import Authority

    register_sync.require(identities)
    authority = Authority.open(identities)
    before = authority.broker_names()
    issued = authority.broker(hosts) if hosts else authority.broker_identity()
    names = authority.broker_names()
    rows = [{"name": name, "expires": f"{issued.expires:%Y-%m-%d}"} for name in names]
    show_table(rows, {"name": "valid for", "expires": "expires"}, format)
    if hosts:
        added = ", ".join(name for name in names if name not in before)
        print_status(f"renewed, also for {added}" if added else "nothing to add; the certificate stays")


def check(
    host: Annotated[str, option("--host HOST", "Host of the broker.", CONNECTION)] = LOOPBACK,
    port: Port = None,
    fleet: Annotated[
        str,
        option(
            "--fleet FLEET",
            "Name of the fleet, whose topics the test messages use; it may be a new one.",
            CONNECTION,
            callback=fleet_name,
        ),
    ] = "main",
    insecure: Annotated[bool, option("--insecure", "Plaintext, without TLS.", CONNECTION)] = False,
    identities: Annotated[
        Path,
        option(
            "--identities FOLDER",
            "Folder of the certificate authority; it certifies two temporary devices to check the access list.",
            FOLDERS,
        ),
    ] = IDENTITIES,
    identity: Annotated[
        Path | None,
        option(
            "--identity FOLDER",
            "Identity folder: username and password; replaces --identities, no access list.",
            CONNECTION,
        ),
    ] = None,
    wait_s: Annotated[
        float, option("--wait SECONDS", f"{WAIT}, for each answer.", CONNECTION, min=0.1)
    ] = 10.0,
    format: FormatOption = Format.TABLE,
) -> None:
    """Check any broker: everything that edge-fl needs, and everything that it must deny."""
    from dataclasses import asdict

    from edge_fl.wire import identity as identity_folder
    from edge_fl.wire.endpoint import PORT, TLS_PORT, Endpoint
    from edge_fl_broker import checks
    from edge_fl_broker.checks import full_check

    if identity and (insecure or identity_folder.certificate_in(identity)):
        raise ConfigError(
            f"--identity {text(identity)}: expected a folder with username and password, and no --insecure;"
            " for certificates give --identities, from which two temporary devices are certified"
        )
    endpoint = Endpoint(host, port or (PORT if insecure else TLS_PORT))
    if identity:
        endpoint = identity_folder.endpoint(host, port or 0, identity)
    with _silent(logging.getLogger("edge_fl.wire")):
        if insecure or identity:
            results = checks.check(*checks.temporary_parties(endpoint), fleet, wait_s)
        else:
            results = full_check(identities, endpoint, fleet, wait_s)
    columns: Columns = {
        "what": "broker",
        "found": Column("found", prose=True),
        "needed": Column("needed", prose=True),
        "ok": "ok",
        "required": "required",
    }
    show_table([asdict(result) for result in results], columns, format)
    sys.stdout.flush()
    if identity:
        print_status("not checked: which topics the broker allows to whom")
    if failed := [result.what for result in results if result.required and not result.ok]:
        raise RunError(f"broker {endpoint}: {', '.join(failed)} failed; devices would not work with it")


def _validity(settings: BrokerSettings) -> str:
    """For which names the broker's certificate is valid, and the addresses to listen on that are missing there."""
    from edge_fl.wire import host_names
    from edge_fl_broker.provision.authority import broker_names

    assert settings.certificates
    names = broker_names(settings.certificates.cert)
    required = host_names.own_addresses() if settings.host in host_names.ANYWHERE else (settings.host,)
    missing = [host for host in required if not host_names.covers(names, host)]
    line = f"the broker's certificate is valid for {', '.join(names) or 'no name'}"
    return f"{line}; devices cannot connect to {', '.join(missing)}" if missing else line


@contextmanager
def _silent(log: logging.Logger) -> Iterator[None]:
    """Suppress log messages: a rejection is a result of the check and appears in its table."""
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
