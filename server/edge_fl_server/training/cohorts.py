"""Cohort selection: which clients take part in a round. Drawn from the run's seed, so a resumed run selects the same clients."""

from collections.abc import Collection, Sequence
from math import floor

from edge_fl.errors import ConfigError
from edge_fl.methods.contract.method import Method
from edge_fl.seeds import generator
from edge_fl_server.recipes.recipe import CohortConfig, Recipe, Source


def goal(clients: int, cohort: CohortConfig, seed: int, round: int) -> int:
    """Number of updates that end a round without a buffer: max(floor(participation * N), 1) of N clients (docs/methods.md G12).

    With `participation_from` each round draws its share uniformly between that value and `participation`.
    """
    most = max(floor(cohort.participation * clients), 1)
    if not cohort.participation_from:
        return most
    least = min(max(floor(cohort.participation_from * clients), 1), most)
    return int(generator(seed, "cohort.size", round).integers(least, most, endpoint=True))


def trains_everyone_in(cohort: CohortConfig, round: int) -> bool:
    """Whether a method that trains everyone does so in this round: as often as a client is drawn on average, first in round 1."""
    share = cohort.mean_participation
    return round_up(round * share) > round_up((round - 1) * share)


def draw(
    clients: Sequence[str],
    cohort: CohortConfig,
    seed: int,
    round: int,
    *,
    may_drop_out: bool = False,
    at_work: Collection[str] = (),
) -> list[str]:
    """Draw as many clients as the goal, without replacement, ascending; `over_select` times as many if they may drop out.

    Clients `at_work` on earlier rounds count towards the number and are not drawn again.
    """
    spare = cohort.over_select if may_drop_out else 1.0
    idle = [client for client in clients if client not in at_work]
    wanted = round_up(goal(len(clients), cohort, seed, round) * spare) - (len(clients) - len(idle))
    if wanted >= len(idle):
        return sorted(idle)
    picked = generator(seed, "cohort", round).choice(len(idle), size=max(wanted, 0), replace=False)
    return sorted(idle[i] for i in picked)


def quorum(goal: int, cohort: CohortConfig) -> int:
    """Minimum number of updates of a round."""
    return max(round_up(goal * cohort.quorum), 1)


def require_bufferable(cohort: CohortConfig, method: Method, source: Source) -> None:
    """Raise ConfigError if asynchronous aggregation is configured for a method or source that does not support it."""
    if not cohort.buffer_size:
        return
    setting = f"cohort.buffer_size = {cohort.buffer_size}"
    if not method.averages():
        raise ConfigError(
            f"{setting}: {method.title} sends more than networks that all clients start from alike, so that late updates cannot be"
            " moved to newer ones; expected buffer_size = 0, or a method that averages, such as fedavg"
        )
    if source == "hybrid":
        raise ConfigError(
            f"{setting}: source hybrid, expected simulated or fleet (simulated clients are late in a time of their own)"
        )


def require_simulable(recipe: Recipe) -> None:
    """Raise ConfigError for drop-out and slow clients that the run cannot simulate, and for a selection of clients that are no devices."""
    cohort, fleet = recipe.cohort, recipe.source in ("fleet", "none")
    if cohort.where and recipe.source not in ("fleet", "hybrid"):
        raise ConfigError(
            f"cohort.where = {cohort.where!r}: source {recipe.source}, expected fleet or hybrid"
        )
    conditions = {
        "drop_out": (fleet or cohort.buffer_size > 0, "simulated clients, and buffer_size = 0"),
        "slow_training": (
            fleet or recipe.method.epochs < 2,
            "simulated clients, and 2 or more method.epochs",
        ),
        "slow_sending": (fleet or not cohort.buffer_size, "simulated clients, and buffer_size > 0"),
    }
    for name, (impossible, expected) in conditions.items():
        if (share := getattr(cohort, name)) and impossible:
            raise ConfigError(f"cohort.{name} = {share:g}: expected {expected}")


def round_up(value: float) -> int:
    """Ceiling of `value`, tolerant of floating-point rounding errors."""
    return -int(-(value - 1e-9) // 1)
