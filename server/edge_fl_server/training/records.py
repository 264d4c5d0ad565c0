"""What is recorded of a run's training, light to import: the round gate's verdict on a round, and why "auto" chose an engine."""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

MOST_DROPPED = 3
"""Rounds dropped in a row after which the next one counts whatever the panel says."""
Outcome = Literal["accepted", "repaired", "dropped", "forced"]


class RoundVerdict(Struct, frozen=True, forbid_unknown_fields=True):
    """The verdict on a round.

    `change` is the trimmed mean of the clients' changes of accuracy for the round as it was, `margin` the fall that is accepted. `clients`,
    `images`, `lost` and `gained` count those that decided. `without` are the clients whose updates were left out, `named` the outlier
    scores of those among them that made it worse. `comparisons` counts all that were made and `bytes_down` what was sent for them.
    """

    outcome: Outcome
    change: float = 0.0
    margin: float = 0.0
    clients: int = 0
    images: int = 0
    lost: int = 0
    gained: int = 0
    without: tuple[str, ...] = ()
    named: Mapping[str, float] = {}
    comparisons: int = 0
    bytes_down: int = 0

    def __str__(self) -> str:
        fell = f"accuracy {100 * self.change:+.0f} points ({self.lost} samples lost, {self.gained} gained of {self.images}"
        fell += f" on {self.clients} devices; {-100 * self.margin:.0f} would count)"
        match self.outcome:
            case "repaired":
                return f"{fell}; aggregated without {', '.join(self.without)}"
            case "dropped":
                return f"{fell}; dropped, the shared parts before stay"
            case "forced":
                return f"{fell}; accepted all the same after {MOST_DROPPED} dropped rounds"
        return fell


class RoundFigures(Struct, frozen=True, kw_only=True):
    """What is known of a round besides its model and its metrics. Clients are named by their ids.

    `selected` are the clients whose update could count, those still working on an earlier round included; `responded` those whose update
    arrived in time, `staleness` maps late ones to the age of their update in rounds. `head_updates` are the head-only devices that
    contributed, `budget_exhausted` the clients without privacy budget. `verdict` is that of the round gate, None if the round was not
    compared. `bytes_down` and `bytes_up` count tensors, not framing.
    """

    round: int
    selected: tuple[str, ...] = ()
    responded: tuple[str, ...] = ()
    head_updates: tuple[str, ...] = ()
    attempts: int = 1
    staleness: Mapping[str, int] = {}
    budget_exhausted: tuple[str, ...] = ()
    verdict: RoundVerdict | None = None
    bytes_down: int = 0
    bytes_up: int = 0


def dropped_last(verdicts: Sequence[RoundVerdict | None]) -> int:
    """How many of the last rounds in a row were dropped."""
    count = 0
    while count < len(verdicts) and (verdict := verdicts[-1 - count]) and verdict.outcome == "dropped":
        count += 1
    return count


class EngineTiming(Struct, frozen=True):
    """The engine that "auto" chose, and the measurements behind the choice.

    `seconds`: expected duration of a round by measured engine; `left_out`: the others, with the reason; `reason`: why nothing was measured.
    `cores` are those available, `threads` those of each process, `load` is the load average before.
    """

    engine: str
    cores: int
    threads: int
    load: float
    reason: str = ""
    seconds: dict[str, float] = {}
    left_out: dict[str, str] = {}

    def __str__(self) -> str:
        """The choice in words: "pool (1.05 s per round; sequential 2.1 s; ...)"."""
        found = [self.reason] if self.reason else []
        if self.engine in self.seconds:
            found.append(f"{_seconds(self.seconds[self.engine])} per round")
        others = sorted((s, name) for name, s in self.seconds.items() if name != self.engine)
        found += [f"{name} {_seconds(seconds)}" for seconds, name in others]
        found += [f"{name} not measured: {why}" for name, why in self.left_out.items()]
        found.append(f"{self.cores} cores, threads per process: {self.threads}, load average {self.load:.1f}")
        return f"{self.engine} ({'; '.join(found)})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:.0f} s"
