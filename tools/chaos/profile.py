"""Chaos profile: the faults of a simulated fleet, as a TOML file or a built-in profile (`edge-fl fleet up --faults tools.chaos:FILE`).

The same profile and seed give the same faults: which devices crash and when, and the fault of the n-th packet of a kind.
"""

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from edge_fl import toml
from edge_fl.errors import ConfigError, nearest
from tools.chaos.faulty_transport import NO_FAULTS, Chance, Faults

PROFILES = Path(__file__).parent / "profiles"
Seconds = Annotated[float, Meta(ge=0, le=86_400)]


class Devices(Struct, frozen=True, forbid_unknown_fields=True):
    """Fractions of the fleet that `crash`, have their connection `cut` (both for `away_s`: from, to), or `leave` permanently.

    `clock_skew_s` is the maximum error of a device's wall clock in either direction.
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
    """Number and duration of a machine's outages, and the commands for them (program and arguments, no shell, at most 30 s each).

    Without commands a broker outage cuts all connections at once; server outages require commands.
    """

    restarts: Annotated[int, Meta(ge=0, le=100)] = 0
    down_s: Seconds = 1.0
    stop: list[str] = []
    start: list[str] = []


class Chaos(Struct, frozen=True, forbid_unknown_fields=True):
    """A chaos profile. Outages begin between `after_s` and `until_s` after the fleet's start."""

    seed: Annotated[int, Meta(ge=0, le=2**62)] = 0
    after_s: Seconds = 1.0
    until_s: Seconds = 30.0
    link: Faults = NO_FAULTS
    devices: Devices = Devices()
    broker: Restarts = Restarts()
    server: Restarts = Restarts()

    def __post_init__(self) -> None:
        if self.after_s > self.until_s:
            raise ValueError(f"after_s {self.after_s:g} is later than until_s {self.until_s:g}")


def load(name: str) -> Chaos:
    """Read a profile from a TOML file, or by name. Raises ConfigError."""
    known = {file.stem: file for file in PROFILES.glob("*.toml")}
    path = known.get(name, Path(name))
    if path.suffix != ".toml":
        raise ConfigError(f"chaos profile {name!r}: neither a TOML file nor known{nearest(name, known)}")
    return toml.checked(toml.read(path), Chaos, str(path))
