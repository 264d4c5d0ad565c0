"""What goes wrong in a simulated fleet, as a TOML file: `edge-fl fleet up --chaos FILE`, or the name of a profile that comes along.

The same profile and seed give the same faults again: which devices crash and when, and what happens to the n-th packet of a kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from devices.simulated.chaos.faulty_transport import NONE, Chance, Faults
from edge_fl import config
from edge_fl.errors import ConfigError, nearest

PROFILES = Path(__file__).parent / "profiles"
Seconds = Annotated[float, Meta(ge=0, le=86_400)]


class Devices(Struct, frozen=True, forbid_unknown_fields=True):
    """What devices do, as shares of the fleet: `crash` and come back after `away_s` (from, to), `leave` for good, have their link `cut`.

    `clock_skew_s` is the most by which a device's wall clock is off, to either side.
    """

    crash: Chance = 0.0
    leave: Chance = 0.0
    cut: Chance = 0.0
    away_s: tuple[Seconds, Seconds] = (0.5, 3.0)
    clock_skew_s: Annotated[float, Meta(ge=0, le=1e10)] = 0.0

    def __post_init__(self) -> None:
        if self.away_s[0] > self.away_s[1]:
            raise ValueError(f"away_s from {self.away_s[0]:g} to {self.away_s[1]:g}")


class Restarts(Struct, frozen=True, forbid_unknown_fields=True):
    """How often a machine goes down, for how long, and the commands that do it (program and arguments; no shell, 30 s at most each).

    Without commands a broker's restart is what devices see of one: all links are cut at once. A server's needs them.
    """

    restarts: Annotated[int, Meta(ge=0, le=100)] = 0
    down_s: Seconds = 1.0
    stop: list[str] = []
    start: list[str] = []


class Chaos(Struct, frozen=True, forbid_unknown_fields=True):
    """One profile. What machines do falls between `after_s` and `until_s`, counted from the fleet's start."""

    seed: Annotated[int, Meta(ge=0, le=2**62)] = 0
    after_s: Seconds = 1.0
    until_s: Seconds = 30.0
    link: Faults = NONE
    devices: Devices = Devices()
    broker: Restarts = Restarts()
    server: Restarts = Restarts()

    def __post_init__(self) -> None:
        if self.after_s > self.until_s:
            raise ValueError(f"after_s {self.after_s:g} is later than until_s {self.until_s:g}")


def load(name: str) -> Chaos:
    """A profile from a TOML file, or by name. Raises ConfigError."""
    known = {file.stem: file for file in PROFILES.glob("*.toml")}
    path = known.get(name, Path(name))
    if path.suffix != ".toml":
        raise ConfigError(f"chaos profile {name!r}: neither a TOML file nor known{nearest(name, known)}")
    return config.checked(config.read(path), Chaos, str(path))


def dump(chaos: Chaos) -> str:
    """The profile as TOML, every value written out."""
    return msgspec.toml.encode(chaos).decode()
