"""One state out of many predictions: a class that K of the last N agree on; and how often a class changes."""

from __future__ import annotations

import math
import re
from collections import Counter, deque

from edge_fl.errors import InputError
from edge_fl_maker.capture.camera import NOTHING

HOUR_S = 3600.0
LEAST_S = 600.0
"""Time below which no rate per hour is given: it would be that of a moment."""


class Consensus:
    """The `state` that K of the last N predictions have, more than any other one; `given` as "K/N".

    With `for_s` a class becomes the state so many seconds after it first had K of N, if most predictions since then are of it, and still K
    of the last N. A state stays until another one wins. Votes from before a change do not count, so changes are at least K predictions
    apart.

    If K is more than half of N, and at most N - K of any N predictions in a row are wrong, the state is never wrong because of them, and
    follows a true change within N predictions and `for_s`. Raises InputError for another form.
    """

    def __init__(self, given: str, for_s: float = 0.0) -> None:
        found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", given)
        self._least, most = map(int, found.groups()) if found else (0, 0)
        if not 0 < self._least <= most:
            raise InputError(
                f"consensus {given[:100]!r}: expected K/N, such as 3/5, with K from 1 to N", NOTHING
            )
        self.state: str | None = None
        self._for_s = for_s
        self._votes = deque[str | None](maxlen=most)
        self._rising: dict[str, tuple[float, int]] = {}
        """Class -> when it first had K of N, and by how many of the predictions since then it leads over all others."""

    def add(self, label: str | None, now_s: float) -> bool:
        """Count a prediction, None if it was not answered; return whether the state has changed."""
        self._votes.append(label)
        leads = (
            (name, since_s, lead + (1 if name == label else -1))
            for name, (since_s, lead) in self._rising.items()
        )
        self._rising = {name: (since_s, lead) for name, since_s, lead in leads if lead > 0}
        counts = Counter(vote for vote in self._votes if vote is not None).most_common(2)
        (first, votes), (_, others) = (*counts, ("", 0), ("", 0))[:2]
        if first == self.state or not self._least <= votes > others:
            return False
        since_s, _ = self._rising.setdefault(first, (now_s, self._least))
        if now_s - since_s < self._for_s:
            return False
        self.state = first
        self._rising.clear()
        self._votes.clear()
        return True


class Flips:
    """Counts the changes of a class. A prediction without a class is no change.

    count: all changes; watched_s: from the first prediction to the last one; per_hour: the changes per hour in the last hour, or since the
    beginning, None in the first LEAST_S.
    """

    def __init__(self) -> None:
        self.count, self.watched_s = 0, 0.0
        self._began_s, self._last, self._recent = math.nan, "", deque[float]()

    def add(self, label: str | None, now_s: float) -> None:
        """Count a prediction of this class, made at a time in seconds on any clock that runs on."""
        if math.isnan(self._began_s):
            self._began_s = now_s
        self.watched_s = now_s - self._began_s
        if label is not None:
            if self._last not in ("", label):
                self.count += 1
                self._recent.append(now_s)
            self._last = label
        while self._recent and now_s - self._recent[0] > HOUR_S:
            self._recent.popleft()

    @property
    def per_hour(self) -> float | None:
        if self.watched_s < LEAST_S:
            return None
        return len(self._recent) * HOUR_S / min(self.watched_s, HOUR_S)
