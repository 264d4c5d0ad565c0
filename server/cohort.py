"""The cohort of a round: who is asked to take part, drawn from the run's seed so that a resumed run asks the same clients."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from edge_fl.config import CohortConfig
from edge_fl.seeds import generator


def draw(clients: Sequence[str], cohort: CohortConfig, seed: int, round: int) -> list[str]:
    """max(floor(participation * N), 1) clients without replacement, times `over_select`, ascending (METHODS.md G12).

    With `participation_from` the number is drawn anew for every round, from that share to `participation`.
    """
    wanted = max(floor(cohort.participation * len(clients)), 1)
    if cohort.participation_from:
        least = min(max(floor(cohort.participation_from * len(clients)), 1), wanted)
        wanted = int(generator(seed, "cohort.size", round).integers(least, wanted, endpoint=True))
    asked = min(len(clients), round_up(wanted * cohort.over_select))
    if asked == len(clients):
        return sorted(clients)
    picked = generator(seed, "cohort", round).choice(len(clients), size=asked, replace=False)
    return sorted(clients[i] for i in picked)


def quorum(size: int, cohort: CohortConfig) -> int:
    """How many updates a round of `size` clients needs at least."""
    return max(round_up(size * cohort.quorum), 1)


def round_up(value: float) -> int:
    """The smallest whole number that is not below `value`, forgiving rounding errors of floats."""
    return -int(-(value - 1e-9) // 1)
