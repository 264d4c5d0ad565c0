"""`python -m tools.bench.gates`: how many devices a harmful release reaches before the gates stop it, as the tables of docs/gates.md.

Roll-outs in the default stages, thousands at once: numpy adds up the evidence that the product's gates give to each possible report. Each
device's accuracy changes by a normal number with standard deviation CHANGE, minus the harm; CHANGED of its predictions change by chance,
FAILED of the devices fail for other reasons, and latencies vary by LATENCY. `earlier` are the former gates: they look for one loss and
take the variance from the predictions that changed.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from edge_fl.console.tables import Table, markdown
from edge_fl_server.recipes.recipe import GateConfig
from edge_fl_server.release.rollout import gates
from edge_fl_server.release.rollout.gates import Outcome
from edge_fl_server.release.rollout.stages import CAREFUL, MIN_STAGE

HARMS = (0.03, 0.1, 0.3, 0.6, 1.0)
IMAGES = (5, 10, 20, 50)
DEVICES = (10, 20, 70, 200)
RUNS, HARMFUL_RUNS, BATCH = 10_000, 1000, 500
CHANGE, CHANGED, FAILED, LATENCY = 0.01, 0.06, 0.05, 0.2
SETTINGS = GateConfig()
EARLIER_LIMIT = math.log(4 / SETTINGS.false_abort)  # of each of four gates
EARLIER_LARGEST = 0.45 * EARLIER_LIMIT
LATENCIES = 2001  # equally likely values of a latency ratio
FAIL = -1  # in the place of lost predictions


@dataclass(frozen=True)
class Reports:
    """Reports of many roll-outs, [roll-outs, devices] in order of arrival: predictions `lost` (FAIL: the device failed) and `gained`."""

    images: int
    lost: np.ndarray
    gained: np.ndarray
    latency: np.ndarray  # index into `latencies`


@dataclass(frozen=True)
class Ended:
    """How roll-outs ended: `aborted` by a gate, `paused` by the pooled reports, [roll-outs]; `reached` devices had the release then."""

    aborted: np.ndarray
    paused: np.ndarray
    reached: np.ndarray

    @property
    def stopped(self) -> np.ndarray:
        return self.aborted | self.paused


def drawn(rng: np.random.Generator, runs: int, devices: int, images: int, harm: float = 0.0) -> Reports:
    """Reports on a release that costs every device `harm` of its accuracy."""
    change = rng.normal(0, CHANGE, (runs, devices)) - harm
    lose = np.minimum(CHANGED / 2 + np.maximum(-change, 0), 1)
    gain = np.minimum(CHANGED / 2 + np.maximum(change, 0), 1 - lose)
    lost = rng.binomial(images, lose)
    gained = rng.binomial(images - lost, np.divide(gain, 1 - lose, out=np.zeros_like(gain), where=lose < 1))
    lost[rng.random((runs, devices)) < FAILED] = FAIL
    return Reports(images, lost, gained, rng.integers(LATENCIES, size=(runs, devices)))


def stages(devices: int) -> list[int]:
    """The number of devices that each stage reaches."""
    return sorted({max(round(share * devices), min(MIN_STAGE, devices)) for share in CAREFUL})


def ended(reports: Reports, accuracy: Callable[[str, int], np.ndarray], pooled: bool) -> Ended:
    """Roll the reports out; `accuracy(test, images)` is the evidence of a test for each possible report."""
    ends = np.array(stages(reports.lost.shape[1]))
    fine = reports.lost != FAIL
    ratios = {
        "latency": _sums(np.where(fine, latencies()[reports.latency], 0.0)[..., None]),
        "failures": _sums(np.where(fine, *failures())[..., None]),
    }
    for test in ("mean", "decile", gates.POOLED)[: 3 if pooled else 2]:
        ratios[test] = _sums(
            np.where(fine[..., None], accuracy(test, reports.images)[reports.lost, reports.gained], 0)
        )
    doubts = ratios.pop(gates.POOLED, np.full(reports.lost.shape, -np.inf))
    limit = gates.limit("mean", SETTINGS) if pooled else EARLIER_LIMIT
    objects = np.max(list(ratios.values()), axis=0) >= limit
    first = np.where(objects.any(1), ends[np.searchsorted(ends, objects.argmax(1) + 1)], np.inf)
    doubtful = doubts[:, ends - 1] >= gates.limit(gates.POOLED, SETTINGS)
    paused = np.where(doubtful.any(1), ends[doubtful.argmax(1)], np.inf)
    reached = np.minimum(np.minimum(first, paused), ends[-1])
    return Ended(np.isfinite(first) & (first <= paused), paused < first, reached)


def _sums(added: np.ndarray) -> np.ndarray:
    """The logarithm of the mean ratio after every report, from what each adds to the ratios on the last axis."""
    ratios = np.cumsum(added, axis=1)
    largest = ratios.max(axis=-1)
    return largest + np.log(np.exp(ratios - largest[..., None]).mean(axis=-1))


@cache
def product(test: str, images: int) -> np.ndarray:
    """What the product's test adds to each of its ratios, [lost, gained, ratios]."""
    return np.array(
        [
            [
                gates.added(test, Outcome("", images, lost, min(gained, images - lost)), SETTINGS)
                for gained in range(images + 1)
            ]
            for lost in range(images + 1)
        ]
    )


