"""One state out of many predictions: a class that K of the last N agree on."""

from __future__ import annotations

import re
from collections import Counter, deque

from edge_fl.errors import InputError


class Consensus:
    """The `state` that K of the last N predictions have, more than any other one, for at least `for_s` seconds; `given` as "K/N".

    It stays until another one wins. Votes from before a change do not count, so changes, `flips`, are at least K predictions apart.
    """

    def __init__(self, given: str, for_s: float = 0.0) -> None:
        found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", given)
        self._least, most = map(int, found.groups()) if found else (0, 0)
        if not 0 < self._least <= most:
            raise InputError(f"consensus {given[:100]!r}: expected K/N, such as 3/5, with K from 1 to N")
        self.state: str | None = None
        self.flips, self._for_s = 0, for_s
        self._votes, self._winner = deque[str | None](maxlen=most), ("", 0.0)

    def add(self, label: str | None, now_s: float) -> bool:
        """Count a prediction, None if it was not answered; return whether the state has changed."""
        self._votes.append(label)
        counts = Counter(vote for vote in self._votes if vote is not None).most_common(2)
        (first, votes), (_, others) = (*counts, ("", 0), ("", 0))[:2]
        if first == self.state or not self._least <= votes > others:
            first = ""
        if first != self._winner[0]:
            self._winner = first, now_s
        if not first or now_s - self._winner[1] < self._for_s:
            return False
        self.flips += self.state is not None
        self.state, self._winner = first, ("", 0.0)
        self._votes.clear()
        return True
