"""Screening of updates before aggregation: what a device sends is compared with the cohort, and with what it sent before.

    sizes       each tensor on its own scale, and the whole change to networks (`edge_fl.learn.aggregation.sizes`)
    history     how changes respond to the model (`edge_fl.learn.aggregation.history`)
    directions  copies, changes opposite to all others, changes unrelated to all others (`edge_fl.learn.aggregation.directions`)

Oversized changes are reduced, suspicious updates left out. Sizes are compared in cohorts of 3 and more, directions from 8 on; the history
of a device says something in any cohort. Screening trusts no single device, but it needs a majority of correct ones, and it cannot
recognise changes within the cohort's spread (Baruch et al., "A Little Is Enough", NeurIPS 2019). The constants were chosen on honest and
attacked fleets: docs/robustness.md.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from statistics import median

import torch
from torch import Tensor

from edge_fl.learn.aggregation.directions import Directions, Finding, copied
from edge_fl.learn.aggregation.history import History
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.aggregation.sizes import FALL, MIN_COHORT, OUTLIER, Sizes
from edge_fl.learn.tree import BUFFER, Parts

DROPPED = 1 / 3
"""The outlier score from which on an update is dropped; at 1 its client is an outlier."""
MAX_SCORE = 100.0
SKETCH = 4096
"""Dimensions of the random projection on which cosines are computed; their standard error is 1/sqrt(SKETCH) = 0.016."""

log = logging.getLogger(__name__)

Broadcast = Callable[[Parts, str], Parts]


class Screen:
    """Screens the updates of a run, round by round, with the whole round in memory.

    `networks`: the names of parts that are networks; other parts (class means, statistics) are compared in size only. `broadcast`: (shared
    parts, client) -> what that client received. After a round `scores` maps each client to its outlier score: 0 typical, DROPPED and more
    not aggregated, 1 and more an outlier. `dropped` maps each client whose update was not used to the reason.
    """

    def __init__(
        self,
        max_norm: float,
        networks: Collection[str],
        broadcast: Broadcast = lambda shared, client: shared,
    ) -> None:
        self._max_norm, self._networks, self._broadcast = max_norm, networks, broadcast
        self._sizes, self._history, self._directions = Sizes(max_norm, networks), History(), Directions()
        self._usual = 0.0  # median norm of a change
        self.scores: dict[str, float] = {}
        self.dropped: dict[str, str] = {}

    @property
    def outliers(self) -> dict[str, str]:
        """The clients of the last round with an outlier score of 1 or more, and the reasons."""
        return {client: why for client, why in self.dropped.items() if self.scores[client] >= 1}

    def round(self, updates: Iterable[Update], shared: Parts) -> Iterator[Update]:
        """One round's updates: oversized changes are reduced, suspicious updates left out."""
        cohort, received = self._received(updates, shared)
        norms, sketches = {}, {}
        for update in cohort:
            if (change := changes(update, received[update.client], self._networks)) is not None:
                norms[update.client] = norm = float(change.norm())
                if 0 < norm < math.inf:
                    sketches[update.client] = sketch(change)
                    start = values(update, received[update.client], self._networks)
                    self._history.add(update.client, sketch(start), sketches[update.client])
        kept = self._sized(cohort, received, norms)
        copies = copied(sketches)
        for client, others in copies.items():
            if 2 * (len(others) + 1) < len(sketches):
                self._note(client, (1.0, f"the same change as that of {others[0]}"))
        for client, finding in self._directions.findings(sketches, self.outliers, SKETCH**-0.5).items():
            self._note(client, finding)
        opposition = {client: self._directions.middle(client) for client in sketches}
        outliers = self.outliers
        for client, finding in self._history.findings(opposition).items():
            if client not in outliers:
                self._note(client, finding)
        for update in kept:
            if update.client in self.dropped:
                continue
            if update.client in sketches:
                self._history.use(update.client)
            same = 1 + len(copies.get(update.client, ()))
            once = 1 < same < len(sketches)
            yield replace(update, samples=max(round(update.samples / same), 1)) if once else update

    def final(self, updates: Iterable[Update], shared: Parts) -> Iterator[Update]:
        """The updates of final personalisation, which have no earlier ones to compare with: sizes alone count."""
        updates = list(updates)
        cohort, received = self._received((update for update in updates if update.parts), shared)
        norms = {
            update.client: float(change.norm())
            for update in cohort
            if (change := changes(update, received[update.client], self._networks)) is not None
        }
        reduced = {update.client: update for update in self._sized(cohort, received, norms)}
        for update in updates:
            if update.client not in self.dropped:
                yield reduced.get(update.client, update)

    def _received(self, updates: Iterable[Update], shared: Parts) -> tuple[list[Update], dict[str, Parts]]:
        """Begin a cohort -> its updates, and what each of their clients received."""
        cohort = list(updates)
        self.scores, self.dropped = {update.client: 0.0 for update in cohort}, {}
        return cohort, {update.client: self._broadcast(shared, update.client) for update in cohort}

    def _sized(
        self, cohort: list[Update], received: Mapping[str, Parts], norms: Mapping[str, float]
    ) -> list[Update]:
        """Compare sizes -> the updates with oversized changes reduced. `norms`: of the changes to networks."""
        oversized = self._sizes.compare(cohort, received)
        for client, (score, size, (part, key)) in oversized.worst.items():
            self._note(client, (score, f"{part}/{key} deviates {size:.3g} times as much as the cohort's"))
        relative = self._relative_sizes(norms)
        for client, size in relative.items():
            score = size / (OUTLIER * self._max_norm) if size > self._max_norm else 0.0
            self._note(client, (score, f"change of {size:.3g} times the cohort's median norm"))
        kept = []
        for update in cohort:
            reduced, size = oversized.without(update), relative.get(update.client, 1.0)
            if size > self._max_norm:
                reduced = scaled(reduced, received[update.client], self._max_norm / size, self._networks)
            kept.append(reduced)
        return kept

    def _relative_sizes(self, norms: Mapping[str, float]) -> dict[str, float]:
        """Norms relative to their median; NaN counts as infinite, and all are 1 in a cohort that is too small to compare."""
        finite = [norm for norm in norms.values() if math.isfinite(norm)]
        if len(finite) >= MIN_COHORT:
            self._usual = max(median(finite), FALL * self._usual)
        usual = self._usual if len(finite) >= MIN_COHORT else 0.0
        return {
            client: math.inf if not math.isfinite(norm) else norm / usual if usual else 1.0
            for client, norm in norms.items()
        }

    def _note(self, client: str, finding: Finding) -> None:
        """Note a client's worst score, and why its update is dropped."""
        score, why = finding
        score = MAX_SCORE if math.isnan(score) else min(score, MAX_SCORE)
        if score > self.scores[client]:
            self.scores[client] = score
            if score >= DROPPED:
                self.dropped[client] = why


