"""Settings of a simulated fleet, and the names and tiers of its devices."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from edge_fl.data.partition import DataConfig
from edge_fl.errors import ConfigError
from edge_fl.seeds import generator
from edge_fl_devices.agent import state
from edge_fl_devices.agent.state import AgentLimits

PREFIX = "sim-"


class SimulatedData(Struct, frozen=True, forbid_unknown_fields=True):
    """The data of a simulated fleet, and the seed of their split and of the selection of full devices; keys as in a recipe."""

    data: DataConfig = DataConfig()
    seed: Annotated[int, Meta(ge=0)] = 0


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """`data.clients` devices, of which `full` train; the others fit the kinds of `heads` in turn.

    The fleet stops after `duration_s`. With `until_idle` it also stops when nothing is left to do and the server has gone, or when nothing
    has happened for `idle_s`; it does not stop before a server has been online. `ids` are the device names, for fleets with certificates,
    which are in folders of these names below `identities`.
    """

    data: DataConfig
    full: int
    folder: Path
    fleet: str = "main"
    heads: tuple[str, ...] = ("logistic", "svm", "mlp")
    seed: int = 0
    workers: int = os.cpu_count() or 1
    duration_s: float = float("inf")
    until_idle: bool = False
    idle_s: float = 20.0
    wait_s: float = 60.0
    root: bytes | None = None
    ids: tuple[str, ...] = ()
    identities: Path | None = None
    limits: AgentLimits = state.LIMITS


def names(devices: int) -> list[str]:
    """Return the ids of simulated devices, ascending: sim-000, sim-001, ..."""
    width = max(3, len(str(devices - 1)))
    return [f"{PREFIX}{number:0{width}d}" for number in range(devices)]


def full_devices(devices: int, full: int, seed: int) -> frozenset[int]:
    """Draw the numbers of the full devices."""
    drawn = generator(seed, "fleet.tiers").permutation(devices)[:full]
    return frozenset(int(number) for number in drawn)


def tier_counts(devices: int | None, head: str, full: str) -> tuple[int, int]:
    """Return (head-only, full) devices from options: whole numbers ("8") or fractions of `devices` ("0.8"). Raises ConfigError."""
    texts = {"head": head, "full": full}
    given = " ".join(f"--{name} {value}" for name, value in {"devices": devices, **texts}.items() if value)
    if devices is None and any("." in text for text in texts.values()):
        raise ConfigError(f"{given}: a fraction needs --devices")
    counts = {name: _count(name, text, devices or 0) for name, text in texts.items() if text}
    total = sum(counts.values()) if devices is None else devices
    heads = counts.get("head", total - counts.get("full", 0))
    fulls = counts.get("full", total - heads)
    if min(heads, fulls) < 0 or not 1 <= heads + fulls == total:
        raise ConfigError(f"{given}: {heads} head-only and {fulls} full, expected them to add up")
    return heads, fulls


def _count(name: str, text: str, devices: int) -> int:
    try:
        return round(float(text) * devices) if "." in text else int(text)
    except ValueError:
        raise ConfigError(f"--{name} {text}: expected a whole number or a fraction such as 0.8") from None
