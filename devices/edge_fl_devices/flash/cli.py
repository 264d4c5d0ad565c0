"""The command `edge-fl flash`: install a device on a card, an image, a running Pi or into a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edge_fl.cli import cache_folder
from edge_fl.console import units
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.console.tables import Column, Columns
from edge_fl.errors import ConfigError
from edge_fl.files.paths import text
from edge_fl.options import CONNECTION, FOLDERS, ConnectionOptions, FormatOption, option
from edge_fl_devices.options import AgentOptions

if TYPE_CHECKING:
    from edge_fl_devices.flash.targets.base import Target

IDENTITIES = Path("runs/identities/devices")  # written by 'edge-fl fleet enrol'
COLUMNS: Columns = {"what": "what", "path": "file", "bytes": Column("size", units.size), "mode": "mode"}


@dataclass(frozen=True, kw_only=True)
class PiConnection(ConnectionOptions):
    """The broker of the Pi, and where this machine has its identity."""

    host: Annotated[
        str | None, option("--host HOST", "Host of the broker, as reachable from the Pi.", CONNECTION)
    ] = None
    identity: Annotated[
        Path | None,
        option(
            "--identity FOLDER",
            "Identity folder: the device's identity or claim [runs/identities/devices/DEVICE].",
            CONNECTION,
        ),
    ] = None


def flash(
    device: Annotated[str, option("--id DEVICE", "Name of the device: a-z, 0-9 and '-'.")],
    data: Annotated[
        str, option("--data SOURCE", "Data of the device: where they are on the Pi.")
    ] = "folder:/srv/images",
    images: Annotated[
        Path | None,
        option(
            "--images FOLDER",
            "Folder by class: pictures or recordings, which are copied to the Pi's data folder.",
        ),
    ] = None,
    boot: Annotated[
        Path | None,
        option(
            "--boot TARGET",
            "Boot partition of a card: its folder, an image file, or the card's block device.",
        ),
    ] = None,
    ssh: Annotated[str, option("--ssh USER@HOST", "A running Pi: user@host.")] = "",
    out: Annotated[
        Path | None, option("--out FOLDER", "Folder to write to; copy it to the Pi by hand.", FOLDERS)
    ] = None,
    insecure: Annotated[
        bool,
        option("--insecure", "Plaintext, without an identity: for a private broker.", CONNECTION),
    ] = False,
    releases: Annotated[
        Path | None,
        option(
            "--releases FOLDER",
            "Folder of 'edge-fl release export': put its newest release on the card and trust its root.",
        ),
    ] = None,
    label_page: Annotated[
        bool,
        option(
            "--label-page",
            "Start the page for labels at every boot, for each person in the network who has its token.",
        ),
    ] = False,
    offline: Annotated[
        bool, option("--offline", "Put all wheels on the card, so that the Pi needs no internet.")
    ] = False,
    python: Annotated[
        str,
        option(
            "--python VERSIONS", "With --out: 3.11 (Bookworm), 3.13 (Trixie), or both separated by a comma."
        ),
    ] = "3.11,3.13",
    wheels: Annotated[Path | None, option("--wheels FOLDER", "Cache folder for downloaded wheels.")] = None,
    dry_run: Annotated[bool, option("--dry-run", "List the files to write without writing them.")] = False,
    *,
    agent: AgentOptions,
    connection: PiConnection,
    format: FormatOption = Format.TABLE,
) -> None:
    """Install a device on a Raspberry Pi: settings, identity, and the agent, which starts at the first boot."""
    from edge_fl.wire.endpoint import PORT, TLS_PORT
    from edge_fl_devices import config as settings
    from edge_fl_devices.flash.card_contents import (
        CardContents,
        data_folder,
        read_identity,
        read_images,
        read_releases,
        require_valid_host,
        with_pi_paths,
    )
    from edge_fl_devices.flash.changes import apply_changes, list_changes, plan_changes
    from edge_fl_devices.flash.wheels import gather, reads_heic

    target = _target(boot, ssh, out, python)
    host, identity = connection.host, connection.identity
    if identity is None and (IDENTITIES / device).is_dir():
        identity = IDENTITIES / device
    keys = read_identity(identity, device) if identity and not insecure else {}
    broker = {"port": TLS_PORT if keys else PORT, **connection.given(), "identity": ""}
    given = {"tier": agent.tier, "head": agent.head}
    tree: dict[str, object] = {"id": device, "data": data, "broker": broker}
    tree |= {name: value for name, value in given.items() if value is not None}
    exported_root, released = read_releases(releases) if releases else (b"", ())
    trusted = settings.read_root(agent.root) if agent.root else exported_root
    config = with_pi_paths(
        settings.convert(tree, "flash"), identified=bool(keys), root=bool(trusted), releases=bool(released)
    )
    if not host:
        raise ConfigError("flash: --host is missing; expected the broker's address, as reachable from the Pi")
    if not keys and not insecure:
        raise ConfigError(
            f"{text(IDENTITIES / device)}: no identity; expected one made by 'edge-fl fleet enrol {device}', or --insecure for a broker in"
            " plaintext"
        )
    if label_page and not data_folder(config):
        raise ConfigError(f"--label-page: data {config.data} are no folder such as folder:/srv/images")
    if identity and keys:
        print_status(require_valid_host(identity, host, config.broker.port))
    samples, others = read_images(images, config, fat=target.is_boot_partition) if images else ((), 0)
    if images and others:
        print_status(
            f"{text(images)}: {others} files are not readable, not in a folder per class, or of another kind; they are left out"
        )
    heic = sum(path.lower().endswith((".heic", ".heif")) for path, _ in samples)
    if images and heic and not reads_heic():
        print_status(
            f"{text(images)}: {heic} HEIC pictures, which the Pi could not read; pip install 'edge-fl[heic]' here and flash again"
        )

    def contents(pythons: tuple[str, ...]) -> CardContents:
        print_status(f"{target.name}: Python {' or '.join(pythons)}")
        wheelhouse = gather(pythons, wheels or cache_folder() / "wheels", offline=offline)
        return CardContents(config, wheelhouse, keys, trusted, samples, released, label_page)

    new, old = plan_changes(target, contents)
    written = units.size(sum(file.size for file in new))
    if dry_run:
        show_table(list_changes(new, old), COLUMNS, format)
        print_status(f"{target.name}: {len(new)} files, {written}; nothing was written")
    elif not new:
        print_status(f"{target.name}: {device} is installed already; nothing was written")
    else:
        apply_changes(target, new, old)
        print_status(f"{target.name}: {device}, {written} written; {target.next_step()}")
        if keys:
            from edge_fl.wire.egress import sharing

            said = sharing(device, uploads=config.uploads, minimum=config.sums.minimum)
            print_status(": ".join(said))


def _target(boot: Path | None, ssh: str, out: Path | None, python: str) -> Target:
    from edge_fl_devices.flash.targets.folder import BootFolder, OutFolder
    from edge_fl_devices.flash.targets.image import Image
    from edge_fl_devices.flash.targets.ssh import Ssh
    from edge_fl_devices.flash.wheels import PYTHONS

    if [boot is not None, bool(ssh), out is not None].count(True) != 1:
        raise ConfigError("flash: expected one of --boot, --ssh and --out")
    if ssh:
        return Ssh(ssh)
    if boot is not None:
        if not boot.exists():
            raise ConfigError(f"{text(boot)}: does not exist; expected a boot partition or an image")
        return BootFolder(boot) if boot.is_dir() else Image(boot)
    assert out is not None
    pythons = tuple(part.strip() for part in python.split(","))
    if unknown := [version for version in pythons if version not in PYTHONS.values()]:
        raise ConfigError(f"--python {unknown[0]}: expected {' or '.join(PYTHONS.values())}")
    return OutFolder(out, pythons)
