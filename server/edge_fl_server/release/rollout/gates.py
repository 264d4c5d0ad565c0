"""Gates: sequential tests on devices' reports whether a release makes them worse. Pure arithmetic.

Every report multiplies likelihood ratios by how likely it is under a certain harm, over how likely it is when nothing is wrong (Wald,
Ann. Math. Stat. 1945). While nothing is wrong a ratio is a nonnegative supermartingale that starts at 1, and so is a mean of such
ratios: the probability that it *ever* reaches 1/a is at most a (Ville's inequality), for any stages, any order of reports and any number
of looks. `false_abort` is divided among the gates (Bonferroni).

    mean      half of the devices lose accuracy, `mean_loss` or more
    decile    10 % of the devices lose `decile_loss` or more, the others nothing: the fleet's bottom decile falls
    latency   half of the devices need `slower` times as long for a sample; less than `SHORTEST_MS` counts as that
    failures  `FAILURE_RATE` of the devices cannot run the release, compared with `NORMAL_FAILURE_RATE`
    fleet     as mean, of the fleet's head alone, which devices without labels serve; where labels correct it, mean and decile see nothing
    promise   as mean, of the prediction sets that follow from the release alone: whether they have the right class
    pooled    most of the devices lose accuracy, `mean_loss` or more: no gate, but no stage completes while `doubt` objects

Accuracy is compared on the same test images of the same device, image by image (McNemar). Of the `lost` + `gained` images with another
prediction than before, the share lost is (1 + t) / 2 under harm. The ratio is

    (1 + t)^lost * (1 - t)^gained * exp(-(t * spread * images)^2 / 2)

Nothing is wrong: a device's accuracy really changes by c, a random number with mean 0 and standard deviation at most `spread` (normal, or
sub-Gaussian), and any further share d of its images gets another prediction, each lost or gained with probability 1/2. For c < 0 an image
is lost with probability d/2 + |c| and gained with d/2, so it multiplies the ratio by 1 + |c| t on average; for c > 0 by 1 - c t. Both are
at most exp(-c t), so the first two factors are at most exp(-c t images) on average for this c, and at most the inverse of the third over
all c. This holds for every t in [0, 1) that does not depend on lost and gained: there is no approximation for few images.

A gate does not know the harm, so its ratio is the mean over `LOSSES` losses, from the smallest that it looks for to all of the accuracy;
each gives the t that detects it best (`_tilt`). Its power grows with the harm: a device that loses all its images counts as one.

`HALF`, `DECILE` and `MOST` are the shares of harmed devices, so a report multiplies by 1 - share + share * ratio. It stays a
supermartingale and bounds what one device can say against harm; `MAX_SHARE` bounds what it can say for harm.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from edge_fl import metrics
from edge_fl_server.recipes.recipe import GateConfig

HALF, DECILE, MOST = 0.5, 0.1, 0.9
LOSSES = 4
USUAL_CHANGED = 0.06  # share of a device's predictions that a harmless release changes; sets the power of the gates, not their error
FAILURE_RATE, NORMAL_FAILURE_RATE = 0.35, 0.05  # three devices that all fail abort
LATENCY_SPREAD = 0.35  # of the logarithm of a ratio of two short measurements on a busy machine
SHORTEST_MS = 1.0  # shorter latencies count as this long: below it a ratio is noise of the scheduler
MAX_LOG_RATIO = math.log(8)
MAX_SHARE = 0.45  # of the limit, that one report adds: an abort takes reports of at least three devices
MAX_DOUBT = 0.65  # of the limit of POOLED: a pause takes reports of at least two devices
MAX_EXPONENT = 50.0
MAX_IMAGES = 10**6

Ratios = tuple[float, ...]  # log likelihood ratios, one for each loss; latency and failures have one
Evidence = Mapping[str, Ratios]  # by gate, and of POOLED
POOLED = "pooled"


@dataclass(frozen=True)
class Outcome:
    """The effect of a release on one device: why it `failed`, or `lost` and `gained` of its test `images`, and latency ratio `slower`.

    `fleet_images`, `fleet_lost`, `fleet_gained`: the same images by the fleet's heads of both releases alone; `promise_images`,
    `promise_lost`, `promise_gained`: by whether their prediction sets have the right class. 0 where these were not compared.
    """

    failed: str = ""
    images: int = 0
    lost: int = 0
    gained: int = 0
    slower: float = 0.0
    fleet_images: int = 0
    fleet_lost: int = 0
    fleet_gained: int = 0
    promise_images: int = 0
    promise_lost: int = 0
    promise_gained: int = 0

    @property
    def of_sets(self) -> "Outcome":
        """The outcome with prediction sets in the place of predictions."""
        return Outcome(images=self.promise_images, lost=self.promise_lost, gained=self.promise_gained)

    @property
    def of_fleets_head(self) -> "Outcome":
        """The outcome with the fleet's head alone in the place of the served one."""
        return Outcome(images=self.fleet_images, lost=self.fleet_lost, gained=self.fleet_gained)


