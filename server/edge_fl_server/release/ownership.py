"""Which registry has a fleet. Its id is in the registry, next to the fleet's releases, and in the retained state of the last server.

A server with another registry, such as an empty one under a mistyped name, would publish its own state over that of the fleet: other
roll-outs, no settings, no tags, no history. It has to be told to.
"""

from pathlib import Path

from edge_fl.console.units import counted
from edge_fl.errors import ConfigError
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.files.paths import text
from edge_fl.wire.messages import ServerState
from edge_fl.wire.roles import local_person
from edge_fl_server.registry import Database, audit, fleets, registered_devices, rollouts

FILE = "registry"


def require(
    db: Database, fleet: str, home: Path, retained: ServerState | None = None, *, adopt: bool = False
) -> None:
    """Raise ConfigError if another registry has the fleet; `retained` is the state of the fleet's last server on the broker.

    `adopt`: this one is to have it.
    """
    own = fleets.id_of(db, fleet)
    found = []
    if (id := _read(home / fleet / FILE)) and id != own:
        found.append(f"{text(home / fleet)} belongs to registry {id}")
    if retained and retained.registry and retained.registry != own:
        found.append(f"the fleet's last server used registry {retained.registry}")
    if not own and not found:
        if kept := _kept(home / fleet):
            found.append(f"{text(home / fleet)} has {counted(kept, 'release')}")
        if retained:
            found.append(f"the broker has the state of an earlier server (epoch {retained.epoch})")
    if not found or adopt:
        return
    what = f"{counted(len(registered_devices.names(db, fleet)), 'device')}, {counted(len(rollouts.releases_of(db, fleet)), 'release')}"
    raise ConfigError(
        f"fleet {fleet!r}: this registry ({own or 'new'}; {what}) is not the fleet's: {', and '.join(found)}; expected the fleet's"
        " registry (--database); 'edge-fl server up --adopt' gives the fleet to this one, which then publishes what it knows instead",
        consequence="nothing was published",
    )


def take(db: Database, fleet: str, home: Path, *, adopt: bool = False) -> None:
    """Note next to the releases that this registry has the fleet; the audit log has an adoption. Raises InputError if that fails."""
    path, id = home / fleet / FILE, fleets.claim(db, fleet)
    if _read(path) == id:
        return
    with reporting(text(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, f"{id}\n")
    if adopt:
        audit.record(db, fleet, local_person(), "adopt", f"registry {id}")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()[:64]
    except OSError:
        return ""


def _kept(folder: Path) -> int:
    """The highest release of a repository, 0 without one."""
    from edge_fl_server.release.repository import Repository

    return Repository(folder).next_release() - 1 if (folder / "metadata").is_dir() else 0
