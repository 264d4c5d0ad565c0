"""Fault injection into simulated fleets: `edge-fl fleet up --faults tools.chaos:PROFILE` (docs/chaos.md)."""

from functools import partial
from typing import Any

from tools.chaos.injector import FaultInjector
from tools.chaos.profile import load


def __getattr__(name: str) -> Any:
    """The faults of a profile: the name of a built-in one, or the path of a TOML file. Raises ConfigError."""
    if name.startswith("__"):
        raise AttributeError(name)
    return partial(FaultInjector, load(name))
