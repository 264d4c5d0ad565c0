"""When machines go wrong: a list drawn from the seed before anything starts, so that a run can be had again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from devices.simulated.chaos.profile import Chaos
from edge_fl.seeds import generator

What = Literal["crash", "cut", "broker", "server"]


@dataclass(frozen=True, slots=True)
class Outage:
    """At `at_s` after the start the device `who`, its link, the broker or the server is gone, for `for_s` seconds (infinity: for good)."""

    at_s: float
    what: What
    who: str
    for_s: float

    def __str__(self) -> str:
        how_long = "for good" if math.isinf(self.for_s) else f"for {self.for_s:.1f} s"
        return f"{self.at_s:7.2f} s  {self.what} {self.who} {how_long}".replace("  broker broker", "  broker")


def timeline(chaos: Chaos, devices: Sequence[str]) -> list[Outage]:
    """All that will happen, in order. A device's fate does not depend on the others'."""
    found = [outage for device in devices for outage in _of_device(chaos, device)]
    for what in ("broker", "server"):
        restarts = chaos.broker if what == "broker" else chaos.server
        rng = generator(chaos.seed, f"chaos.{what}")
        found += [
            Outage(float(rng.uniform(chaos.after_s, chaos.until_s)), what, what, restarts.down_s)
            for _ in range(restarts.restarts)
        ]
    return sorted(found, key=lambda outage: (outage.at_s, outage.who))


def _of_device(chaos: Chaos, device: str) -> list[Outage]:
    rng, wild = generator(chaos.seed, "chaos.device", client=device), chaos.devices
    chances, times = rng.random(3), rng.uniform(chaos.after_s, chaos.until_s, 3)
    away = rng.uniform(*wild.away_s, 2)
    found = []
    if chances[0] < wild.crash:
        found.append(Outage(float(times[0]), "crash", device, float(away[0])))
    if chances[1] < wild.cut:
        found.append(Outage(float(times[1]), "cut", device, float(away[1])))
    if chances[2] < wild.leave:
        found.append(Outage(float(times[2]), "crash", device, math.inf))
    return found


def skew_s(chaos: Chaos, device: str) -> float:
    """By how much a device's wall clock is off, in seconds."""
    most = chaos.devices.clock_skew_s
    return float(generator(chaos.seed, "chaos.clock", client=device).uniform(-most, most)) if most else 0.0
