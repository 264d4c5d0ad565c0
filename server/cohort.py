"""The cohort of a round: who is asked to take part, drawn from the run's seed so that a resumed run asks the same clients."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from edge_fl.config import CohortConfig
from edge_fl.seeds import generator


def goal(clients: int, cohort: CohortConfig, seed: int, round: int) -> int:
    """How many updates end a round: max(floor(participation * N), 1) of N clients (METHODS.md G12).

    With `participation_from` the number is drawn anew for every round, from that share to `participation`.
    """
    most = max(floor(cohort.participation * clients), 1)
    if not cohort.participation_from:
        return most
    least = min(max(floor(cohort.participation_from * clients), 1), most)
    return int(generator(seed, "cohort.size", round).integers(least, most, endpoint=True))


def draw(clients: Sequence[str], cohort: CohortConfig, seed: int, round: int) -> list[str]:
    """As many clients as the goal, times `over_select`, without replacement, ascending."""
    asked = min(len(clients), round_up(goal(len(clients), cohort, seed, round) * cohort.over_select))
    if asked == len(clients):
        return sorted(clients)
    picked = generator(seed, "cohort", round).choice(len(clients), size=asked, replace=False)
    return sorted(clients[i] for i in picked)


def quorum(goal: int, cohort: CohortConfig) -> int:
    """How many updates a round needs at least."""
    return max(round_up(goal * cohort.quorum), 1)


def round_up(value: float) -> int:
    """The smallest whole number that is not below `value`, forgiving rounding errors of floats."""
    return -int(-(value - 1e-9) // 1)
