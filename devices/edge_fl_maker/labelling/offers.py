"""Which picture each person labels next: the most informative one that no other person has on the screen."""

from collections.abc import Sequence
from dataclasses import dataclass, field

OFFER_S = 60.0
"""Time for which a picture is shown to one person only, after the last look of that person's page."""
FORGOTTEN_S = 3600.0
"""Time after which a page that does not look is forgotten."""


@dataclass
class PictureOffers:
    """Pictures on the screens of clients, given by random ids, and skipped pictures in the order of skipping.

    A picture is on the screen of one client: a page that was away for longer than OFFER_S keeps its picture until another one is given it.
    """

    _shown: dict[str, tuple[str, float]] = field(default_factory=dict)
    _skipped: dict[str, None] = field(default_factory=dict)

    def next(self, client: str, order: Sequence[str], now_s: float, count: int = 1) -> list[str]:
        """Return the first `count` pictures for a client: the one on its screen, then those of `order`, skipped ones last.

        Pictures on the screens of others are left out.
        """
        present = set(order)
        self._skipped = {name: None for name in self._skipped if name in present}
        mine, others = self.on_screen(client), self._others(client, now_s)
        names = dict.fromkeys([mine, *order]) if mine in present else dict.fromkeys(order)
        fresh = [name for name in names if name not in self._skipped]
        found = [name for name in (*fresh, *self._skipped) if name not in others][:count]
        self.show(client, found[0] if found else "", now_s)
        return found

    def on_screen(self, client: str) -> str:
        """Return the picture that was last given to a client and to no other one since; "" if there is none."""
        return self._shown.get(client, ("", 0.0))[0]

    def show(self, client: str, name: str, now_s: float) -> None:
        """Put a picture on the screen of a client, unless it is on another one."""
        if name in self._others(client, now_s):
            return
        self._shown = {
            other: (shown, until_s)
            for other, (shown, until_s) in self._shown.items()
            if shown != name and until_s + FORGOTTEN_S > now_s
        }
        self._shown[client] = (name, now_s + OFFER_S)

    def skip(self, name: str) -> None:
        """Offer a picture after all others."""
        self._skipped.pop(name, None)
        self._skipped[name] = None

    def restore(self, name: str) -> None:
        """Undo `skip`."""
        self._skipped.pop(name, None)

    def _others(self, client: str, now_s: float) -> set[str]:
        return {
            name
            for other, (name, until_s) in self._shown.items()
            if name and other != client and until_s > now_s
        }
