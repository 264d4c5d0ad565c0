"""Split of a dataset over clients, each with train, validation and test sets: drawn from a seed or read from a file, shown as a histogram.

The same dataset, settings and seed give the same split, so that simulated devices and the server's simulation agree. A rule takes labels
(or domains) and returns one ascending index array per client; the arrays are disjoint.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

from edge_fl.config import MAX_CLASSES, Fraction
from edge_fl.data import split_file
from edge_fl.data.datasets import DOMAINS
from edge_fl.data.samples import Array, ClientData, Dataset, Groups, Indices, Labels
from edge_fl.errors import DataError, nearest, shortened
from edge_fl.files import npz
from edge_fl.files.paths import composed, text
from edge_fl.seeds import generator

MINIMUM = 10
TRIES = 100
ClientId = str
Sets = tuple[Indices, Indices, Indices]  # train, validation, test
_PARTS = ("train", "validation", "test")


class DataConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A dataset of `edge_fl.data`, split over clients; `fraction` is the share of samples to use.

    `split` is a file that assigns each sample to a client and a set (`edge_fl.data.split_file`), instead of drawing them. `max_train`
    limits the training samples per client, `shots` those of each class (0: no limit). Of the `clients`, `unseen` never train; the global
    model is evaluated on them after the last round, and after they fine-tuned its head for `unseen_epochs` (0: not).

    `classes` names the classes where the server has no dataset (`dataset = ""`), or only devices have data.
    """

    dataset: str = "digits"
    data_dir: str = ".data"
    clients: Annotated[int, Meta(ge=1)] = 12
    partition: Literal["dirichlet", "dirichlet-clients", "pathological", "domain", "iid"] = "dirichlet"
    beta: Annotated[float, Meta(gt=0)] = 0.3
    classes_per_client: Annotated[int, Meta(ge=1)] = 2
    test_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.25
    validation_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    max_train: Annotated[int, Meta(ge=0)] = 0
    shots: Annotated[int, Meta(ge=0)] = 0
    split: str = ""
    unseen: Annotated[int, Meta(ge=0)] = 0
    unseen_epochs: Annotated[int, Meta(ge=0)] = 0
    fraction: Fraction = 1.0
    classes: Annotated[list[str], Meta(max_length=MAX_CLASSES)] = []

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "classes", [composed(name) for name in self.classes])