@cache
def earlier(test: str, images: int) -> np.ndarray:
    """What the earlier gates add, [lost, gained, 1]."""
    share, loss = {"mean": (0.5, 0.03), "decile": (0.1, 0.1)}[test]
    lost, gained = np.arange(images + 1)[:, None], np.arange(images + 1)
    variance = (lost + gained) / images**2 + SETTINGS.spread**2
    ratio = np.minimum((loss * (lost - gained) / images - loss**2 / 2) / variance, gates.MAX_EXPONENT)
    return np.minimum(np.log1p(share * np.expm1(ratio)), EARLIER_LARGEST)[..., None]


@cache
def latencies() -> np.ndarray:
    """What latency ratios add to that gate: LATENCIES quantiles of those of a release without harm."""
    rng = np.random.default_rng(1)
    return np.array(
        [
            gates.added("latency", Outcome(slower=math.exp(drawn)), SETTINGS)[0]
            for drawn in rng.normal(0, LATENCY, LATENCIES)
        ]
    )


def failures() -> tuple[float, float]:
    """What a device that did not fail adds to the gate, and one that did."""
    fine, failed = (gates.added("failures", Outcome(why), SETTINGS)[0] for why in ("", "enospc"))
    return fine, failed


def rolled_out(devices: int, images: int, harm: float, runs: int) -> tuple[Ended, Ended]:
    """The same roll-outs with the earlier gates and with the product's."""
    rng = np.random.default_rng([devices, images, round(1000 * harm)])
    before, after = [], []
    for start in range(0, runs, BATCH):
        reports = drawn(rng, min(BATCH, runs - start), devices, images, harm)
        before.append(ended(reports, earlier, pooled=False))
        after.append(ended(reports, product, pooled=True))
    return _joined(before), _joined(after)


def _joined(parts: Sequence[Ended]) -> Ended:
    return Ended(*(np.concatenate([getattr(part, name) for part in parts]) for name in Ended.__annotations__))


def harmless(runs: int) -> Table:
    """False aborts, and pauses because of pooled reports, in per cent."""
    rows = []
    for images in IMAGES:
        cells = []
        for devices in DEVICES:
            before, after = rolled_out(devices, images, 0.0, runs)
            found = (before.aborted, after.aborted, after.paused)
            cells.append("{:.2f} → {:.2f}, {:.2f}".format(*(100 * share.mean() for share in found)))
        rows.append([str(images), *cells])
    note = f"{runs:,} roll-outs each: false aborts before → after, false pauses after, in per cent"
    return Table(["images per device", *(f"{devices} devices" for devices in DEVICES)], rows, notes=[note])


def harmful(runs: int) -> Table:
    """Devices reached before the roll-out stops."""
    rows = []
    for harm in HARMS:
        for images in IMAGES:
            cells = []
            for devices in DEVICES:
                before, after = (end.reached.mean() for end in rolled_out(devices, images, harm, runs))
                cells.append(f"{before:.0f} → {after:.0f}")
            rows.append([f"{100 * harm:.0f}", str(images), *cells])
    headings = ["points lost", "images per device", *(f"{devices} devices" for devices in DEVICES)]
    note = f"{runs:,} roll-outs each: mean number of devices reached before → after; a roll-out that nothing stops reaches all"
    return Table(headings, rows, notes=[note])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.gates", description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help="roll-outs without harm, each")
    parser.add_argument("--harmful", type=int, default=HARMFUL_RUNS, help="roll-outs with harm, each")
    options = parser.parse_args(arguments)
    print(markdown(harmless(options.runs)))
    print(markdown(harmful(options.harmful)))


if __name__ == "__main__":
    main()