def with_bounded_weight(updates: Iterable[Update], place: tuple[str, str], most: float) -> Iterator[Update]:
    """The updates with their own weight, the scalar at `place` (part, tensor), at most `most` times the cohort's median."""
    part, key = place
    cohort = list(updates)
    stated = {u.client: float(u.parts[part][key]) for u in cohort if part in u.parts}
    limit = most * median(stated.values()) if stated else 0.0
    for update in cohort:
        if (weight := stated.get(update.client, 0.0)) > limit:
            text = "%s: the weight %.3g that it states itself counts as %.3g (validation.max_weight)"
            log.warning(text, update.client, weight, limit, extra={"device": update.client})
            bounded = torch.full_like(update.parts[part][key], limit)
            parts = {**update.parts, part: {**update.parts[part], key: bounded}}
            update = replace(update, parts=parts)
        yield update


def changes(update: Update, received: Parts, networks: Collection[str]) -> Tensor | None:
    """The change of an update against what its client received, [P]: all parameters of networks, flat; None without any."""
    found = [
        (update.parts[name][key] - received[name][key]).flatten().float()
        for name, key in _compared(update, received, networks)
    ]
    return torch.cat(found) if found else None


def values(update: Update, received: Parts, networks: Collection[str]) -> Tensor:
    """The parameters that a client received where `changes` compares them, [P]."""
    return torch.cat([received[n][k].flatten().float() for n, k in _compared(update, received, networks)])


def _compared(update: Update, received: Parts, networks: Collection[str]) -> list[tuple[str, str]]:
    return [
        (name, key)
        for name, params in update.parts.items()
        for key, tensor in params.items()
        if name in networks and _comparable(received.get(name, {}).get(key), key, tensor)
    ]


def scaled(update: Update, received: Parts, factor: float, networks: Collection[str]) -> Update:
    """The update with the changes of its networks multiplied by `factor`."""
    compared = set(_compared(update, received, networks))
    parts = {
        name: {
            key: torch.lerp(received[name][key], tensor, factor) if (name, key) in compared else tensor
            for key, tensor in params.items()
        }
        for name, params in update.parts.items()
    }
    return replace(update, parts=parts)


def sketch(change: Tensor) -> Tensor:
    """A random projection of a change, [P] -> [SKETCH], that preserves cosines: sums of elements with random signs."""
    if len(change) <= SKETCH:
        return torch.nn.functional.pad(change, (0, SKETCH - len(change)))
    signed = change * _signs(len(change), str(change.device))
    return torch.nn.functional.pad(signed, (0, -len(change) % SKETCH)).view(-1, SKETCH).sum(0)


@lru_cache(maxsize=2)
def _signs(length: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(0, 2, (length,), generator=generator, dtype=torch.int8) * 2 - 1).to(device)


def _comparable(before: Tensor | None, key: str, tensor: Tensor) -> bool:
    return (
        before is not None
        and tensor.is_floating_point()
        and before.shape == tensor.shape
        and not key.startswith(BUFFER)
    )
