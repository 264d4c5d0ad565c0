"""Prediction sets that keep a promise: of all samples, a share of at least P has its class in its set (conformal prediction).

A set has every class whose probability p is at least 1 - t, and always the most probable one. The threshold t follows from held-out
predictions of the device's labels, and from those of the fleet's devices, in four steps.

1. How surprising a label is, is measured by what the head itself expects on this device. F(s) is the share of classes with 1 - p <= s among
   the device's samples, each weighted by its p: the distribution that scores s = 1 - p(label) have if probabilities are right. A label's
   survival v = 1 - F(s) is then uniform in 0..1 on every device, however hard its samples are.
2. Own labels count one each (a scene, for samples in groups). The fleet's survivals (a histogram) count as FLEET_LABELS labels
   in all; a release without them is taken to be right about its probabilities. One more label, which no set covers, stands for the
   sample to be predicted.
3. The survival that a share a of this mixture is below is the limit: all classes with a higher one are in the set. a is 1 - P, less one
   standard error of it from so many labels, FLEET_LABELS and own: coverage scatters from device to device, and the promise is each one's.
4. t is the score with this survival among the device's samples: labelled ones without their fold, and unlabelled ones.

A device without any sample has no F. Then a picture's own probabilities take its place: the most probable classes, until no more than the
limit is missing.

Without drift, labels and later samples are exchangeable, and own labels alone would cover a share P on average (V. Vovk et al.,
"Algorithmic Learning in a Random World", 2005; with weights for other sources, R. Barber et al., "Conformal prediction beyond
exchangeability", Annals of Statistics 2023). Sharing scores between devices follows C. Lu et al., "Federated conformal predictors",
ICML 2023. The threshold on probabilities gives the smallest sets (M. Sadinle et al., JASA 2019).

docs/promise.md has the figures (`python -m tools.study.promise`), also those of other ways of sharing scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import ArtefactError
from edge_fl.heads.head import Array, Features

FLEET_LABELS = 150.0
"""Own labels as which the fleet's survivals count, however many these are: with fewer, own labels move the sets more than they know."""
FURTHEST = 3.0
"""Factor by which devices' histograms may differ from right probabilities (`limited`)."""
LEAST_MISS = 0.1
"""Share of the allowed misses that a standard error leaves at least."""
LEVELS = np.geomspace(0.001, 0.6, 64)
"""Shares of samples outside their sets for which thresholds are stored; others are interpolated."""
USUAL_MISS = 0.1
"""Of the promise by which releases are compared."""
BINS, HIGHEST = 64, 8.0
"""Bins of a histogram of survivals, equal in -log v from 0 to HIGHEST; the last one has all beyond."""
FINE = 1024
MOST_SCORES = 50_000
"""Probabilities from which F is computed: of more samples times classes, samples at equal distances."""
LABELS_PER_ALARM = 700.0
"""Later labels of a device whose promise holds after which a false alarm comes, on average, at the earliest."""
BETS = (0.1, 0.225)
"""Shares by which later labels are more often outside their sets than promised, in what an alarm looks for."""
LARGEST = 0.9
"""Of what is at stake, that a bet loses at most with one label inside its set."""
SURVIVALS = "survivals"
"""Name of the array [2, BINS] in the extra with the fleet's head: histograms of the fleet's head alone, and of heads with labels."""

ARRAYS = LIMITS, TEMPERATURE, INSIDE, OWN = "promise", "promise_temperature", "promise_inside", "promise_own"
"""Names of the arrays that are stored."""

Doubles = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Promise:
    """Limits of a device's sets by LEVELS: masses float64 [L], the survival limit each; thresholds float64 [L], t each, or empty.

    temperature: divides the logits before their probabilities are compared. alone: the survival limit of sets for a promise of 0.9 that
    follow from the release alone, without own labels; inside bool [m]: whether each held-out label is in such a set. own [2, BINS]: the
    device's histograms for its fleet, as in a release, each of sum 1, or empty.
    """

    masses: Doubles
    thresholds: Doubles
    temperature: float = 1.0
    alone: float = USUAL_MISS
    inside: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    own: Doubles = field(default_factory=lambda: np.empty((0, BINS)))

    def sets(self, logits: Features | Doubles, promise: float) -> NDArray[np.bool_]:
        """Logits [n, C] -> whether each class is in the set [n, C]; with a promise of 0 the most probable class alone."""
        found = np.zeros(logits.shape, np.bool_)
        found[np.arange(len(logits)), logits.argmax(axis=1)] = True
        if promise <= 0 or not len(logits):
            return found
        p, miss = _probabilities(logits.astype(np.float64) / self.temperature), 1 - promise
        possible = np.isfinite(logits)
        if miss < LEVELS[0]:
            return possible
        if len(self.thresholds):
            return found | (possible & (1 - p <= self._at(self.thresholds, miss) + 1e-9))
        order = np.argsort(-p, axis=1, kind="stable")
        ordered = np.take_along_axis(p, order, axis=1)
        missing = 1 - (np.cumsum(ordered, axis=1) - ordered)  # without this class and the less probable ones
        inside = np.zeros_like(found)
        np.put_along_axis(inside, order, missing > self._at(self.masses, miss), axis=1)
        return found | (possible & inside)

    def _at(self, values: Doubles, miss: float) -> float:
        return float(np.interp(np.log(miss), np.log(LEVELS), values))

    def of_mean(self, logits: Features, promise: float) -> NDArray[np.bool_]:
        """The set [C] of several samples of one class, with logits [n, C], by the mean of their probabilities."""
        p = _probabilities(logits.astype(np.float64) / self.temperature).mean(axis=0)
        with np.errstate(divide="ignore"):
            found = self.sets((np.log(p) * self.temperature)[None], promise)
        row: NDArray[np.bool_] = found[0]
        return row

    def to_arrays(self) -> dict[str, Array]:
        """Arrays by name (`from_arrays` is the inverse)."""
        columns = [self.masses, self.thresholds] if len(self.thresholds) else [self.masses]
        return {
            LIMITS: np.stack(columns).astype(np.float32),
            TEMPERATURE: np.array([self.temperature, self.alone], np.float32),
            INSIDE: self.inside.astype(np.uint8),
            OWN: self.own.astype(np.float32),
        }

    def insides(self, logits: Features, y: Labels) -> NDArray[np.bool_]:
        """As `inside`, of test samples with logits [n, C] and labels y [n]."""
        return np.asarray(survivals(logits, y, temperature=self.temperature) >= self.alone)


