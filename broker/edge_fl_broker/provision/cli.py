"""Commands `edge-fl fleet enrol | certificates | revoke | rotate`, which manage a fleet's certificates without a broker."""

from pathlib import Path
from typing import Annotated, Literal

from edge_fl.cli import App
from edge_fl.console import units
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.console.tables import Column, Columns
from edge_fl.errors import ConfigError
from edge_fl.files.paths import text
from edge_fl.options import FOLDERS, IDENTITIES, FormatOption, IdentitiesOption, argument, option

Names = Annotated[list[str] | None, argument("DEVICE", "Device names: a-z, 0-9 and '-'.")]
Out = Annotated[
    Path | None,
    option(
        "--out FOLDER",
        "Folder to write to [devices in --identities, for people its folder people].",
        FOLDERS,
    ),
]
Days = Annotated[
    int | None,
    option("--days N", "Validity in days [claims 30, people 90, identities 1825].", min=1, max=3650),
]
COLUMNS: Columns = {
    "name": "name",
    "role": "role",
    "state": "state",
    "expires": "expires",
    "renewal": "renewal",
    "device": "for",
    "by": Column("issued by", rank=1),
    "revoked_by": Column("revoked by", rank=1),
    "serial": Column("serial", rank=1),
}


def register(app: App) -> None:
    """Add to the group `fleet`."""
    group = app.group("fleet")
    group.add(
        enrol,
        "edge-fl fleet enrol pi-07 pi-08\nedge-fl fleet enrol --count 50 --prefix pi-\nedge-fl fleet enrol --role viewer ann",
    )
    group.add(certificates, "edge-fl fleet certificates --within 90d")
    group.add(revoke, "edge-fl fleet revoke pi-07")
    group.add(rotate, "edge-fl fleet rotate runs/identities/devices/pi-07")


def enrol(
    names: Names = None,
    count: Annotated[
        int,
        option(
            "--count N",
            "Number of devices to add, named PREFIX000, ...; numbers continue after the highest ever used.",
            min=0,
            max=10_000,
        ),
    ] = 0,
    total: Annotated[
        int,
        option(
            "--total N",
            "Add as many as are missing until N numbered devices are enrolled; may be repeated.",
            min=0,
            max=100_000,
        ),
    ] = 0,
    prefix: Annotated[str, option("--prefix PREFIX", "Prefix of numbered names.")] = "device-",
    baked: Annotated[
        bool, option("--baked", "Issue complete identities, keys included, instead of one-time claims.")
    ] = False,
    role: Annotated[
        Literal["viewer", "operator", "releaser"] | None,
        option(
            "--role ROLE",
            "Role: viewer, operator or releaser; enrols people instead of devices (docs/security.md).",
        ),
    ] = None,
    tags: Annotated[
        list[str] | None, option("--tag KEY=VALUE", "A tag of these devices; may be repeated.")
    ] = None,
    days: Days = None,
    out: Out = None,
    identities: IdentitiesOption = IDENTITIES,
) -> None:
    """Enrol devices: create a folder each with a one-time claim (the device generates its key), or with a complete identity (--baked).
    With --role enrol people: a complete identity ROLE-NAME each.
    """
    from datetime import timedelta

    from edge_fl.fleet.tags import parse
    from edge_fl_broker.provision.authority import CLAIM_LIFE, LIFE, PERSON_LIFE, Authority
    from edge_fl_broker.provision.register import next_names, numbered_names, used_numbers

    if role and (count or total):
        raise ConfigError("--role: expected the names of people, and no --count or --total")
    if count and total:
        raise ConfigError("--count and --total: expected one of them")
    if role and tags:
        raise ConfigError("--role: expected the names of people, and no --tag")

    given = dict(map(parse, tags or []))
    if removed := [key for key, value in given.items() if not value]:
        raise ConfigError(f"--tag {removed[0]}-: expected key=value; 'edge-fl fleet tag' removes tags")
    if not (names or count or total):
        raise ConfigError("no names, no --count and no --total; expected devices to enrol")
    if len(set(names or ())) != len(names or ()):
        raise ConfigError("duplicate name, expected each name once")
    authority = Authority.make(identities)
    out = out or identities / ("people" if role else "devices")
    used = used_numbers(authority.register.rows(), out, names or (), prefix)
    if total:
        enrolled = numbered_names(authority.register.rows(), authority.now(), prefix)
        count = max(total - len(enrolled), 0)
        if not (names or count):
            print_status(f"{len(enrolled)} devices {prefix}N are enrolled; nothing was changed")
            return
    devices = [*(names or []), *next_names(used, prefix, count)]
    if role:
        life = timedelta(days=days) if days else PERSON_LIFE
        for person in authority.enrol_people(role, devices, out, life):
            print(person.folder)
            print_status(
                f"{person.name}: valid until {person.expires:%Y-%m-%d}; 'edge-fl fleet rotate' renews it"
            )
        return
    issue, life = (authority.bake, LIFE) if baked else (authority.claim, CLAIM_LIFE)
    given_out = issue({name: out / name for name in devices}, timedelta(days=days) if days else life, given)
    one, more = ("identity", "identities") if baked else ("claim", "claims")
    for issued in given_out:
        print(issued.folder)
    print_status(
        f"{len(given_out)} {one if len(given_out) == 1 else more} in {text(out)}; the CA and its register are in {text(identities)}:"
        f" keep {text(identities)}/ca.key secret"
    )
    _state_sharing()


