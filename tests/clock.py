"""A clock that a test moves."""

from dataclasses import dataclass


@dataclass
class Clock:
    """Called, it gives `now_s`, in seconds."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s
