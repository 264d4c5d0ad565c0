"""Two machines with one identity: a card that was copied, or stolen and read.

The broker lets in one client of a name and throws the other out, which comes back and throws out the first, and so on. Every process of
an agent draws a boot id of its own, so one that speaks again after another has spoken, twice, was never gone: there are two of them.
"""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED = 100_000
ALTERNATIONS = 4  # a, b, a, b: a late message of a process that has ended makes three at most


class Clones:
    """The last boot ids of every device, as they took turns."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def heard(self, device: str, boot: str) -> tuple[str, str] | None:
        """Notes who spoke; the two boot ids once it is certain that there are two, and from the start again."""
        turns = self._turns.get(device, ())
        if turns[-1:] == (boot,):
            return None
        turns = (*turns, boot)[-ALTERNATIONS:]
        alternate = len(turns) == ALTERNATIONS and len(set(turns)) == 2
        self._turns[device] = () if alternate else turns
        self._turns.move_to_end(device)
        if len(self._turns) > REMEMBERED:
            self._turns.popitem(last=False)
        return (turns[0], turns[1]) if alternate else None