def outcome_of(error: str, values: Mapping[str, float]) -> Outcome:
    """The outcome from a report's error and metrics."""
    if error:
        return Outcome(failed=error)
    before, after = values.get(metrics.LATENCY_BEFORE, 0.0), values.get(metrics.LATENCY_AFTER, 0.0)
    names = (
        metrics.TEST_SAMPLES,
        metrics.TEST_LOST,
        metrics.TEST_GAINED,
        metrics.FLEET_LOST,
        metrics.FLEET_GAINED,
        metrics.PROMISE_LOST,
        metrics.PROMISE_GAINED,
    )
    numbers = (values.get(name, 0.0) for name in names)
    images, lost, gained, *of_both = (int(min(max(number, 0.0), MAX_IMAGES)) for number in numbers)
    fleet_lost, fleet_gained, promise_lost, promise_gained = of_both
    measured = min(before, after) > 0
    slower = max(after, SHORTEST_MS) / max(before, SHORTEST_MS) if measured else 0.0
    fleet_images = max(images, fleet_lost + fleet_gained) if metrics.FLEET_LOST in values else 0
    promise_images = max(images, promise_lost + promise_gained) if metrics.PROMISE_LOST in values else 0
    return Outcome(
        "",
        max(images, lost + gained),
        lost,
        gained,
        slower,
        fleet_images,
        fleet_lost,
        fleet_gained,
        promise_images,
        promise_lost,
        promise_gained,
    )


def updated(evidence: Evidence, outcome: Outcome, gates: GateConfig) -> Evidence:
    """The evidence after one more outcome."""
    return {
        name: tuple(old + new for old, new in zip(ratios, added(name, outcome, gates), strict=True))
        for name, ratios in evidence.items()
    }


def added(name: str, outcome: Outcome, gates: GateConfig) -> Ratios:
    """What one outcome adds to a test."""
    largest = (MAX_DOUBT if name == POOLED else MAX_SHARE) * limit(name, gates)
    return tuple(min(ratio, largest) for ratio in TESTS[name](outcome, gates))


def ratio(evidence: Evidence, name: str) -> float:
    """The logarithm of the mean of a test's ratios."""
    ratios = evidence[name]
    largest = max(ratios)
    return largest + math.log(sum(math.exp(each - largest) for each in ratios) / len(ratios))


def limit(name: str, gates: GateConfig) -> float:
    """The log likelihood ratio at which a test objects."""
    tests = 1 if name == POOLED else len(GATES)
    return math.log(tests / gates.false_abort)


def _objects(evidence: Evidence, name: str, gates: GateConfig) -> bool:
    return ratio(evidence, name) >= limit(name, gates)


def objection(evidence: Evidence, outcomes: Iterable[Outcome], gates: GateConfig) -> str:
    """The name of the gate that objects, with a summary of `outcomes`; "" if none does."""
    name = max(GATES, key=partial(ratio, evidence))
    return f"{name}: {SUMMARIES[name](list(outcomes))}" if _objects(evidence, name, gates) else ""


def doubt(evidence: Evidence, outcomes: Collection[Outcome], gates: GateConfig) -> str:
    """What the pooled outcomes say if they say that devices became worse; "" if not."""
    if not _objects(evidence, POOLED, gates):
        return ""
    lost, gained = sum(each.lost for each in outcomes), sum(each.gained for each in outcomes)
    devices = sum(each.images > 0 for each in outcomes)
    return (
        f"of {lost + gained} changed predictions on {devices} devices {lost} became wrong and {gained} right"
    )


def _worse(outcome: Outcome, share: float, least: float, spread: float) -> Ratios:
    """Of "a `share` of the devices lost accuracy", for LOSSES losses from `least` to 1 in equal ratios."""
    losses = (least ** (1 - step / (LOSSES - 1)) for step in range(LOSSES))
    return tuple(_among(share, _lost(outcome, loss, spread)) for loss in losses)


