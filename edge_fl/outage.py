"""Log a failure that repeats, such as an unreachable database, once when it begins and once when it has ended."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from edge_fl.errors import EdgeFLError


class Outage:
    """The failures of one part of a service, which tries again. Not thread-safe."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log, self._what = log, what
        self._failing = False

    @contextmanager
    def logged(self, consequence: str = "trying again") -> Iterator[None]:
        """Log an EdgeFLError of the block, unless the last one failed too, and the first block afterwards that does not."""
        try:
            yield
        except EdgeFLError as error:
            if not self._failing:
                self._log.warning("%s: %s; %s", self._what, error.message, consequence)
            self._failing = True
        else:
            if self._failing:
                self._log.warning("%s: works again", self._what)
            self._failing = False
