"""Screening of updates: compare the size and direction of each client's change with the cohort's, before aggregation.

Size: the L2 norm of a change relative to the cohort's median. Above `max_norm` the change is scaled down to it; OUTLIER times that, or NaN,
is an outlier.

Direction: changes of clients with different classes conflict, but a correct client has a few similar peers; with a flipped sign the similar
peers become opposite ones. The alignment of a client in a round is the mean of its PEERS largest cosines with other changes plus the mean
of its PEERS smallest. A client whose mean alignment over its last rounds is below -OPPOSITE is an outlier.

Only parameters with a broadcast counterpart of the same shape are compared. Screening trusts no single device, but it needs a majority of
correct ones, and it cannot recognise changes within the cohort's spread (Baruch et al., "A Little Is Enough", NeurIPS 2019). The constants
were chosen on honest and attacked fleets: docs/robustness.md.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from statistics import fmean, median

import torch
from torch import Tensor

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import BUFFER, Parts

DROPPED = 1 / 3
"""The outlier score from which on an update is dropped; at 1 its client is an outlier."""
OUTLIER = 6.0
MIN_COHORT = 3
"""Smallest cohort in which sizes are compared."""
PEERS = 2
OPPOSITE = 0.3
MIN_DIRECTIONS = 8
"""Smallest cohort in which directions are compared."""
LAST_ROUNDS = 5
"""The rounds over which a client's alignments are averaged."""
MAX_SCORE = 100.0
SKETCH = 4096
"""Dimensions of the random projection on which cosines are computed; their standard error is 1/sqrt(SKETCH) = 0.016."""


log = logging.getLogger(__name__)


class Screen:
    """Screens the updates of a run, round by round, with the whole round in memory.

    After a round `scores` maps each client to its outlier score: 0 typical, DROPPED and more not aggregated, 1 and more an outlier.
    `dropped` maps each client whose update was not used to the reason.
    """

    def __init__(self, max_norm: float) -> None:
        self._max_norm = max_norm
        self._alignments: dict[str, deque[float]] = {}
        self.scores: dict[str, float] = {}
        self.dropped: dict[str, str] = {}

    @property
    def outliers(self) -> dict[str, str]:
        """The clients of the last round with an outlier score of 1 or more, and the reasons."""
        return {client: why for client, why in self.dropped.items() if self.scores[client] >= 1}

    def round(self, updates: Iterable[Update], shared: Parts) -> Iterator[Update]:
        """One round's updates: oversized changes are scaled down, suspicious updates left out."""
        self.scores, self.dropped = {}, {}
        cohort = list(updates)
        norms: dict[str, float] = {}
        sketches: dict[str, Tensor] = {}
        for update in cohort:
            if (change := changes(update, shared)) is not None:
                norms[update.client] = norm = float(change.norm())
                if math.isfinite(norm):
                    sketches[update.client] = sketch(change)
        sizes = relative_sizes(norms)
        for client, alignment in alignments(sketches).items():
            self._alignments.setdefault(client, deque(maxlen=LAST_ROUNDS)).append(alignment)
        for update in cohort:
            size = sizes.get(update.client, 1.0)
            if self._score(update.client, size) < DROPPED:
                yield scaled(update, shared, self._max_norm / size) if size > self._max_norm else update

    def _score(self, client: str, size: float) -> float:
        limit, last = OUTLIER * self._max_norm, self._alignments.get(client, (0.0,))
        oversize = min(size / limit, MAX_SCORE) if size > self._max_norm else 0.0
        opposite = max(-fmean(last) / OPPOSITE, 0.0)
        self.scores[client] = score = max(oversize, opposite)
        if oversize >= DROPPED:
            self.dropped[client] = f"change of {size:.3g} times the cohort's median norm"
        elif opposite >= DROPPED:
            self.dropped[client] = (
                f"changes opposite to all others (mean alignment {fmean(last):.2f} over {len(last)} rounds)"
            )
        return score


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


def relative_sizes(norms: Mapping[str, float]) -> dict[str, float]:
    """Norms relative to their median; NaN counts as infinite, and all are 1 in a cohort that is too small to compare."""
    finite = [norm for norm in norms.values() if math.isfinite(norm)]
    middle = median(finite) if len(finite) >= MIN_COHORT else 0.0
    return {
        client: math.inf if not math.isfinite(norm) else norm / middle if middle else 1.0
        for client, norm in norms.items()
    }


def alignments(sketches: Mapping[str, Tensor]) -> dict[str, float]:
    """The alignment of each client's change with the others', -2 to 2; empty for a cohort that is too small."""
    if len(sketches) < MIN_DIRECTIONS:
        return {}
    directions = torch.nn.functional.normalize(torch.stack(list(sketches.values())), dim=1)
    cosines = directions @ directions.T
    others = ~torch.eye(len(sketches), dtype=torch.bool, device=cosines.device)
    ordered = cosines[others].view(len(sketches), -1).sort(1).values
    values = ordered[:, :PEERS].mean(1) + ordered[:, -PEERS:].mean(1)
    return dict(zip(sketches, values.tolist(), strict=True))


def changes(update: Update, shared: Parts) -> Tensor | None:
    """The change of an update against the broadcast, [P]: all comparable parameters, flat; None without any."""
    found = [
        (tensor - shared[name][key]).flatten().float()
        for name, params in update.parts.items()
        for key, tensor in params.items()
        if _comparable(shared.get(name, {}).get(key), key, tensor)
    ]
    return torch.cat(found) if found else None


def scaled(update: Update, shared: Parts, factor: float) -> Update:
    """The update with its comparable changes multiplied by `factor`."""
    parts = {
        name: {
            key: torch.lerp(before, tensor, factor)
            if (before := shared.get(name, {}).get(key)) is not None and _comparable(before, key, tensor)
            else tensor
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
