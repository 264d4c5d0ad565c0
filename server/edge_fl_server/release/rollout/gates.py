"""Gates: four sequential tests on devices' reports whether a release makes them worse. Pure arithmetic.

Each gate is Wald's sequential probability ratio test (Ann. Math. Stat. 1945): every report multiplies a likelihood ratio by how likely that
report is under a certain harm, over how likely it is when nothing is wrong. While nothing is wrong the ratio is a nonnegative
supermartingale that starts at 1, so the probability that it *ever* reaches 1/a is at most a (Ville's inequality), for any stages, any
order of reports and any number of looks. `false_abort` is divided among the gates (Bonferroni).

    mean      half of the devices lose `mean_loss` of their accuracy each
    decile    10 % of the devices lose `decile_loss` each, the others nothing: the fleet's bottom decile falls
    latency   half of the devices need `slower` times as long for an image; less than `SHORTEST_MS` counts as that
    failures  `FAILURE_RATE` of the devices cannot run the release, compared with `NORMAL_FAILURE_RATE`

`HALF` and `DECILE` are the shares of harmed devices, so a report adds the mixture 1 - share + share * ratio. It stays a supermartingale and
bounds what one device can say against harm; `MAX_SHARE` bounds what it can say for harm.

Accuracy is compared on the same test images of the same device, image by image (McNemar): of the `lost` + `gained` images with another
prediction than before, each is equally likely lost or gained when nothing is wrong, so the standard error of their difference is at most
sqrt(lost + gained) / images; `spread` allows for real changes of a device's accuracy, up or down, when nothing is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from edge_fl import metrics
from edge_fl.config import GateConfig

HALF = 0.5
DECILE = 0.1
FAILURE_RATE, NORMAL_FAILURE_RATE = 0.3, 0.05
LATENCY_SPREAD = 0.35  # of the logarithm of a ratio of two short measurements on a busy machine
SHORTEST_MS = 1.0  # shorter latencies count as this long: below it a ratio is noise of the scheduler
MAX_LOG_RATIO = math.log(8)
MAX_SHARE = 0.45  # of the limit, that one report adds: an abort takes reports of at least three devices
MAX_EXPONENT = 50.0
MAX_IMAGES = 10**6

Evidence = Mapping[str, float]  # log likelihood ratios by gate


@dataclass(frozen=True)
class Outcome:
    """The effect of a release on one device: why it `failed`, or `lost` and `gained` of its test `images`, and latency ratio `slower`."""

    failed: str = ""
    images: int = 0
    lost: int = 0
    gained: int = 0
    slower: float = 0.0


def outcome_of(error: str, values: Mapping[str, float]) -> Outcome:
    """The outcome from a report's error and metrics."""
    if error:
        return Outcome(failed=error)
    before, after = values.get(metrics.LATENCY_BEFORE, 0.0), values.get(metrics.LATENCY_AFTER, 0.0)
    numbers = (
        values.get(name, 0.0) for name in (metrics.TEST_SAMPLES, metrics.TEST_LOST, metrics.TEST_GAINED)
    )
    images, lost, gained = (int(min(max(number, 0.0), MAX_IMAGES)) for number in numbers)
    measured = min(before, after) > 0
    slower = max(after, SHORTEST_MS) / max(before, SHORTEST_MS) if measured else 0.0
    return Outcome(images=max(images, lost + gained), lost=lost, gained=gained, slower=slower)


def updated(evidence: Evidence, outcome: Outcome, gates: GateConfig) -> Evidence:
    """The evidence after one more outcome."""
    largest = MAX_SHARE * limit(gates)
    return {name: evidence[name] + min(gate(outcome, gates), largest) for name, gate in GATES.items()}


def limit(gates: GateConfig) -> float:
    """The log likelihood ratio at which a gate objects."""
    return math.log(len(GATES) / gates.false_abort)


def objection(evidence: Evidence, outcomes: Iterable[Outcome], gates: GateConfig) -> str:
    """The name of the gate that objects, with a summary of `outcomes`; "" if none does."""
    name = max(evidence, key=evidence.__getitem__)
    return f"{name}: {SUMMARIES[name](list(outcomes))}" if evidence[name] >= limit(gates) else ""


def _mean(outcome: Outcome, gates: GateConfig) -> float:
    return _among(HALF, _shifted(outcome, gates.mean_loss, gates.spread))


def _decile(outcome: Outcome, gates: GateConfig) -> float:
    return _among(DECILE, _shifted(outcome, gates.decile_loss, gates.spread))


def _among(share: float, log_ratio: float) -> float:
    """Log likelihood ratio of "a `share` of the devices are harmed", from that of "this device is harmed"; at least log(1 - share)."""
    return math.log1p(share * math.expm1(log_ratio))


def _shifted(outcome: Outcome, loss: float, spread: float) -> float:
    """Log likelihood ratio of "accuracy fell by `loss`" against "it did not"; 0 without test images."""
    if not outcome.images:
        return 0.0
    difference = (outcome.gained - outcome.lost) / outcome.images
    variance = (outcome.lost + outcome.gained) / outcome.images**2 + spread**2
    return min((-loss * difference - loss**2 / 2) / variance, MAX_EXPONENT)


def _latency(outcome: Outcome, gates: GateConfig) -> float:
    if not outcome.slower:
        return 0.0
    ratio = max(min(math.log(outcome.slower), MAX_LOG_RATIO), -MAX_LOG_RATIO)
    harm = math.log(gates.slower)
    return _among(HALF, (harm * ratio - harm**2 / 2) / LATENCY_SPREAD**2)


def _failures(outcome: Outcome, gates: GateConfig) -> float:
    if outcome.failed:
        return math.log(FAILURE_RATE / NORMAL_FAILURE_RATE)
    return math.log((1 - FAILURE_RATE) / (1 - NORMAL_FAILURE_RATE))


def _accuracy_summary(outcomes: list[Outcome]) -> str:
    changes = sorted((o.gained - o.lost) / o.images for o in outcomes if o.images)
    bottom = changes[: math.ceil(len(changes) * DECILE)]
    mean, decile = sum(changes) / len(changes), sum(bottom) / len(bottom)
    return f"accuracy changed by {100 * mean:+.1f} points, in the bottom decile of {len(changes)} devices by {100 * decile:+.1f}"


def _latency_summary(outcomes: list[Outcome]) -> str:
    ratios = sorted(outcome.slower for outcome in outcomes if outcome.slower)
    return f"an image takes {ratios[len(ratios) // 2]:.2f} times as long"


def _failure_summary(outcomes: list[Outcome]) -> str:
    failed = [outcome.failed for outcome in outcomes if outcome.failed]
    return f"{len(failed)} of {len(outcomes)} devices failed ({', '.join(sorted(set(failed)))})"


GATES: Mapping[str, Callable[[Outcome, GateConfig], float]] = {
    "mean": _mean,
    "decile": _decile,
    "latency": _latency,
    "failures": _failures,
}
"""The evidence that one outcome adds to each gate."""

START: Evidence = dict.fromkeys(GATES, 0.0)

SUMMARIES: Mapping[str, Callable[[list[Outcome]], str]] = {
    "mean": _accuracy_summary,
    "decile": _accuracy_summary,
    "latency": _latency_summary,
    "failures": _failure_summary,
}
