"""The verdict of the round gate on one round, as it is recorded with the round."""

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
        fell = f"accuracy {100 * self.change:+.0f} points ({self.lost} images lost, {self.gained} gained of {self.images}"
        fell += f" on {self.clients} devices; {-100 * self.margin:.0f} would count)"
        match self.outcome:
            case "repaired":
                return f"{fell}; aggregated without {', '.join(self.without)}"
            case "dropped":
                return f"{fell}; dropped, the shared parts before stay"
            case "forced":
                return f"{fell}; accepted all the same after {MOST_DROPPED} dropped rounds"
        return fell


def dropped_last(verdicts: Sequence[RoundVerdict | None]) -> int:
    """How many of the last rounds in a row were dropped."""
    count = 0
    while count < len(verdicts) and (verdict := verdicts[-1 - count]) and verdict.outcome == "dropped":
        count += 1
    return count
