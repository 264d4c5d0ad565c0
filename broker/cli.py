"""The commands `edge-fl broker up | config | check`; those of `edge-fl fleet` about certificates stand in broker/provision/cli.py."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from broker.provision import cli as provision
from edge_fl.cli import App, Format, FormatOption, say, show_table
from edge_fl.errors import ConfigError, ConnectError, RunError

if TYPE_CHECKING:
    from broker.config import Settings

Host = Annotated[str, typer.Option(help="The address to listen on; without certificates only loopback.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="The port.")]
Fleet = Annotated[str, typer.Option(help="The fleet whose topics the access list is about.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Plaintext for anybody, on loopback only.")]
Folder = Annotated[
    Path, typer.Option("--dir", help="Where configuration, log and retained messages are kept.")
]
File = Path | None
Ca = Annotated[File, typer.Option(help="The CA that signs every client's certificate (PEM).")]
Cert = Annotated[File, typer.Option(help="The broker's certificate (PEM).")]
Key = Annotated[File, typer.Option(help="The key of the broker's certificate (PEM).")]
Foreground = Annotated[
    bool,
    typer.Option(
        "--foreground", help="Become mosquitto, its log on this terminal (for systemd, containers)."
    ),
]
DEFAULT_FOLDER = Path("runs/broker")


def register(app: App) -> None:
    """Adds the group `broker`."""
    group = app.group("broker", help="The MQTT broker: run mosquitto, see its configuration, try one out.")
    group.command()(up)
    group.command()(config)
    group.command()(check)
    provision.register(app)


def up(
    host: Host = "127.0.0.1",
    port: Port = 1883,
    fleet: Fleet = "main",
    insecure: Insecure = False,
    folder: Folder = DEFAULT_FOLDER,
    foreground: Foreground = False,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Run mosquitto until Ctrl-C; what it retains is there again the next time."""
    from broker.find import find
    from broker.mosquitto import Mosquitto, replace_process

    settings = _settings(host, port, fleet, insecure, folder, ca, cert, key)
    program = find()
    if foreground:
        replace_process(settings, program)
    broker = Mosquitto(settings, program)
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    with broker:
        version = ".".join(map(str, program.version))
        how = "TLS" if settings.certificates else "plaintext, for everybody on this machine"
        say(
            f"mosquitto {version} on {broker.endpoint} ({how}), fleet {fleet!r}; log in {broker.log_path}; Ctrl-C ends it"
        )
        while not asked.wait(0.5):
            if broker.has_ended():
                raise ConnectError(
                    f"mosquitto ended by itself: {broker.log_tail()}; its log is {broker.log_path}"
                )
    say("mosquitto ended")


def config(
    host: Host = "127.0.0.1",
    port: Port = 1883,
    fleet: Fleet = "main",
    insecure: Insecure = False,
    folder: Folder = DEFAULT_FOLDER,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Print the configuration and the access list that `broker up` would run with."""
    from broker.config import render, render_access
    from broker.find import find

    settings = _settings(host, port, fleet, insecure, folder, ca, cert, key)
    program = find()
    print(f"# {program.path}, for {settings.config_path}\n")
    print(render(settings, program))
    if settings.certificates:
        print(f"# ---- {settings.access_path}\n")
        print(render_access(fleet), end="")


def check(
    host: Annotated[str, typer.Option(help="Where the broker is.")] = "127.0.0.1",
    port: Port = 1883,
    fleet: Annotated[str, typer.Option(help="The fleet below whose topics the test message goes.")] = "main",
    ca: Annotated[
        File, typer.Option(help="The CA that signed the broker's certificate (PEM); speaks TLS.")
    ] = None,
    cert: Annotated[File, typer.Option(help="The server's certificate (PEM).")] = None,
    key: Annotated[File, typer.Option(help="The key of the server's certificate (PEM).")] = None,
    deadline_s: Annotated[
        float, typer.Option("--deadline", min=0.1, help="Seconds to wait for each answer.")
    ] = 10.0,
    format: FormatOption = Format.TABLE,
) -> None:
    """Connect to any broker and try everything that edge-fl needs of it."""
    from dataclasses import asdict

    from broker import check as checks
    from edge_fl.wire.endpoint import Endpoint
    from edge_fl.wire.topics import checked

    endpoint = Endpoint(host, port, ca, cert, key)
    findings = checks.check(endpoint, checked(fleet, "fleet"), deadline_s)
    columns = {"what": "broker", "found": "found", "needed": "needed", "ok": "ok"}
    show_table([asdict(finding) for finding in findings], columns, format)
    sys.stdout.flush()
    if failed := [finding.what for finding in findings if not finding.ok]:
        raise RunError(f"broker {endpoint}: {', '.join(failed)} not as needed; devices would fail there")


def _settings(
    host: str, port: int, fleet: str, insecure: bool, folder: Path, ca: File, cert: File, key: File
) -> Settings:
    from broker.config import Certificates, Settings

    if not any((ca, cert, key)):
        return Settings(folder, host, port, fleet)
    if insecure or not (ca and cert and key):
        raise ConfigError(
            "TLS takes --ca, --cert and --key together, and no --insecure; no broker was started"
        )
    return Settings(folder, host, port, fleet, Certificates(ca, cert, key))
