"""Commands `edge-fl broker up | config | check`; the `edge-fl fleet` commands about certificates are in `provision.cli`."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from edge_fl.cli import App, FormatOption, fleet_name
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.console.tables import Column, Columns
from edge_fl.errors import ConfigError, RunError
from edge_fl.files import descriptors
from edge_fl.files.paths import text
from edge_fl_broker.provision import cli as provision

if TYPE_CHECKING:
    from edge_fl_broker.config import Settings
    from edge_fl_broker.provision.authority import Authority

Host = Annotated[
    str,
    typer.Option(
        metavar="HOST", rich_help_panel="Connection", help="Address to listen on; without TLS loopback only."
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        metavar="N", rich_help_panel="Connection", min=1, max=65535, help="Port [8883, without TLS 1883]."
    ),
]
Fleet = Annotated[
    str,
    typer.Option(
        metavar="FLEET",
        rich_help_panel="Connection",
        help="Fleet whose topics clients may use.",
        callback=fleet_name,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", rich_help_panel="Connection", help="Plaintext without authentication, on loopback only."
    ),
]
Folder = Annotated[
    Path,
    typer.Option(
        "--dir",
        metavar="FOLDER",
        rich_help_panel="Folders",
        help="Folder for configuration, log and retained messages.",
    ),
]
Home = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER",
        rich_help_panel="Folders",
        help="Folder of the CA made by 'edge-fl fleet enrol'; its register decides who may connect.",
    ),
]
File = Path | None
Ca = Annotated[File, typer.Option(metavar="FILE", help="CA that signs every client (PEM); replaces --home.")]
Cert = Annotated[File, typer.Option(metavar="FILE", help="Broker's certificate (PEM).")]
Key = Annotated[File, typer.Option(metavar="FILE", help="Key of the broker's certificate (PEM).")]
Foreground = Annotated[
    bool,
    typer.Option(
        "--foreground",
        help="Replace this process by mosquitto, with its log on the terminal (for systemd, containers).",
    ),
]
DEFAULT_FOLDER = Path("runs/broker")
WATCH_S = 0.5
_SECURITY = {True: "plaintext, loopback only", False: "TLS"}


def register(app: App) -> None:
    """Add the group `broker`."""
    group = app.group(
        "broker", "The MQTT broker: run mosquitto, print its configuration, test a broker.", "Fleet"
    )
    group.add(up, "edge-fl broker up --insecure")
    group.add(config, "edge-fl broker config --insecure")
    group.add(check, "edge-fl broker check --insecure")
    group.add(certificate, "edge-fl broker certificate --host 192.168.1.20")
    provision.register(app)


def up(
    host: Host = "127.0.0.1",
    port: Port = None,
    fleet: Fleet = "main",
    insecure: Insecure = False,
    folder: Folder = DEFAULT_FOLDER,
    home: Home = provision.DEFAULT_HOME,
    enrol: Annotated[
        list[str] | None,
        typer.Option(
            "--enrol",
            metavar="DEVICE",
            help="Enrol this device first, unless it is enrolled; may be repeated.",
        ),
    ] = None,
    foreground: Foreground = False,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Run mosquitto until Ctrl-C, over TLS, for enrolled clients only; retained messages survive a restart."""
    from edge_fl_broker.mosquitto import Mosquitto, choose, replace_process
    from edge_fl_broker.provision.register_sync import RegisterSync
    from edge_fl_broker.provision.registrar import Registrar
    from edge_fl_broker.supervisor import StopRequest, Supervisor

    if enrol:
        if insecure or ca or cert or key:
            raise ConfigError("--enrol: expected a broker with the CA in --home, without --insecure and --ca")
        provision.enrol_new(enrol, home)
    settings, authority = _settings(host, port, fleet, insecure, folder, home, (ca, cert, key))
    if missing := [str(file) for file in (ca, cert, key) if file and not file.is_file()]:
        raise ConfigError(f"{', '.join(missing)}: no such file; expected PEM")
    if settings.certificates:
        print_status(_validity(settings))
    program = choose(settings, print_status)
    descriptors.raise_most()
    if foreground:
        if authority:
            print_status(
                "--foreground runs mosquitto only: claims get no certificates, and revocations take effect at its restart"
            )
        replace_process(settings, program, print_status)
    broker = Mosquitto(settings, program, print_status)
    stopping = StopRequest()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    at = broker.endpoint
    registrar = Registrar(authority, at.host, at.port, fleet) if authority else nullcontext()
    with broker, registrar:
        version = ".".join(map(str, program.version))
        security = (
            f"TLS, clients enrolled in {text(home)}"
            if authority
            else _SECURITY[settings.certificates is None]
        )
        print_status(
            f"mosquitto {version} on {broker.endpoint} ({security}), fleet {fleet!r}; log {broker.log_path}; stop with Ctrl-C"
        )
        supervisor = Supervisor(broker, RegisterSync(broker, authority) if authority else None, print_status)
        while not stopping.wait(WATCH_S):
            supervisor.update(stopping)
    print_status("mosquitto stopped")


