"""Directions of changes: which changes are copies of each other, opposite to all others, or unrelated to all of them.

Correct devices with different classes conflict, but each has a few similar peers. With a flipped sign the similar peers become opposite
ones. The alignment of a device is the mean of its PEERS largest cosines with the others' changes plus the mean of its PEERS smallest; the
device with the worst alignment is compared first, then the others without it. A change that is unrelated to all others is noise: cosines of
changes that were trained differ from 0 in both directions.

Two trained changes are never the same, so that copies are made by colluders, or by devices with the same pictures. Copies in a minority are
outliers; where most of a cohort are copies (a trial with one folder of pictures), they count once.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch
from torch import Tensor

MIN_DIRECTIONS = 8
"""Smallest cohort in which directions are compared."""
PEERS = 2
OPPOSITE = 0.3
"""Alignment, negative, of an outlier."""
ALIKE = 0.15
"""Median alignment of a cohort above which its directions are compared: where all conflict, one more conflict says nothing."""
UNRELATED = 0.3
"""Root mean square of a change's cosines, relative to the cohort's median, below which it is unrelated to all others."""
UNRELATED_ROUNDS = 2
"""Rounds from which on a change is called unrelated."""
LAST_ROUNDS = 5
"""The rounds over which a device's directions are averaged."""
SAME, SAME_OF_USUAL = 0.05, 0.2
"""Distance of two changes of length 1 below which they are copies; the second one relative to the median distance of nearest ones."""

Finding = tuple[float, str]  # outlier score, reason


@dataclass(frozen=True)
class _Direction:
    """One round of one device: alignment, median cosine, and root mean square of all but the largest cosines."""

    alignment: float
    middle: float
    spread: float


class Directions:
    """The directions of a run's devices over its last rounds."""

    def __init__(self) -> None:
        self._last: dict[str, deque[_Direction]] = {}

    def middle(self, client: str) -> float:
        """The mean over rounds of the median cosine with the others' changes; 0 without any."""
        last = self._last.get(client)
        return fmean(one.middle for one in last) if last else 0.0

    def findings(
        self, sketches: Mapping[str, Tensor], outliers: Collection[str], noise: float
    ) -> dict[str, Finding]:
        """Findings on the changes of a round; empty for a cohort below MIN_DIRECTIONS.

        `outliers` are left out. `noise`: standard error of a cosine of two sketches.
        """
        clients = list(sketches)
        if len(clients) < MIN_DIRECTIONS:
            return {}
        units = _units(sketches.values())
        cosines, copies = units @ units.T, _copies(units)
        left = [row for row, client in enumerate(clients) if client not in outliers]
        for client in clients:
            self._last.setdefault(client, deque(maxlen=LAST_ROUNDS)).append(_Direction(0.0, 0.0, 1.0))
        findings: dict[str, Finding] = {}
        while len(left) >= MIN_DIRECTIONS:
            for row in left:
                self._last[clients[row]][-1] = _direction(row, left, cosines, copies)
            found = self._of_clients([clients[row] for row in left], noise)
            worst = max(left, key=lambda row: found[clients[row]][0])
            findings |= found
            if found[clients[worst]][0] < 1 / 3:
                break
            left.remove(worst)
        return findings

    def _of_clients(self, clients: Sequence[str], noise: float) -> dict[str, Finding]:
        now = [self._last[client][-1] for client in clients]
        comparable = median(one.alignment for one in now) > ALIKE
        usual = median(one.spread for one in now)
        found: dict[str, Finding] = {}
        for client in clients:
            last = self._last[client]
            alignment, spread = fmean(one.alignment for one in last), fmean(one.spread for one in last)
            over = f"over {len(last)} rounds"
            found[client] = (
                max(-alignment / OPPOSITE, 0.0) if comparable else 0.0,
                (f"changes opposite to all others (mean alignment {alignment:.2f} {over})"),
            )
            if len(last) >= UNRELATED_ROUNDS and spread < UNRELATED * usual and usual > 5 * noise:
                found[client] = (
                    1.0,
                    f"changes unrelated to all others (cosines of {spread:.3f}, usual {usual:.2f}, {over})",
                )
        return found


def copied(sketches: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The other devices that sent the same change, by device that has such."""
    clients = list(sketches)
    if len(clients) < 2:
        return {}
    copies = _copies(_units(sketches.values()))
    return {
        client: [clients[other] for other in copies[row].nonzero()[:, 0].tolist() if other != row]
        for row, client in enumerate(clients)
        if int(copies[row].sum()) > 1
    }


def _units(changes: Iterable[Tensor]) -> Tensor:
    return torch.nn.functional.normalize(torch.stack(list(changes)), dim=1)


def _copies(units: Tensor) -> Tensor:
    """Which changes are the same, [K, K]; each is the same as itself."""
    distances = torch.cdist(units, units)
    itself = torch.eye(len(units), dtype=torch.bool, device=units.device)
    usual = float(distances.masked_fill(itself, math.inf).min(1).values.median())
    return (distances < min(SAME, max(SAME_OF_USUAL * usual, 1e-3))) | itself


def _direction(row: int, rows: Sequence[int], cosines: Tensor, copies: Tensor) -> _Direction:
    peers = sorted(float(cosines[row, other]) for other in rows if not copies[row, other])
    if len(peers) < 2 * PEERS:
        return _Direction(0.0, 0.0, 1.0)
    most = peers[: len(peers) - max(len(peers) // 5, 1)]  # colluders are similar to each other
    spread = math.sqrt(fmean(cosine * cosine for cosine in most))
    return _Direction(fmean(peers[:PEERS]) + fmean(peers[-PEERS:]), median(peers), spread)