def from_arrays(arrays: Mapping[str, Array]) -> Promise:
    """Rebuild limits from their `to_arrays()`; `UNMEASURED` without. Raises ArtefactError."""
    if LIMITS not in arrays:
        return UNMEASURED
    found, numbers, inside, own = (arrays.get(name, np.empty(0)) for name in ARRAYS)
    fits = found.ndim == 2 and len(found) in (1, 2) and found.shape[1] == len(LEVELS) and inside.ndim == 1
    fits = fits and own.shape in ((0, BINS), (2, BINS)) and bool(np.isfinite(own).all())
    if not fits or numbers.shape != (2,) or not (np.isfinite(found).all() and numbers[0] > 0):
        raise ArtefactError(f"calibration: promise {list(found.shape)}, expected [1 or 2, {len(LEVELS)}]")
    rows = found.astype(np.float64)
    thresholds = rows[1] if len(rows) == 2 else np.empty(0)
    known = inside.astype(np.bool_), own.astype(np.float64)
    return Promise(rows[0], thresholds, float(numbers[0]), float(numbers[1]), *known)


def of(
    held: Features,
    y: Labels,
    weights: Doubles,
    unlabelled: Features,
    *,
    fleet: Doubles | None = None,
    temperature: float = 1.0,
) -> Promise:
    """The limits of a device with held-out logits [m, C] of labels y [m], which count `weights` [m].

    unlabelled: logits [u, C] of other samples. fleet: a histogram of survivals [BINS], of any total; by default, probabilities are right.
    """
    expected = _Expected.of([held, unlabelled], [weights, np.ones(len(unlabelled))], temperature)
    own = survivals(held, y, weights, temperature) if len(y) else np.empty(0)
    grid = np.linspace(0, HIGHEST, FINE)
    order = np.argsort(-np.log(own))
    reached = np.concatenate([[0.0], np.cumsum(weights[order])])
    below = reached[np.searchsorted(-np.log(own)[order], grid, side="right")]
    covered = (below + FLEET_LABELS * _covered(fleet, grid)) / (weights.sum() + FLEET_LABELS + 1)
    places = np.searchsorted(covered, 1 - _careful(weights.sum()))
    masses = np.where(places < FINE, np.exp(-grid[np.minimum(places, FINE - 1)]), 0.0)
    thresholds = expected.score(masses) if expected else np.empty(0)
    usual = int(np.searchsorted(_covered(fleet, grid), 1 - USUAL_MISS))
    alone = float(np.exp(-grid[min(usual, FINE - 1)]))
    return Promise(masses, thresholds, temperature, alone, own >= alone)


def alarm(outside: Iterable[tuple[bool, float]]) -> float:
    """How much later labels say that the promise is broken, from 1 on an alarm.

    outside: of each label, in the order of time, whether it was outside the set that was made before it was known, and 1 - P.

    An e-detector: the mean over BETS of Shiryaev-Roberts sums R <- (1 + R) (1 + b (outside - a)), with a = 1 - P and b = BETS / a (1 - a).
    While each label is outside with a probability of at most a, whatever was before, R minus the number of labels is a supermartingale: an
    alarm comes after LABELS_PER_ALARM labels or more on average, and within n of them with a probability of at most n / LABELS_PER_ALARM
    (J. Shin, A. Ramdas and A. Rinaldo, "E-detectors", New England Journal of Statistics in Data Science 2023).
    """
    totals = [0.0] * len(BETS)
    for missed, a in outside:
        bets = (min(more / (a * (1 - a)), LARGEST / a) for more in BETS)
        totals = [(1 + total) * (1 + bet * (missed - a)) for total, bet in zip(totals, bets, strict=True)]
    return sum(totals) / len(totals) / LABELS_PER_ALARM