@dataclass(frozen=True, eq=False)
class Split:
    """Ascending client ids ("c000", ..., or those of a file) and the dataset's indices of each client's train, validation and test set.

    `samples` is the size of the dataset that was split.
    """

    samples: int
    clients: tuple[ClientId, ...]
    train: tuple[Indices, ...]
    validation: tuple[Indices, ...]
    test: tuple[Indices, ...]

    def client(self, dataset: Dataset, client: ClientId) -> ClientData:
        """The data of one client. Raises DataError for an unknown client, or for another dataset than the one that was split."""
        if client not in self.clients:
            raise DataError(f"client {client!r} is not in the split{nearest(client, self.clients)}")
        if len(dataset.samples) != self.samples:
            raise DataError(
                f"{dataset.name}: {len(dataset.samples)} samples, but the split is of {self.samples}"
            )
        row = self.clients.index(client)
        return ClientData(*(dataset.samples.take(getattr(self, part)[row]) for part in _PARTS))

    def fingerprint(self) -> str:
        """sha256 over the clients and the indices of their sets; the same on every machine."""
        digest = hashlib.sha256(repr(self.clients).encode())
        for part in _PARTS:
            for rows in getattr(self, part):
                digest.update(f"{part} {len(rows)} ".encode() + np.asarray(rows, "<i8").tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the split to an .npz file atomically."""
        arrays: dict[str, Array] = {"samples": np.array(self.samples), "clients": np.array(self.clients)}
        for part in _PARTS:
            rows: tuple[Indices, ...] = getattr(self, part)
            arrays[part] = np.concatenate(rows)
            arrays[f"{part}_ends"] = np.cumsum([len(row) for row in rows])
        npz.write(path, arrays)

    def write_csv(self, path: Path) -> None:
        """Write the split as a file that `DataConfig.split` accepts. Raises DataError if it cannot be written."""
        split_file.write(path, self.samples, self.clients, {part: getattr(self, part) for part in _PARTS})

    @classmethod
    def load(cls, path: Path) -> Split:
        """Read a file written by `save`. Raises DataError for anything else."""
        content = npz.read(path)
        try:
            rows = {part: _rows(content[part], content[f"{part}_ends"]) for part in _PARTS}
            split = cls(int(content["samples"]), tuple(map(str, content["clients"])), **rows)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{text(path)}: not a saved split ({error})") from error
        split._require_whole(path)
        return split

    def _require_whole(self, path: Path) -> None:
        parts = [getattr(self, part) for part in _PARTS]
        every = (
            np.concatenate([row for rows in parts for row in rows]) if self.clients else np.empty(0, np.int64)
        )
        inside = bool(len(every)) and every.min() >= 0 and every.max() < self.samples
        if (
            not inside
            or len(np.unique(every)) < len(every)
            or any(len(rows) != len(self.clients) for rows in parts)
        ):
            raise DataError(
                f"{text(path)}: a damaged split (indices overlap, or lie outside 0..{self.samples - 1})"
            )


PARTITIONS: dict[str, Callable[[Labels, DataConfig, int], list[Indices]]] = {
    "dirichlet": lambda y, config, seed: dirichlet(y, config.clients, config.beta, seed),
    "dirichlet-clients": lambda y, config, seed: dirichlet_clients(y, config.clients, config.beta, seed),
    "pathological": lambda y, config, seed: pathological(y, config.clients, config.classes_per_client, seed),
    "domain": lambda domains, config, seed: by_domain(domains, config.clients, seed),
    "iid": lambda y, config, seed: iid(y, config.clients, seed),
}
"""Rules by name: (labels or domains of the samples, settings, seed) -> an array of positions per client."""


def assigned(dataset: Dataset, kept: Indices, config: DataConfig, seed: int) -> list[Indices]:
    """Assign the samples `kept` by the rule `config.partition`: an array of positions in `kept` per client. Raises DataError.

    A group goes to one client as a whole, by the label (or domain) of its first sample.
    """
    labels = dataset.domains if config.partition == "domain" else dataset.samples.y
    if labels is None:
        raise DataError(f"{dataset.name}: no domains, expected one of {', '.join(DOMAINS)}")
    first, whole = units(dataset.samples.groups, kept)
    return [whole(chosen) for chosen in PARTITIONS[config.partition](labels[kept[first]], config, seed)]


def units(groups: Groups, rows: Indices) -> tuple[Indices, Callable[[Indices], Indices]]:
    """What is assigned as a whole among samples `rows`: the positions of the first samples of the groups, and a function from the numbers
    of some groups to the positions of all their samples, in the order of these numbers.
    """
    if not len(groups):
        return np.arange(len(rows)), lambda units: units
    _, first, unit = np.unique(groups[rows], return_index=True, return_inverse=True)
    members = np.split(np.argsort(unit, kind="stable"), np.cumsum(np.bincount(unit))[:-1])
    nothing = np.empty(0, np.int64)
    return first, lambda units: np.concatenate([nothing, *(members[number] for number in units)])


def split_clients(
    dataset: Dataset, config: DataConfig, seed: int, given: split_file.Rows | None = None
) -> Split:
    """Draw the split, or take it from `given` or the file `config.split`; then keep at most `shots` training samples per class, and
    `max_train` in all.

    Raises DataError when there are too few samples, or for a file that does not fit the dataset.
    """
    if config.split or given:
        clients, owned = _given(dataset, config, seed, given)
    else:
        clients, owned = _drawn(dataset, config, seed)
    rows = [
        (np.sort(_limited(train, dataset.samples.y, config)), np.sort(validation), np.sort(test))
        for train, validation, test in owned
    ]
    trains, validations, tests = zip(*rows, strict=True)
    return Split(len(dataset.samples), clients, trains, validations, tests)


def _given(
    dataset: Dataset, config: DataConfig, seed: int, given: split_file.Rows | None
) -> tuple[tuple[ClientId, ...], list[Sets]]:
    if config.fraction < 1:
        raise DataError(
            f"[data] fraction = {config.fraction:g} with a given split, expected 1; a split file leaves samples out with the set 'unused'"
        )
    rows = given or split_file.read(Path(config.split), dataset.name, len(dataset.samples))
    return tuple(rows), [
        (
            generator(seed, "partition", client=client).permutation(sets["train"]),
            sets["validation"],
            sets["test"],
        )
        for client, sets in rows.items()
    ]


def _drawn(dataset: Dataset, config: DataConfig, seed: int) -> tuple[tuple[ClientId, ...], list[Sets]]:
    """Keep `fraction` of the samples, assign them to clients, then divide each client's share into test, validation and train.

    `test_fraction` refers to the client's share, `validation_fraction` to the rest; every client keeps at least one train and one test
    sample. The training samples are in random order; groups of samples are divided class by class.
    """
    kept = _kept(len(dataset.samples), config.fraction, seed)
    owned = [kept[positions] for positions in assigned(dataset, kept, config, seed)]
    width = max(3, len(str(len(owned) - 1)))
    clients = tuple(f"c{row:0{width}d}" for row in range(len(owned)))
    sets: list[Sets] = []
    for client, share in zip(clients, owned, strict=True):
        if len(share) < 2:
            raise DataError(
                f"{dataset.name}: {len(share)} sample for client {client}, expected 2 or more; use fewer clients"
            )
        first, whole = units(dataset.samples.groups, share)
        if len(first) < 2:
            raise DataError(
                f"{dataset.name}: all {len(share)} samples of client {client} belong to one group (one recording), expected 2 groups or"
                " more, because no split cuts a group"
            )
        order = shuffled(seed, client, dataset.samples.y[share[first]], len(first) < len(share))
        train, validation, test = cut(order, config.test_fraction, config.validation_fraction)
        sets.append((share[whole(train)], share[whole(validation)], share[whole(test)]))
    return clients, sets


def shuffled(seed: int, client: str, labels: Labels, are_groups: bool) -> Indices:
    """Units with these labels in random order; groups of each class evenly from the first to the last: few leave no class untrained."""
    order = generator(seed, "partition", client=client).permutation(len(labels))
    if not are_groups:
        return order
    ranks = np.empty(len(order))
    for label in np.unique(labels):
        members = np.flatnonzero(labels[order] == label)
        ranks[members] = np.arange(1, len(members) + 1) / len(members)
    return order[np.argsort(ranks, kind="stable")]


def _limited(train: Indices, y: Labels, config: DataConfig) -> Indices:
    """The first `shots` training samples of each class, and of these the first `max_train`; 0: all."""
    if config.shots:
        few = [np.flatnonzero(y[train] == label)[: config.shots] for label in np.unique(y[train])]
        train = train[np.sort(np.concatenate(few))]
    return train[: config.max_train or None]


def cut(order: Indices, test_fraction: float, validation_fraction: float) -> Sets:
    """Divide two or more randomly ordered indices into (train, validation, test), with at least one for train and test."""
    tests = min(max(round(len(order) * test_fraction), 1), len(order) - 1)
    validations = min(round((len(order) - tests) * validation_fraction), len(order) - tests - 1)
    test, validation, train = np.split(order, [tests, tests + validations])
    return train, validation, test


def gaps(dataset: Dataset, split: Split) -> list[str]:
    """Describe the classes without any sample, and those that no client has training samples of; one line each."""
    classes = range(len(dataset.classes))
    exists = dataset.samples.counts(len(classes))
    trained = np.bincount(dataset.samples.y[np.concatenate(split.train)], minlength=len(classes))
    found = {
        "no samples": [dataset.classes[c] for c in classes if not exists[c]],
        "no training samples at any client": [
            dataset.classes[c] for c in classes if exists[c] and not trained[c]
        ],
    }
    return [
        f"{dataset.name}: {what} of {len(names)} of {len(classes)} classes: {shortened(names, 10)}"
        for what, names in found.items()
        if names
    ]


def described(dataset: Dataset, split: Split) -> str:
    """Samples per client and class, as text, then a line about classes that nothing can be learned of."""
    return "\n".join([histogram_text(dataset, split), *gaps(dataset, split)])


def histogram(dataset: Dataset, split: Split) -> Indices:
    """Samples per client and class, int64 [clients, classes]."""
    owned = zip(split.train, split.validation, split.test, strict=True)
    return np.stack(
        [
            np.bincount(dataset.samples.y[np.concatenate(parts)], minlength=len(dataset.classes))
            for parts in owned
        ]
    )


def histogram_text(dataset: Dataset, split: Split) -> str:
    """The histogram as text: counts for up to 12 classes, else a dot per class, larger for more samples."""
    counts = histogram(dataset, split)
    numbers = counts.shape[1] <= 12
    width = max(3, len(str(counts.max()))) + 1 if numbers else 1
    head = (
        "".join(f"{label:>{width}}" for label in range(counts.shape[1]))
        if numbers
        else f" 0..{counts.shape[1] - 1}"
    )
    lines = [f"{'class':<8}{head}   train  val  test"]
    for row, client in enumerate(split.clients):
        cells = "".join(
            f"{n or '.':>{width}}" if numbers else _dot(n, counts.max()) for n in counts[row].tolist()
        )
        sizes = f"{len(split.train[row]):8}{len(split.validation[row]):5}{len(split.test[row]):6}"
        lines.append(f"{client:<8}{cells if numbers else ' ' + cells}{sizes}")
    return "\n".join(lines)


def _dot(count: int, largest: int) -> str:
    return " " if not count else "·•●"[min(3 * count // (largest + 1), 2)]


def _rows(indices: Array, ends: Array) -> tuple[Indices, ...]:
    if (
        indices.dtype.kind != "i"
        or ends.dtype.kind != "i"
        or np.any(np.diff(ends, prepend=0) < 0)
        or ends[-1:].tolist() != [len(indices)]
    ):
        raise ValueError("indices and their ends do not fit together")
    return tuple(np.split(indices.astype(np.int64), ends[:-1]))


def _kept(samples: int, fraction: float, seed: int) -> Indices:
    if fraction == 1:
        return np.arange(samples)
    chosen = generator(seed, "partition", client="kept").permutation(samples)[
        : max(round(samples * fraction), 1)
    ]
    return np.sort(chosen)


def dirichlet(
    labels: Labels, clients: int, beta: float, seed: int, *, minimum: int = MINIMUM, tries: int = TRIES
) -> list[Indices]:
    """Draw each class's shares from Dir(beta * 1_N) over the clients (docs/methods.md G18, PFLlib's form). All samples are assigned.

    As in PFLlib, a client with more than the average gets nothing of the next class, and the draw is repeated until every client owns
    `minimum` samples (fewer if there are not enough). After `tries` draws the largest clients of the last draw give away single samples
    until the minimum is reached. Small beta: few classes per client; large beta: nearly IID.
    """
    _require(beta > 0, f"beta {beta}, expected a number above 0")
    _require_enough(len(labels), clients)
    minimum = min(minimum, len(labels) // clients)
    rng = generator(seed, "partition")
    for _ in range(tries):
        owned = _draw_dirichlet(labels, clients, beta, rng)
        if min(map(len, owned)) >= minimum:
            break
    return [np.sort(indices) for indices in _levelled(owned, minimum)]


def _draw_dirichlet(labels: Labels, clients: int, beta: float, rng: np.random.Generator) -> list[Indices]:
    owned: list[list[Indices]] = [[] for _ in range(clients)]
    sizes = np.zeros(clients, np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(clients, beta)) * (sizes < len(labels) / clients)
        if not np.isfinite(shares).all() or shares.sum() <= 0:
            # a tiny beta underflows; some client is below the average, so share there
            shares = (sizes < len(labels) / clients).astype(float)
        cuts = (np.cumsum(shares / shares.sum())[:-1] * len(members)).astype(np.int64)
        for client, part in enumerate(np.split(members, cuts)):
            owned[client].append(part)
            sizes[client] += len(part)
    return [np.concatenate(parts) for parts in owned]


def _levelled(owned: list[Indices], minimum: int) -> list[Indices]:
    owned = list(owned)
    while len(owned[poor := min(range(len(owned)), key=lambda c: len(owned[c]))]) < minimum:
        rich = max(range(len(owned)), key=lambda c: len(owned[c]))
        owned[poor], owned[rich] = np.append(owned[poor], owned[rich][-1]), owned[rich][:-1]
    return owned


def dirichlet_clients(labels: Labels, clients: int, beta: float, seed: int) -> list[Indices]:
    """Draw each client's class shares from Dir(beta * 1_C), in equal numbers of samples (docs/methods.md G18, FedCRC section IV-A).

    The clients take single samples in random order; of a class without samples left, a client takes another by its shares.
    """
    _require(beta > 0, f"beta {beta}, expected a number above 0")
    _require_enough(len(labels), clients)
    rng = generator(seed, "partition")
    classes, left = np.unique(labels, return_counts=True)
    pools = [rng.permutation(np.flatnonzero(labels == label)) for label in classes]
    shares = rng.dirichlet(np.full(len(classes), beta), size=clients) + 1e-12  # a tiny beta underflows
    owned: list[list[int]] = [[] for _ in range(clients)]
    for client, drawn in zip(
        rng.permutation(np.arange(len(labels)) % clients), rng.random(len(labels)), strict=True
    ):
        limits = np.cumsum(shares[client] * (left > 0))
        chosen = np.searchsorted(limits, drawn * limits[-1], side="right")
        left[chosen] -= 1
        owned[client].append(pools[chosen][left[chosen]])
    return [np.sort(np.array(indices, np.int64)) for indices in owned]


def pathological(labels: Labels, clients: int, classes_per_client: int, seed: int) -> list[Indices]:
    """Assign exactly `classes_per_client` classes to every client, in equal shares of each class (docs/methods.md G18, `pat(k)`).

    Classes are dealt from shuffled decks, so that all are held equally often (to within one), and all are used if
    clients * classes_per_client allows it. Samples of a class without owners are left out.
    """
    _require_enough(len(labels), clients)
    classes = np.unique(labels)
    _require(
        1 <= classes_per_client <= len(classes),
        f"{classes_per_client} classes per client, expected 1 to {len(classes)}, the classes that occur",
    )
    rng = generator(seed, "partition")
    holders: dict[int, list[int]] = {int(c): [] for c in classes}
    deck: deque[int] = deque()
    for client in range(clients):
        hand: set[int] = set()
        while len(hand) < classes_per_client:
            if not deck:
                deck.extend(rng.permutation(classes).tolist())
            card = next(c for c in deck if c not in hand)
            deck.remove(card)
            hand.add(card)
        for label in sorted(hand):
            holders[label].append(client)
    owned: list[list[Indices]] = [[] for _ in range(clients)]
    for label, held_by in holders.items():
        members = rng.permutation(np.flatnonzero(labels == label))
        _require(
            len(members) >= len(held_by),
            f"class {label} has {len(members)} samples for the {len(held_by)} clients that hold it",
        )
        for client, part in zip(held_by, np.array_split(members, max(len(held_by), 1)), strict=False):
            owned[client].append(part)
    return [np.sort(np.concatenate(parts)) for parts in owned]


def by_domain(domains: Indices, clients: int, seed: int) -> list[Indices]:
    """Assign one domain per client: client i gets a share of domain i mod D, so D clients own one whole domain each."""
    _require_enough(len(domains), clients)
    known = np.unique(domains)
    _require(
        clients >= len(known),
        f"{clients} clients, expected at least one for each of the {len(known)} domains",
    )
    rng = generator(seed, "partition")
    owned: list[Indices] = [np.empty(0, np.int64)] * clients
    for position, domain in enumerate(known):
        owners = range(position, clients, len(known))
        parts = np.array_split(rng.permutation(np.flatnonzero(domains == domain)), len(owners))
        for client, part in zip(owners, parts, strict=True):
            owned[client] = np.sort(part)
    return owned


def iid(labels: Labels, clients: int, seed: int) -> list[Indices]:
    """Assign samples at random in equal shares (to within one)."""
    _require_enough(len(labels), clients)
    order = generator(seed, "partition").permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, clients)]


def _require_enough(samples: int, clients: int) -> None:
    _require(clients >= 1, f"{clients} clients, expected at least 1")
    _require(samples >= clients, f"{samples} samples for {clients} clients, expected at least one each")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise DataError(f"partition: {message}")
