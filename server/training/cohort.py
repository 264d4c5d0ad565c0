"""The cohort of a round: who is asked to take part, drawn from the run's seed so that a resumed run asks the same clients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import floor

from edge_fl.config import CohortConfig, Source
from edge_fl.errors import ConfigError
from edge_fl.methods.contract.method import Method
from edge_fl.seeds import generator


def goal(clients: int, cohort: CohortConfig, seed: int, round: int) -> int:
    """How many updates end a round without a buffer: max(floor(participation * N), 1) of N clients (METHODS.md G12).

    With `participation_from` the number is drawn anew for every round, from that share to `participation`.
    """
    most = max(floor(cohort.participation * clients), 1)
    if not cohort.participation_from:
        return most
    least = min(max(floor(cohort.participation_from * clients), 1), most)
    return int(generator(seed, "cohort.size", round).integers(least, most, endpoint=True))


def draw(
    clients: Sequence[str],
    cohort: CohortConfig,
    seed: int,
    round: int,
    *,
    may_drop_out: bool = False,
    at_work: Collection[str] = (),
) -> list[str]:
    """As many clients as the goal, without replacement, ascending; `over_select` times as many where they may drop out.

    Those `at_work` on earlier rounds are among them already, and only the rest is drawn.
    """
    spare = cohort.over_select if may_drop_out else 1.0
    idle = [client for client in clients if client not in at_work]
    wanted = round_up(goal(len(clients), cohort, seed, round) * spare) - (len(clients) - len(idle))
    if wanted >= len(idle):
        return sorted(idle)
    picked = generator(seed, "cohort", round).choice(len(idle), size=max(wanted, 0), replace=False)
    return sorted(idle[i] for i in picked)


def quorum(goal: int, cohort: CohortConfig) -> int:
    """How many updates a round needs at least."""
    return max(round_up(goal * cohort.quorum), 1)


def require_bufferable(cohort: CohortConfig, method: Method, source: Source) -> None:
    """Raises ConfigError where updates of earlier rounds are asked for that could not be joined."""
    if not cohort.buffer_size:
        return
    asked = f"cohort.buffer_size = {cohort.buffer_size}"
    if not method.averages():
        raise ConfigError(
            f"{asked}: {method.title} sends more than networks that all clients start from alike, so that late updates cannot be"
            " moved to newer ones; expected buffer_size = 0, or a method that averages, such as fedavg"
        )
    if source == "hybrid":
        raise ConfigError(
            f"{asked}: source hybrid, expected simulated or fleet (simulated clients are late in a time of their own)"
        )


def round_up(value: float) -> int:
    """The smallest whole number that is not below `value`, forgiving rounding errors of floats."""
    return -int(-(value - 1e-9) // 1)
