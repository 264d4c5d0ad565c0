"""Where a bundle can go. A target says what it is, reads and writes files by their paths, and knows nothing of what is in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from devices.flash.bundle import File


class Target(ABC):
    """`name` opens every message. `boots` says whether the first boot of a card has to be told about the bundle."""

    name: str
    boots: bool = False

    @abstractmethod
    def pythons(self) -> tuple[str, ...]:
        """The versions of Python that may be on the device. Raises ConfigError when the bundle would not run there."""

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """A file's content, None where there is none."""

    @abstractmethod
    def free_bytes(self) -> int:
        """How much may be written."""

    @abstractmethod
    def remove(self, paths: Collection[str]) -> None:
        """Removes files; those that are not there are no error."""

    @abstractmethod
    def write(self, files: Sequence[File]) -> None:
        """Writes files in this order, and leaves only once they are on the disk."""

    def after(self) -> str:
        """What happens, or has to, once the bundle is there."""
        return "put the card into the Pi and switch it on"
