"""Names and tiers of simulated devices, alike where they run and where a program divides images over them."""

from __future__ import annotations

from edge_fl.seeds import generator

PREFIX = "sim-"


def names(devices: int) -> list[str]:
    """Return the ids of simulated devices, ascending: sim-000, sim-001, ..."""
    width = max(3, len(str(devices - 1)))
    return [f"{PREFIX}{number:0{width}d}" for number in range(devices)]


def full_devices(devices: int, full: int, seed: int) -> frozenset[int]:
    """Draw the numbers of the full devices."""
    drawn = generator(seed, "fleet.tiers").permutation(devices)[:full]
    return frozenset(int(number) for number in drawn)
