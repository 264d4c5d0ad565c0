"""Which picture each person labels next: the most informative one that no other person has on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

OFFER_S = 60.0
"""Time for which a picture is shown to one person only."""


@dataclass
class Offers:
    """Pictures on the screens of clients, given by random ids, and skipped pictures in the order of skipping."""

    _shown: dict[str, tuple[str, float]] = field(default_factory=dict)
    _skipped: dict[str, None] = field(default_factory=dict)

    def next(self, client: str, order: Sequence[str], now_s: float, count: int = 1) -> list[str]:
        """Return the first `count` pictures for a client: the one on its screen, then those of `order`, skipped ones last.

        Pictures on the screens of others are left out.
        """
        self._shown = {
            other: (name, until_s) for other, (name, until_s) in self._shown.items() if until_s > now_s
        }
        present = set(order)
        self._skipped = {name: None for name in self._skipped if name in present}
        mine, _ = self._shown.get(client, ("", 0.0))
        others = {name for other, (name, _) in self._shown.items() if other != client}
        names = dict.fromkeys([mine, *order]) if mine in present else dict.fromkeys(order)
        fresh = [name for name in names if name not in self._skipped]
        found = [name for name in (*fresh, *self._skipped) if name not in others][:count]
        if found:
            self.show(client, found[0], now_s)
        return found

    def show(self, client: str, name: str, now_s: float) -> None:
        """Put a picture on the screen of a client."""
        self._shown[client] = (name, now_s + OFFER_S)

    def skip(self, name: str) -> None:
        """Offer a picture after all others."""
        self._skipped.pop(name, None)
        self._skipped[name] = None

    def restore(self, name: str) -> None:
        """Undo `skip`."""
        self._skipped.pop(name, None)
