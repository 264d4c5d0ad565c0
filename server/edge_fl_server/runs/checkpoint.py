"""Checkpoints: everything needed to resume a run after a round. A crash at any moment leaves an intact checkpoint.

    FOLDER/round-00012.safetensors    shared parts, and the personal parts of the clients simulated here
    FOLDER/round-00012.json           round, plan, the other file's sha256; written last, which commits the checkpoint
    FOLDER/round-00012-final.*        the same after the final personalisation; not a state to resume from

The previous checkpoint stays until the next is complete. Damaged ones are skipped with a warning. Devices keep their own personal parts;
the server never has them.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_fl.blob import digest
from edge_fl.errors import ArtefactError, EdgeFLError, RunError
from edge_fl.files import atomic
from edge_fl.files.paths import text
from edge_fl.learn.tree import Parts, from_arrays, to_arrays
from edge_fl.untrusted import NOT_JSON
from edge_fl.wire import tensors
from edge_fl_server.training.rounds import Plan, Reports

log = logging.getLogger(__name__)

KEPT = 2
LIMITS = tensors.TensorLimits(max_bytes=64 * 2**30, max_header_bytes=256 * 2**20, max_tensors=10**7)
SHARED, OWN, FINAL = "shared", "own", "-final"


class Index(Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON file. Personal parts are named by their client's index in `clients`, because tensor names allow fewer characters."""

    round: int
    sha256: str
    clients: list[str]
    plan: Plan


@dataclass(frozen=True)
class Checkpoint:
    """A run after `round`. Resume by `clients.restore(iter(own.items()))` and `rounds.run(method, clients, plan, shared, round + 1)`.

    `evaluated` holds the metrics of the rounds up to this one, `trained` the clients that took part in any, `dropped` how many rounds in a
    row the gate has dropped just before; all come from the results.
    """

    round: int
    plan: Plan
    shared: Parts
    own: dict[str, Parts] = field(default_factory=dict)
    evaluated: Mapping[int, Reports] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    dropped: int = 0


def save(
    folder: Path,
    round: int,
    plan: Plan,
    shared: Parts,
    own: Iterable[tuple[str, Parts]] = (),
    *,
    final: bool = False,
) -> None:
    """Write a checkpoint and remove all but the previous one. Raises RunError if it cannot be written."""
    stem = _stem(round) + FINAL * final
    states = dict(own)
    arrays = {f"{SHARED}.{name}": params for name, params in to_arrays(shared).items()}
    for place, parts in enumerate(states.values()):
        arrays |= {f"{OWN}.{place}.{name}": params for name, params in to_arrays(parts).items()}
    payload = tensors.pack(arrays, LIMITS)
    index = Index(round, digest(payload), list(states), plan)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write(folder / f"{stem}.safetensors", payload)
        atomic.write(folder / f"{stem}.json", msgspec.json.format(msgspec.json.encode(index)))
        for old in _stems(folder)[KEPT:]:
            (folder / f"{old}.json").unlink(missing_ok=True)
            (folder / f"{old}.safetensors").unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"{text(folder)}: checkpoint of round {round} cannot be written ({error.strerror}); the previous one is kept"
        ) from error


def load(folder: Path, *, final: bool = True) -> Checkpoint:
    """The newest intact checkpoint, without `final` the newest to resume from; damaged ones are logged. Raises ArtefactError."""
    for stem in _stems(folder):
        if stem.endswith(FINAL) and not final:
            continue
        try:
            return _read(folder, stem)
        except (EdgeFLError, OSError, KeyError, ValueError, *NOT_JSON) as error:
            log.warning("%s: damaged (%s); using the previous checkpoint", text(folder / stem), error)
    raise ArtefactError(
        f"{text(folder)}: no intact checkpoint, expected {_stem(0)[:-5]}NNNNN.json and .safetensors",
        consequence="nothing was resumed",
    )


def begun(folder: Path) -> bool:
    """Whether a checkpoint was ever written here, intact or not."""
    return bool(_stems(folder))


def _read(folder: Path, stem: str) -> Checkpoint:
    index = msgspec.json.decode((folder / f"{stem}.json").read_bytes(), type=Index)
    payload = (folder / f"{stem}.safetensors").read_bytes()
    if (found := digest(payload)) != index.sha256:
        raise ArtefactError(f"sha256 {found[:8]}, expected {index.sha256[:8]}")
    shared: Parts = {}
    own: dict[str, Parts] = {client: {} for client in index.clients}
    for name, params in from_arrays(tensors.unpack(payload, LIMITS)).items():
        where, _, rest = name.partition(".")
        if where == SHARED:
            shared[rest] = params
        else:
            place, _, part = rest.partition(".")
            own[index.clients[int(place)]][part] = params
    return Checkpoint(index.round, index.plan, shared, own)


def _stem(round: int) -> str:
    return f"round-{round:05d}"


def _stems(folder: Path) -> list[str]:
    """Names of the committed checkpoints, newest first."""
    return sorted((path.stem for path in folder.glob("round-*.json")), reverse=True)
