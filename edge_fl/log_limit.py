"""A limit of the lines that one sender can cause in a log: some at once, then a few a minute, with the number of those left out."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

AT_ONCE = 10  # lines
EVERY_S = 20.0  # one more line
MAX_SENDERS = 10_000  # names may be free for whoever may publish: further ones share one limit
OTHERS = ""


@dataclass(slots=True)
class _Usage:
    """How many lines a sender may still cause, when that was, and how many were left out since its last one."""

    lines: float
    at_s: float
    left_out: int = 0


class LogLimit:
    """Write lines about senders, such as devices. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, _Usage] = {}
        self._tidied_s = clock()
        self._lock = threading.Lock()

    def write(
        self,
        log: logging.Logger,
        level: int,
        sender: str,
        text: str,
        *arguments: object,
        exc_info: bool = False,
    ) -> None:
        """Log a line about a sender, with its name as `device` of the record, or count it as left out."""
        if not log.isEnabledFor(level):
            return
        left_out = self._left_out(sender)
        if left_out is None:
            return
        if left_out:
            text, arguments = (
                f"{text} (%s more lines of %s were left out)",
                (*arguments, f"{left_out:,}", sender or "others"),
            )
        log.log(level, text, *arguments, exc_info=exc_info, extra={"device": sender}, stacklevel=2)

    def _left_out(self, sender: str) -> int | None:
        """The number of lines to name as left out in a line that is written; None if this one is left out, too."""
        with self._lock:
            now_s = self._clock()
            if sender not in self._usage and len(self._usage) >= MAX_SENDERS:
                self._tidy(now_s)
                sender = sender if len(self._usage) < MAX_SENDERS else OTHERS
            usage = self._usage.setdefault(sender, _Usage(AT_ONCE, now_s))
            usage.lines = min(usage.lines + (now_s - usage.at_s) / EVERY_S, AT_ONCE)
            usage.at_s = now_s
            if usage.lines < 1:
                usage.left_out += 1
                return None
            usage.lines -= 1
            left_out, usage.left_out = usage.left_out, 0
            return left_out

    def _tidy(self, now_s: float) -> None:
        """Forget senders that have been silent for long enough to have all their lines again; at most once in EVERY_S."""
        if now_s - self._tidied_s >= EVERY_S:
            self._tidied_s, silent_s = now_s, AT_ONCE * EVERY_S
            self._usage = {
                name: usage for name, usage in self._usage.items() if now_s - usage.at_s < silent_s
            }
