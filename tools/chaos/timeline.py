"""Outages of devices, broker and server, drawn from the seed before the run, so that a run can be repeated."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_fl.seeds import generator
from tools.chaos.profile import Chaos

Kind = Literal["crash", "cut", "broker", "server"]


@dataclass(frozen=True, slots=True)
class Outage:
    """Outage of a device, its connection, the broker or the server, `at_s` after the start, for `duration_s` (may be infinite)."""

    at_s: float
    kind: Kind
    target: str
    duration_s: float

    def __str__(self) -> str:
        duration = "permanently" if math.isinf(self.duration_s) else f"for {self.duration_s:.1f} s"
        target = "" if self.target == self.kind else f" {self.target}"
        return f"{self.at_s:7.2f} s  {self.kind}{target} {duration}"


def timeline(chaos: Chaos, devices: Sequence[str]) -> list[Outage]:
    """Return all outages in order. A device's outages do not depend on the other devices."""
    outages = [outage for device in devices for outage in _of_device(chaos, device)]
    for machine in ("broker", "server"):
        restarts = chaos.broker if machine == "broker" else chaos.server
        rng = generator(chaos.seed, f"chaos.{machine}")
        outages += [
            Outage(float(rng.uniform(chaos.after_s, chaos.until_s)), machine, machine, restarts.down_s)
            for _ in range(restarts.restarts)
        ]
    return sorted(outages, key=lambda outage: (outage.at_s, outage.target))


def _of_device(chaos: Chaos, device: str) -> Iterator[Outage]:
    rng, rates = generator(chaos.seed, "chaos.device", client=device), chaos.devices
    draws, times = rng.random(3), rng.uniform(chaos.after_s, chaos.until_s, 3)
    crash_s, cut_s = rng.uniform(*rates.away_s, 2)
    if draws[0] < rates.crash:
        yield Outage(float(times[0]), "crash", device, float(crash_s))
    if draws[1] < rates.cut:
        yield Outage(float(times[1]), "cut", device, float(cut_s))
    if draws[2] < rates.leave:
        yield Outage(float(times[2]), "crash", device, math.inf)


def skew_s(chaos: Chaos, device: str) -> float:
    """Return the error of a device's wall clock in seconds."""
    most = chaos.devices.clock_skew_s
    return float(generator(chaos.seed, "chaos.clock", client=device).uniform(-most, most)) if most else 0.0