def survivals(
    logits: Features, y: Labels, weights: Doubles | None = None, temperature: float = 1.0
) -> Doubles:
    """The survivals v float64 [n] of labels y [n] among held-out logits [n, C] of samples that count `weights` [n]."""
    expected = _Expected.of([logits], [np.ones(len(y)) if weights is None else weights], temperature)
    assert expected is not None  # there are samples
    p = _probabilities(logits.astype(np.float64) / temperature)
    return np.maximum(expected.survival(1 - p[np.arange(len(y)), y]), np.exp(-HIGHEST))


def histogram(v: Doubles, weights: Doubles | None = None) -> Doubles:
    """Histogram float64 [BINS] of survivals v [n]."""
    places = np.minimum((-np.log(v) * (BINS / HIGHEST)).astype(np.int64), BINS - 1)
    return np.bincount(places, weights, minlength=BINS).astype(np.float64)


def for_fleet(alone: Features, held: Features, y: Labels, weights: Doubles) -> Doubles:
    """A device's histograms [2, BINS], each of sum 1, of the fleet's head alone and of its own, with logits [m, C] of its labels y [m]."""
    rows = np.stack([histogram(survivals(each, y, weights), weights) for each in (alone, held)])
    return np.asarray(rows / rows.sum(axis=1, keepdims=True))


def limited(rows: Doubles) -> Doubles:
    """Histograms [2, BINS] whose quantiles of -log v are within a factor of FURTHEST of those of right probabilities, each of its old sum.

    So no device can reduce all sets to single classes, or fill them with all classes, whatever it adds to a masked sum.
    """
    ends = np.linspace(0, HIGHEST, BINS + 1)[:-1]
    totals = rows.sum(axis=1, keepdims=True)
    covered = np.cumsum(np.pad(rows[:, :-1], ((0, 0), (1, 0))), axis=1) / np.maximum(totals, 1e-12)
    bounded = np.clip(covered, 1 - np.exp(-ends / FURTHEST), 1 - np.exp(-ends * FURTHEST))
    return np.asarray(np.diff(bounded, append=1.0) * totals)


def received(extra: Mapping[str, Array], labels: bool) -> Doubles | None:
    """The fleet's histogram [BINS] in a release's extra, of heads with `labels` or of the fleet's head alone; None without one.

    Raises ArtefactError for anything else.
    """
    if (found := extra.get(SURVIVALS)) is None:
        return None
    if found.shape != (2, BINS) or not np.isfinite(found).all() or (found < 0).any():
        raise ArtefactError(
            f"extra {SURVIVALS}: {found.dtype} {list(found.shape)}, expected [2, {BINS}] of 0 or more"
        )
    row = found[int(labels)].astype(np.float64)
    return row if row.sum() > 0 else None


@dataclass(frozen=True, eq=False)
class _Expected:
    """F: scores float64 [k] in ascending order, and the share of the probability up to each."""

    scores: Doubles
    shares: Doubles

    @classmethod
    def of(cls, logits: list[Features], weights: list[Doubles], temperature: float) -> _Expected | None:
        every, counted = np.concatenate(logits), np.concatenate(weights)
        if not every.size:
            return None
        step = -(-every.size // MOST_SCORES)
        p = _probabilities(every[::step].astype(np.float64) / temperature)
        scores, shares = (1 - p).ravel(), (p * counted[::step, None]).ravel()
        order = np.argsort(scores)
        total = np.cumsum(shares[order])
        return cls(scores[order], total / total[-1])

    def survival(self, scores: Doubles) -> Doubles:
        """1 - F just below each of the scores."""
        places = np.searchsorted(self.scores, scores, side="left")
        return np.asarray(1 - np.concatenate([[0.0], self.shares])[places])

    def score(self, survivals: Doubles) -> Doubles:
        """The scores up to which all but `survivals` of the probability are; 1 for none."""
        places = np.searchsorted(self.shares, 1 - survivals - 1e-12)
        found = self.scores[np.minimum(places, len(self.scores) - 1)]
        return np.where(survivals > 0, found, 1.0)


def _careful(labels: float) -> Doubles:
    """LEVELS less a standard error of each from so many own labels."""
    error = np.sqrt(LEVELS * (1 - LEVELS) / (FLEET_LABELS + labels + 1))
    return np.asarray(np.maximum(LEVELS - error, LEAST_MISS * LEVELS))


def _covered(fleet: Doubles | None, grid: Doubles) -> Doubles:
    """The share of survivals with -log v up to each number of the grid [FINE]."""
    if fleet is None:
        return np.asarray(1 - np.exp(-grid))
    ends = np.linspace(0, HIGHEST, BINS + 1)
    shares = np.concatenate([[0.0], np.cumsum(fleet[:-1]), [fleet[:-1].sum()]]) / fleet.sum()
    return np.asarray(np.interp(grid, ends, shares))


def _probabilities(logits: Doubles) -> Doubles:
    e = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-1e300))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


UNMEASURED = Promise(_careful(0.0), np.empty(0))
"""Of a device that has neither labels nor other samples, on a release that says nothing of its fleet."""
