"""The command `edge-fl flash`: one device onto a card, into an image, over ssh or into a folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_fl.cli import FormatOption, cache_folder, fleet_name
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.errors import ConfigError

if TYPE_CHECKING:
    from devices.flash.targets.base import Target

IDENTITIES = Path("runs/identities/devices")  # where 'edge-fl fleet enrol' puts them
COLUMNS = {"what": "what", "path": "file", "bytes": "bytes", "mode": "mode"}


def flash(
    device: Annotated[str, typer.Option(help="The device's name: a-z, 0-9 and '-'.")],
    data: Annotated[str, typer.Option(help="Where its images are on the Pi.")] = "folder:/srv/images",
    images: Annotated[
        Path | None, typer.Option(help="Pictures to take along for that, a folder per class.")
    ] = None,
    boot: Annotated[
        Path | None,
        typer.Option(help="A card's boot partition: its folder, an image file, or the card itself."),
    ] = None,
    ssh: Annotated[str, typer.Option(help="A Pi that runs already: user@host.")] = "",
    out: Annotated[Path | None, typer.Option(help="A folder to carry over by hand.")] = None,
    identity: Annotated[
        Path | None,
        typer.Option(help="Its identity or claim [runs/identities/devices/NAME]."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without an identity: in plaintext, to a broker of your own.")
    ] = False,
    host: Annotated[str, typer.Option(help="The broker, as the Pi reaches it.")] = "",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Its port [8883 with TLS, else 1883].")
    ] = None,
    fleet: Annotated[str, typer.Option(help="The fleet's name.", callback=fleet_name)] = "main",
    tier: Annotated[str, typer.Option(help="auto, head or full.")] = "auto",
    head: Annotated[
        str, typer.Option(help="The personal head: logistic, svm, mlp, nearest or auto.")
    ] = "logistic",
    root: Annotated[
        Path | None, typer.Option(help="The release root that it trusts [the first it meets].")
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Put all wheels onto the card: the Pi needs no internet.")
    ] = False,
    python: Annotated[
        str, typer.Option(help="With --out: 3.11 (Bookworm), 3.13 (Trixie), or both with a comma.")
    ] = "3.11,3.13",
    wheels: Annotated[Path | None, typer.Option(help="Where fetched wheels are kept.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be written, and write nothing.")
    ] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Put a device onto a Raspberry Pi: its settings, its identity, the agent and what starts it at the first boot."""
    from devices import config as settings
    from devices.flash import changes as flashing
    from devices.flash.card_contents import CardContents, on_the_pi, read_identity, read_images
    from devices.flash.wheels import gather

    target = _target(boot, ssh, out, python)
    if identity is None and (IDENTITIES / device).is_dir():
        identity = IDENTITIES / device
    found = read_identity(identity, device) if identity and not insecure else {}
    broker = {"host": host or "127.0.0.1", "port": port or (8883 if found else 1883), "fleet": fleet}
    tree = {"id": device, "data": data, "tier": tier, "head": head, "broker": broker}
    trusted = _read(root) if root else b""
    config = on_the_pi(settings.convert(dict(tree), "flash"), identified=bool(found), root=bool(trusted))
    if not host:
        raise ConfigError("flash: --host is missing; expected the broker's address, as the Pi reaches it")
    if not found and not insecure:
        raise ConfigError(
            f"{IDENTITIES / device}: no identity; expected that 'edge-fl fleet enrol {device}' made one, or --insecure for a broker in"
            " plaintext"
        )

    taken = read_images(images, config) if images else ()

    def contents(pythons: tuple[str, ...]) -> CardContents:
        print_status(f"{target.name}: Python {' or '.join(pythons)}")
        wheelhouse = gather(pythons, wheels or cache_folder() / "wheels", offline=offline)
        return CardContents(config, wheelhouse, found, trusted, taken)

    new, old = flashing.changes(target, contents)
    if dry_run:
        show_table([asdict(change) for change in flashing.described(new, old)], COLUMNS, format)
        print_status(
            f"{target.name}: {len(new)} files, {sum(file.size for file in new) / 1e6:.1f} MB; nothing was written"
        )
        return
    if not new:
        print_status(f"{target.name}: {device} is on it already; nothing was written")
        return
    flashing.apply(target, new, old)
    print_status(
        f"{target.name}: {device}, {sum(file.size for file in new) / 1e6:.1f} MB written; {target.after()}"
    )


def _target(boot: Path | None, ssh: str, out: Path | None, python: str) -> Target:
    from devices.flash.targets.folder import BootFolder, OutFolder
    from devices.flash.targets.image import Image
    from devices.flash.targets.ssh import Ssh
    from devices.flash.wheels import PYTHONS

    if [boot is not None, bool(ssh), out is not None].count(True) != 1:
        raise ConfigError("flash: expected one of --boot, --ssh and --out")
    if ssh:
        return Ssh(ssh)
    if boot is not None:
        if not boot.exists():
            raise ConfigError(f"{boot}: is not there; expected a boot partition or an image")
        return BootFolder(boot) if boot.is_dir() else Image(boot)
    assert out is not None
    pythons = tuple(part.strip() for part in python.split(","))
    if unknown := [version for version in pythons if version not in PYTHONS.values()]:
        raise ConfigError(f"--python {unknown[0]}: expected {' or '.join(PYTHONS.values())}")
    return OutFolder(out, pythons)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected a release root") from error