def enrol_new(names: list[str], home: Path) -> None:
    """Create a claim for each device that has no folder in HOME/devices; creates the CA if there is none. Raises ConfigError."""
    from edge_fl_broker.provision.authority import CLAIM_LIFE, Authority

    folders = {name: home / "devices" / name for name in names}
    new = {name: folder for name, folder in folders.items() if not folder.exists()}
    for issued in Authority.make(home).claim(new, CLAIM_LIFE) if new else ():
        print_status(f"{issued.folder}: claim of a new device")
    if new:
        _state_sharing()


def _state_sharing() -> None:
    from edge_fl.wire.egress import sharing

    print_status(": ".join(sharing("a device")))


def certificates(
    within: Annotated[
        str, option("--within DURATION", "Only those in use that end within this time, such as 90d.")
    ] = "",
    identities: IdentitiesOption = IDENTITIES,
    format: FormatOption = Format.TABLE,
) -> None:
    """List every certificate that was issued: whether it is valid, when it ends, what renews it. Connected devices: edge-fl fleet list."""
    from datetime import timedelta

    from edge_fl_broker.provision.authority import Authority
    from edge_fl_broker.provision.register import renewals

    authority = Authority.open(identities)
    now, issued = authority.now(), authority.register.rows()
    by_serial = renewals(issued, now)
    if within:
        until = now + timedelta(seconds=units.parse_duration(within, "--within"))
        issued = tuple(row for row in issued if row.serial in by_serial and row.expires <= until)
    rows = [
        {
            "name": row.name,
            "role": row.role,
            "state": row.state(now),
            "expires": f"{row.expires:%Y-%m-%d}",
            "renewal": by_serial.get(row.serial),
            "device": row.device or None,
            "by": row.issued_by or None,
            "revoked_by": row.revoked_by or None,
            "serial": row.serial,
        }
        for row in sorted(issued, key=lambda row: row.expires if within else row.begins)
    ]
    show_table(rows, COLUMNS, format)
    print_status(f"the CA itself is valid until {authority.expires:%Y-%m-%d}; all of them end with it")


def revoke(
    names: Annotated[list[str], argument("DEVICE", "Names whose certificates are revoked.")],
    identities: IdentitiesOption = IDENTITIES,
) -> None:
    """Revoke all certificates of these names. 'edge-fl broker up' notices within a second; other brokers read its file revoked.crl."""
    from edge_fl_broker.provision.authority import Authority

    authority = Authority.open(identities)
    for name in names:
        ended = authority.revoke(name)
        print(f"{name}: {len(ended)} revoked ({', '.join(row.serial for row in ended)})")


def rotate(
    folders: Annotated[
        list[Path], argument("FOLDER", "Identity folders created by 'fleet enrol --baked' or '--role'.")
    ],
    days: Days = None,
    identities: IdentitiesOption = IDENTITIES,
) -> None:
    """Renew the identities in these folders, also expired ones: new key, new certificate, same name. Running devices renew theirs after two
    thirds of its life.
    """
    from datetime import timedelta

    from edge_fl_broker.provision.authority import Authority

    authority = Authority.open(identities)
    for folder in folders:
        renewed = authority.rotate(folder, timedelta(days=days) if days else None)
        print(f"{renewed.name}: valid until {renewed.expires:%Y-%m-%d}")