def config(
    host: Host = "127.0.0.1",
    port: Port = None,
    fleet: Fleet = "main",
    insecure: Insecure = False,
    folder: Folder = DEFAULT_FOLDER,
    home: Home = provision.DEFAULT_HOME,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Print the configuration and the access list that 'broker up' would use."""
    from edge_fl_broker.config import render, render_access
    from edge_fl_broker.mosquitto import choose

    settings, _ = _settings(host, port, fleet, insecure, folder, home, (ca, cert, key))
    program = choose(settings, print_status)
    print(f"# {program.path}, for {settings.config_path}\n")
    print(render(settings, program))
    if settings.certificates:
        print(f"# ---- {settings.access_path}\n")
        print(render_access(settings), end="")


def certificate(
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="HOST",
            help="Name or address under which devices reach the broker, to add; may be repeated.",
        ),
    ] = None,
    home: Home = provision.DEFAULT_HOME,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the names and addresses for which the broker's certificate is valid. With --host renew it for more of them: the CA stays, so
    devices need nothing, and a running 'broker up' uses it within a second.
    """
    from edge_fl_broker.provision import register_sync
    from edge_fl_broker.provision.authority import Authority

    register_sync.require(home)
    authority = Authority.open(home)
    before = authority.broker_names()
    issued = authority.broker(hosts) if hosts else authority.broker_identity()
    names = authority.broker_names()
    rows = [{"name": name, "expires": f"{issued.expires:%Y-%m-%d}"} for name in names]
    show_table(rows, {"name": "valid for", "expires": "expires"}, format)
    if hosts:
        added = ", ".join(name for name in names if name not in before)
        print_status(f"renewed, also for {added}" if added else "nothing to add; the certificate stays")


def check(
    host: Annotated[
        str, typer.Option(metavar="HOST", rich_help_panel="Connection", help="Broker's host.")
    ] = "127.0.0.1",
    port: Port = None,
    fleet: Annotated[
        str,
        typer.Option(
            metavar="FLEET",
            rich_help_panel="Connection",
            help="Fleet whose topics the test messages use.",
            callback=fleet_name,
        ),
    ] = "main",
    insecure: Annotated[
        bool, typer.Option("--insecure", rich_help_panel="Connection", help="Connect without TLS.")
    ] = False,
    home: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            rich_help_panel="Folders",
            help="Folder of the CA; it certifies two temporary devices to check the access list.",
        ),
    ] = provision.DEFAULT_HOME,
    identity: Annotated[
        Path | None,
        typer.Option(
            "--identity",
            metavar="FOLDER",
            rich_help_panel="Connection",
            help="Folder with username and password; replaces --home, no access list.",
        ),
    ] = None,
    deadline_s: Annotated[
        float,
        typer.Option(
            "--deadline",
            metavar="SECONDS",
            rich_help_panel="Connection",
            min=0.1,
            help="Seconds to wait for each answer.",
        ),
    ] = 10.0,
    format: FormatOption = Format.TABLE,
) -> None:
    """Check any broker: everything that edge-fl needs, and everything that it must deny."""
    from dataclasses import asdict

    from edge_fl.wire import identity as identities
    from edge_fl.wire.endpoint import PORT, TLS_PORT, Endpoint
    from edge_fl_broker import check as checks
    from edge_fl_broker.access import full_check

    if identity and (insecure or identities.certificate_in(identity)):
        raise ConfigError(
            f"--identity {text(identity)}: expected a folder with username and password, and no --insecure;"
            " for certificates give --home, from which two temporary devices are certified"
        )
    endpoint = Endpoint(host, port or (PORT if insecure else TLS_PORT))
    if identity:
        endpoint = identities.endpoint(host, port or 0, identity)
    with _silent(logging.getLogger("edge_fl.wire")):
        if insecure or identity:
            results = checks.check(*checks.temporary_parties(endpoint), fleet, deadline_s)
        else:
            results = full_check(home, endpoint, fleet, deadline_s)
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


def _validity(settings: Settings) -> str:
    """For which names the broker's certificate is valid, and the addresses to listen on that are missing there."""
    from edge_fl.wire import hosts
    from edge_fl_broker.provision.authority import broker_names

    assert settings.certificates
    names = broker_names(settings.certificates.cert)
    required = hosts.own_addresses() if settings.host in hosts.ANYWHERE else (settings.host,)
    missing = [host for host in required if not hosts.covers(names, host)]
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


def _settings(
    host: str,
    port: int | None,
    fleet: str,
    insecure: bool,
    folder: Path,
    home: Path,
    files: tuple[File, File, File],
) -> tuple[Settings, Authority | None]:
    """Plaintext only on request; else TLS with given certificates or with the CA in `home`, whose register then decides who connects."""
    from edge_fl.wire.endpoint import PORT, TLS_PORT
    from edge_fl_broker.config import Certificates, Settings
    from edge_fl_broker.provision import register_sync
    from edge_fl_broker.provision.authority import Authority

    ca, cert, key = files
    if insecure and not any(files):
        return Settings(folder, host, port or PORT, fleet), None
    if ca and cert and key and not insecure:
        return Settings(folder, host, port or TLS_PORT, fleet, Certificates(ca, cert, key)), None
    if any(files):
        raise ConfigError("TLS takes --ca, --cert and --key together, and no --insecure")
    register_sync.require(home)
    authority = Authority.open(home)
    certificates = register_sync.certificates(authority, host)
    return register_sync.with_register(
        Settings(folder, host, port or TLS_PORT, fleet, certificates), authority
    ), authority
