"""Partition rules: assign a dataset's samples to clients, with a seed.

A rule takes labels (or domains) and returns one ascending index array per client; the arrays are disjoint. Applied by
`edge_fl.data.partition`.
"""

from collections import deque

import numpy as np

from edge_fl.data.samples import Indices, Labels
from edge_fl.errors import DataError
from edge_fl.seeds import generator

MINIMUM = 10
TRIES = 100


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
