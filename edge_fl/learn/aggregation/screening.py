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

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from statistics import fmean, median

import torch
from torch import Tensor

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import BUFFER, Parts

SUSPICIOUS = 0.8
"""The outlier score from which on an update is dropped."""
OUTLIER = 3.0
FIRST = 8
"""Updates held back until their median norm is known; a smaller cohort is held back whole."""
MIN_COHORT = 3
"""Smallest cohort in which sizes are compared."""
PEERS = 2
OPPOSITE = 0.25
LAST_ROUNDS, MIN_ROUNDS = 5, 2
"""The rounds over which alignments are averaged; with fewer than MIN_ROUNDS the direction of a client is unknown."""
MAX_SCORE = 100.0
SKETCH = 4096
"""Dimensions of the random projection on which cosines are computed; their standard error is 1/sqrt(SKETCH) = 0.016."""


class Screen:
    """Screens the updates of a run, round by round.

    After a round `scores` maps each client to its outlier score: 0 typical, SUSPICIOUS and more dropped, 1 and more an outlier. `outliers`
    maps each outlier to the reason.
    """

    def __init__(self, max_norm: float) -> None:
        self._max_norm = max_norm
        self._alignments: dict[str, deque[float]] = {}
        self.scores: dict[str, float] = {}
        self.outliers: dict[str, str] = {}

    def round(self, updates: Iterable[Update], shared: Parts) -> Iterator[Update]:
        """One round's updates without outliers and with oversized changes scaled down. Streams after the first FIRST updates."""
        self.scores, self.outliers = {}, {}
        norms: list[float] = []  # ascending
        sketches: dict[str, Tensor] = {}

        def measured() -> Iterator[tuple[Update, float | None]]:
            for update in updates:
                change = changes(update, shared)
                norm = None if change is None else float(change.norm())
                if change is not None and norm is not None and math.isfinite(norm):
                    insort(norms, norm)
                    sketches[update.client] = sketch(change)
                yield update, norm

        stream = measured()
        for update, norm in chain(list(islice(stream, FIRST)), stream):
            size = 1.0 if norm is None else relative_size(norm, norms)
            if self._score(update.client, size) < SUSPICIOUS:
                yield scaled(update, shared, self._max_norm / size) if size > self._max_norm else update
        self._compare_directions(sketches)

    def _score(self, client: str, size: float) -> float:
        limit, alignment = OUTLIER * self._max_norm, self._mean_alignment(client)
        oversize = min(size / limit, MAX_SCORE) if size > self._max_norm else 0.0
        opposite = max(-alignment / OPPOSITE, 0.0)
        self.scores[client] = score = max(oversize, opposite)
        if oversize >= 1:
            self.outliers[client] = (
                f"change of {size:.3g} times the cohort's median norm, expected less than {limit:g}"
            )
        elif opposite >= 1:
            rounds = len(self._alignments[client])
            self.outliers[client] = (
                f"changes opposite to all others: mean alignment {alignment:.2f} over {rounds} rounds,"
                f" expected more than -{OPPOSITE:g}"
            )
        return score

    def _mean_alignment(self, client: str) -> float:
        last = self._alignments.get(client, ())
        return fmean(last) if len(last) >= MIN_ROUNDS else 0.0

    def _compare_directions(self, sketches: Mapping[str, Tensor]) -> None:
        if len(sketches) < 2 * PEERS + 2:
            return
        directions = torch.nn.functional.normalize(torch.stack(list(sketches.values())), dim=1)
        cosines = directions @ directions.T
        others = ~torch.eye(len(sketches), dtype=torch.bool, device=cosines.device)
        ordered = cosines[others].view(len(sketches), -1).sort(1).values
        alignments = ordered[:, :PEERS].mean(1) + ordered[:, -PEERS:].mean(1)
        for client, alignment in zip(sketches, alignments.tolist(), strict=True):
            self._alignments.setdefault(client, deque(maxlen=LAST_ROUNDS)).append(alignment)


def relative_size(norm: float, norms: Sequence[float]) -> float:
    """A norm relative to the median of the cohort's; 1 in a cohort that is too small to compare, infinite for NaN."""
    if not math.isfinite(norm):
        return math.inf
    middle = median(norms) if len(norms) >= MIN_COHORT else norm
    return norm / middle if middle else 1.0


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
