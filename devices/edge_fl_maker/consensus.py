"""One state out of many predictions: a class that k of the last n agree on."""

from __future__ import annotations

from collections import Counter, deque

from edge_fl.errors import InputError
from edge_fl.untrusted import whole

MOST = 10_000
EXPECTED = "expected K/N, such as 3/5: K of the last N predictions, K at least 1"


class Consensus:
    """The `state` that `agree` of the last `of` predictions have, and more of them than any other one, for at least `for_s` seconds.

    A state stays until another one wins. Votes before a change count no more, so two changes are at least `agree` predictions apart.
    `flips` counts the changes from one state to another.
    """

    def __init__(self, agree: int, of: int, for_s: float = 0.0) -> None:
        self.state: str | None = None
        self.flips = 0
        self._agree, self._for_s = agree, for_s
        self._votes: deque[str | None] = deque(maxlen=of)
        self._leader: tuple[str | None, float] = None, 0.0

    @classmethod
    def parsed(cls, given: str, for_s: float) -> Consensus:
        """Read K/N. Raises InputError."""
        agree, of = (whole(part, MOST) or 0 for part in (*given.split("/", 1), "")[:2])
        if not 0 < agree <= of:
            raise InputError(f"--consensus {given}: {EXPECTED}")
        return cls(agree, of, for_s)

    def add(self, label: str | None, now_s: float) -> bool:
        """Count a prediction, None if it was not answered; return whether the state is another one now."""
        self._votes.append(label)
        counts = Counter(vote for vote in self._votes if vote is not None).most_common(2)
        (first, votes), (_, next_votes) = (*counts, ("", 0), ("", 0))[:2]
        if not self._agree <= votes > next_votes or first == self.state:
            self._leader = None, 0.0
            return False
        if self._leader[0] != first:
            self._leader = first, now_s
        if now_s - self._leader[1] < self._for_s:
            return False
        self.flips += self.state is not None
        self.state, self._leader = first, (None, 0.0)
        self._votes.clear()
        return True
