"""Detection of two machines with one identity: a copied or stolen SD card.

A broker allows one client per name and disconnects the older, which reconnects and disconnects the other, and so on. Every agent process
draws a random boot id, so boot ids that alternate come from two running processes.
"""

from collections import OrderedDict

MAX_DEVICES = 100_000
ALTERNATIONS = 4  # a, b, a, b: a late message of an ended process gives at most three


class DuplicateDetector:
    """The most recent boot ids of every device."""

    def __init__(self) -> None:
        self._boots: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def add(self, device: str, boot: str) -> tuple[str, str] | None:
        """Add the boot id of a message -> both boot ids if they alternate; detection then starts again."""
        boots = self._boots.get(device, ())
        if boots[-1:] == (boot,):
            return None
        boots = (*boots, boot)[-ALTERNATIONS:]
        alternate = len(boots) == ALTERNATIONS and len(set(boots)) == 2
        self._boots[device] = () if alternate else boots
        self._boots.move_to_end(device)
        if len(self._boots) > MAX_DEVICES:
            self._boots.popitem(last=False)
        return (boots[0], boots[1]) if alternate else None