def _among(share: float, log_ratio: float) -> float:
    """Log likelihood ratio of "a `share` of the devices are harmed", from that of "this device is harmed"; at least log(1 - share)."""
    return math.log1p(share * math.expm1(log_ratio))


def _lost(outcome: Outcome, loss: float, spread: float) -> float:
    """Log likelihood ratio of "accuracy fell by `loss`" against "it did not"."""
    tilt = _tilt(outcome.images, loss, spread)
    ratio = outcome.lost * math.log1p(tilt) + outcome.gained * math.log1p(-tilt)
    return min(ratio - (tilt * spread * outcome.images) ** 2 / 2, MAX_EXPONENT)


def _tilt(images: int, loss: float, spread: float) -> float:
    """The t at which the ratio is expected to grow most, to second order, if USUAL_CHANGED and `loss` of the predictions change."""
    return loss / (loss + USUAL_CHANGED + images * spread**2)


def _latency(outcome: Outcome, gates: GateConfig) -> Ratios:
    if not outcome.slower:
        return (0.0,)
    slower = max(min(math.log(outcome.slower), MAX_LOG_RATIO), -MAX_LOG_RATIO)
    harm = math.log(gates.slower)
    return (_among(HALF, (harm * slower - harm**2 / 2) / LATENCY_SPREAD**2),)


def _failures(outcome: Outcome, gates: GateConfig) -> Ratios:
    if outcome.failed:
        return (math.log(FAILURE_RATE / NORMAL_FAILURE_RATE),)
    return (math.log((1 - FAILURE_RATE) / (1 - NORMAL_FAILURE_RATE)),)


def _accuracy_summary(outcomes: list[Outcome]) -> str:
    changes = sorted((o.gained - o.lost) / o.images for o in outcomes if o.images)
    bottom = changes[: math.ceil(len(changes) * DECILE)]
    mean, decile = sum(changes) / len(changes), sum(bottom) / len(bottom)
    return f"accuracy changed by {100 * mean:+.1f} points, in the bottom decile of {len(changes)} devices by {100 * decile:+.1f}"


def _fleet_summary(outcomes: list[Outcome]) -> str:
    return f"with the fleet's head alone {_accuracy_summary([each.of_fleets_head for each in outcomes])}"


def _latency_summary(outcomes: list[Outcome]) -> str:
    ratios = sorted(outcome.slower for outcome in outcomes if outcome.slower)
    return f"a sample takes {ratios[len(ratios) // 2]:.2f} times as long"


def _promise_summary(outcomes: list[Outcome]) -> str:
    tested = [each.of_sets for each in outcomes if each.promise_images]
    lost, gained = sum(each.lost for each in tested), sum(each.gained for each in tested)
    return (
        f"of {sum(each.images for each in tested)} samples of {len(tested)} devices {lost} fell out of their prediction sets,"
        f" and {gained} came into them"
    )


def _failure_summary(outcomes: list[Outcome]) -> str:
    failed = [outcome.failed for outcome in outcomes if outcome.failed]
    return f"{len(failed)} of {len(outcomes)} devices failed ({', '.join(sorted(set(failed)))})"


GATES: Mapping[str, Callable[[Outcome, GateConfig], Ratios]] = {
    "mean": lambda outcome, gates: _worse(outcome, HALF, gates.mean_loss, gates.spread),
    "decile": lambda outcome, gates: _worse(outcome, DECILE, gates.decile_loss, gates.spread),
    "latency": _latency,
    "failures": _failures,
    "fleet": lambda outcome, gates: _worse(outcome.of_fleets_head, HALF, gates.mean_loss, gates.spread),
    "promise": lambda outcome, gates: _worse(outcome.of_sets, HALF, gates.mean_loss, gates.spread),
}
"""The evidence that one outcome adds to each gate."""
TESTS = {**GATES, POOLED: lambda outcome, gates: _worse(outcome, MOST, gates.mean_loss, gates.spread)}

START: Evidence = {name: (0.0,) * len(test(Outcome(), GateConfig())) for name, test in TESTS.items()}

SUMMARIES: Mapping[str, Callable[[list[Outcome]], str]] = {
    "mean": _accuracy_summary,
    "decile": _accuracy_summary,
    "latency": _latency_summary,
    "failures": _failure_summary,
    "fleet": _fleet_summary,
    "promise": _promise_summary,
}
