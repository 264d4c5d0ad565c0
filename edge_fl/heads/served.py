"""The served head: the fleet's head, adapted to a device's labels.

Every candidate is a maximum a posteriori linear head around a centre, the fleet's head (a = 1) or zero (a = 0), of prior strength λ:

    min_D  Σ_i w_i CE(softmax(a F(z_i) + o + D u_i), y_i) + λ/2 |D|²

F are the fleet's logits, times a factor f that the release may have (`fleet_head.py`), else 1; o_c = f log(q_c / π_c) turns the fleet's
class shares π into the device's: q_c = (n_c + α C π_c) / (n + α C) for n_c labels of class c. u is the feature, divided by the
spread of the features (for a = 1 in the fleet, if that is known; for a = 0 among the own samples) and by its root mean square length, and a
constant. w_i is 1 over the size of the sample's group, so that frames of one burst count once. The served head is the mean of the
candidates' logits, again a linear head, with weights

    ω_k ∝ prior_k · exp(Σ_i w_i log(0.9 p_k(y_i without the sample's group) + 0.1 / C))

With fewer labels than features there are candidates of least squares, too, which then predict better than those of cross-entropy:

    min_D  Σ_i w_i |y_i - softmax(a F(z_i) + o) - D u_i|² + λ |D|²        logits a F + o + c D u,  y_i as a one-hot vector

Around the fleet's head they count the less, the surer it is: from a factor of UNSURE on there are none.

So nothing is chosen: without labels it is the fleet's head; a head that contradicts the labels loses its weight; with many labels small λ
or a = 0 take over. Where the set of candidates changes, one label can change the head more than usual: those of least squares around zero
begin at LEAST_PER_CLASS labels per class, and all of least squares end at as many labels as features. Leave-one-out predictions are in
closed form, from the curvature at the minimum, class by class.

Measured on balanced folds: a fold takes one group of each class, so that no held-out class is in the minority.

Sources: pseudo-Bayesian model averaging, Y. Yao et al., "Using stacking to average Bayesian predictive distributions", 2018; approximate
leave-one-out, K. Rad and A. Maleki, 2020; class shares, M. Saerens et al., Neural Computation 2002. docs/personal-heads.md has figures.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_fl.data import grouping
from edge_fl.errors import ArtefactError
from edge_fl.heads import fleet as fleets
from edge_fl.heads.fleet import Fleet, FleetCosine, FleetHead
from edge_fl.heads.head import Head, TrainingSet, standardisation
from edge_fl.heads.linear import Doubles

log = logging.getLogger(__name__)

PSEUDO_COUNT = 2.0
"""α: labels of each class that a device is assumed to have besides its own."""
UNLABELLED_COUNT = 0.5
"""What a sample without a label counts as."""
STRENGTHS: tuple[float, ...] = (np.inf, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01)
"""λ around the fleet's head."""
OWN_STRENGTHS = (0.5, 0.05, 0.015, 0.005)
"""λ around zero."""
SQUARED_STRENGTHS, SCALE, OWN_SCALE = (1.0, 0.1, 0.01), 3.0, 10.0
"""λ of candidates of least squares, and c around the fleet's head and around zero."""
LEAST_PER_CLASS = 2
"""Labels of each class, on average, from which on there are candidates of least squares around zero: one left out leaves another one."""
CONSTANT = 1 / 3
"""Constant of u around zero. With less of it, a class without its only label seems as likely as before, and own labels alone too good."""
USUAL, USUAL_DIRECTED = 3.0, 0.1
DECAY = 1.0
"""The λ with the highest prior, for features and for their directions, and what each factor √10 from it takes off the logarithm of the
prior. An infinite λ counts as 30."""
DOUBT = 0.1
"""Probability that a label is any class: a head may be certain and wrong now and then."""
OWN_PRIOR = -5.0
"""Logarithm of the prior of each candidate around zero."""
ENOUGH = 40
"""Samples of each class that a fleet's head needs for these priors; with fewer, the usual λ and OWN_PRIOR shrink in proportion."""
SURE, UNSURE = 0.5, 0.25
"""Factor on its logits from which on a fleet's head is believed in full; with a smaller one the usual λ shrinks in proportion. Below the
second one there are candidates of least squares around it."""
NEGLIGIBLE = 1e-3
MOST_WEIGHED, MOST_NARROW, NARROW = 300, 1000, 128
"""Samples on which candidates are weighed: of more, as many of each class; more of features with few dimensions."""
LEAST_CONTRADICTED = 3
"""Scenes of a class below which nothing is said about the fleet's head contradicting them."""
EM_STEPS = 50
ITERATIONS = 200

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Estimate:
    """A served head, and what was predicted of each of the `rows` [m] of its data without this sample.

    logits, own and fleet [m, C]: of the served head, of the candidates around zero alone, and of the fleet's head unchanged (which does not
    depend on labels; None without one). folds: of the `rows`, as positions. own_weight: the weight of the candidates around zero, 0..1.
    shares [C]: the device's class shares.
    """

    head: Head
    rows: Rows
    logits: Doubles
    own: Doubles
    fleet: Doubles | None
    folds: list[Rows]
    own_weight: float
    shares: Doubles
    contradicted: tuple[tuple[int, int], ...] = ()
    """Pairs of classes: most labels of the first are the second to the fleet's head."""


class _Setting(NamedTuple):
    """λ of a candidate, the logarithm of its prior, and c if it is one of least squares."""

    strength: float
    prior: float
    times: float = 0.0


@dataclass(frozen=True, eq=False)
class _Design:
    """Candidates around one centre: their base logits [n, K] and inputs u [n, d + 1], whose last column is constant."""

    base: Doubles
    u: Doubles
    scale: Doubles
    shift: Doubles
    settings: list[_Setting]
    centre: tuple[Doubles, Doubles]
    around_fleet: bool

    def take(self, rows: Rows) -> _Design:
        return replace(self, base=self.base[rows], u=self.u[rows])

    def linear(self, found: Doubles) -> tuple[Doubles, Doubles]:
        """D [K, d + 1] -> weights [K, d] and bias [K] on φ(z), those of the centre included."""
        weights = found[:, :-1] / self.scale
        return self.centre[0] + weights, self.centre[1] + found[:, -1] * self.u[0, -1] - weights @ self.shift


@dataclass(frozen=True, eq=False)
class _Candidate:
    design: _Design
    setting: _Setting
    alone: Doubles
    """Logits [m, K] of each sample without its group."""
    balanced: Doubles
    """Logits [m, K] of each sample without its fold."""


def fit(data: TrainingSet) -> Estimate:
    """Adapt the fleet's head to `data`, which may have no samples if there is a fleet's head.

    A fleet's head that does not fit is left out. Raises ArtefactError for one where there are no samples either.
    """
    try:
        fleet = fleets.received(data)
    except ArtefactError as error:
        if not len(data.y):
            raise
        log.warning("%s; the head follows from the device's own labels alone", error.message)
        fleet = None
    if fleet is None or not fleet.known.any():
        return _Fit(data, fleets.nothing(data, fleet), has_fleet=False).estimate()
    return _Fit(data, fleet, has_fleet=True).estimate()


class _Fit:
    """One fit; columns of logits are the classes `kept`."""

    def __init__(self, data: TrainingSet, fleet: FleetHead, has_fleet: bool) -> None:
        self.data, self.has_fleet = data, has_fleet
        counts = np.bincount(data.y, minlength=data.classes)
        possible = counts > 0 if data.closed and counts.any() else (counts > 0) | fleet.known
        self.kept: Rows = np.flatnonzero(possible)
        self.fleet = _completed(fleet, self.kept, data, counts > 0)
        self.group_weights = grouping.weights(data.groups, len(data.y))
        self.y = np.searchsorted(self.kept, data.y)
        self.v = fleet.space(data.z)
        self.counts, self.offset, self.shares = self._class_shares()

    def estimate(self) -> Estimate:
        if not len(self.y):
            head = self._head(*self._with_offset(self.fleet.weights, self.fleet.bias))
            empty = np.empty((0, self.data.classes))
            return Estimate(
                head, np.empty(0, np.int64), empty, empty, empty, [], 0.0, self._over_all_shares()
            )
        rows = self._weighed()
        designs = self._designs()
        candidates = [found for design in designs for found in self._candidates(design.take(rows), rows)]
        losses = np.array([self._losses(each.alone, rows) for each in candidates])
        priors = np.array([each.setting.prior for each in candidates])
        folds = self._balanced(rows)
        total = losses.sum(axis=1)
        weights = _normalised(priors - total)
        chosen = np.flatnonzero(weights > NEGLIGIBLE)
        shares = weights[chosen] / weights[chosen].sum()
        heads = [self._whole(candidates[k], designs) for k in chosen]
        linear = [np.tensordot(shares, np.stack(parts), 1) for parts in zip(*heads, strict=True)]
        held, own = self._held_out(candidates, priors, losses, total, folds, self.y[rows])
        around_zero = np.array([not each.design.around_fleet for each in candidates])
        alone = self._fleet_alone(rows)
        return Estimate(
            self._head(*self._with_offset(*linear)),
            rows,
            self._spread(held),
            self._spread(own),
            self._spread(alone) if self.has_fleet else None,
            folds,
            float(weights[around_zero].sum()),
            self._over_all_shares(),
            self._contradicted(alone, rows) if self.has_fleet else (),
        )

    def _class_shares(self) -> tuple[Doubles, Doubles, Doubles]:
        """The counts [K] of assumed, own and unlabelled samples, the offsets o [K] and the shares q [K]."""
        data, prior = self.data, self.fleet.shares
        if data.balanced:
            uniform = np.full(len(prior), 1 / len(prior))
            return uniform, -self.fleet.factor * np.log(prior * len(prior)), uniform
        counts = np.bincount(self.y, self.group_weights, minlength=len(prior))
        own = counts + PSEUDO_COUNT * len(prior) * prior
        if len(data.unlabelled) and self.has_fleet:
            u = self.fleet.space(data.unlabelled)
            likely = _softmax(u @ self.fleet.weights.T + self.fleet.bias) / prior
            own = _with_unlabelled(likely, own)
        shares = own / own.sum()
        return own, self.fleet.factor * np.log(shares / prior), shares

    def _weighed(self) -> Rows:
        """The samples on which candidates are weighed, as many of each class as possible."""
        most = MOST_NARROW if self.v.shape[1] <= NARROW else MOST_WEIGHED
        if len(self.y) <= most:
            return np.arange(len(self.y))
        rank = np.empty(len(self.y), np.int64)
        for label in np.unique(self.y):
            members = np.flatnonzero(self.y == label)
            rank[members] = np.arange(len(members))
        return np.sort(np.lexsort((self.y, rank))[:most])

    def _designs(self) -> list[_Design]:
        n, dim = self.v.shape
        designs, ones = [], np.ones((n, 1))
        squared = SQUARED_STRENGTHS if n < dim else ()
        believed = min(1.0, self.fleet.samples / ENOUGH) if self.has_fleet else 1.0
        if self.has_fleet:
            centred = (self.v - self.fleet.centre) / self.fleet.spread
            length = max(float(np.sqrt(np.square(centred).sum(axis=1).mean())), 1e-12)
            usual = USUAL_DIRECTED if self.fleet.directed else USUAL
            usual *= believed * min(1.0, self.fleet.factor / SURE)
            steps = np.abs(np.log10(np.minimum(STRENGTHS, 30.0) / usual)) * 2
            settings = [_Setting(each, -DECAY * step) for each, step in zip(STRENGTHS, steps, strict=True)]
            if self.fleet.factor < UNSURE:
                unsure = np.log(1 - self.fleet.factor / UNSURE)
                settings += [_Setting(each, unsure, SCALE) for each in squared]
            designs.append(
                _Design(
                    self.v @ self.fleet.weights.T + self.fleet.bias,
                    np.hstack([centred / length, ones]),
                    np.full(dim, length) * self.fleet.spread,
                    self.fleet.centre,
                    settings,
                    (self.fleet.weights, self.fleet.bias),
                    True,
                )
            )
        mean, std = self._standardisation()
        classes = len(self.kept)
        settings = [_Setting(each, OWN_PRIOR * believed) for each in OWN_STRENGTHS]
        if n >= LEAST_PER_CLASS * classes:
            settings += [_Setting(each, OWN_PRIOR * believed, OWN_SCALE) for each in squared]
        designs.append(
            _Design(
                np.zeros((n, classes)),
                np.hstack([(self.v - mean) / std, CONSTANT * ones]),
                std,
                mean,
                settings,
                (np.zeros((classes, dim)), np.zeros(classes)),
                False,
            )
        )
        return designs

    def _standardisation(self) -> tuple[Doubles, Doubles]:
        """Mean and std [d] of the features, the latter times what makes the root mean square length 1; of directions the length alone."""
        if self.fleet.directed or self.data.unit_norm:
            mean, std = self.v.mean(axis=0, dtype=np.float32), np.ones(self.v.shape[1], np.float32)
        else:
            mean, std = standardisation(replace(self.data, z=self.v.astype(np.float32)))
        length = max(float(np.sqrt(np.square((self.v - mean) / std).sum(axis=1).mean())), 1e-6)
        return mean.astype(np.float64), std.astype(np.float64) * length

    def _candidates(self, design: _Design, rows: Rows) -> list[_Candidate]:
        """The candidates of a design, with what they predict of each sample without its group and without its fold."""
        u, _ = _rows_only(design.u)
        y, weights = self.y[rows], self._sample_weights(rows)
        base, found = design.base + self.offset, np.zeros((design.base.shape[1], u.shape[1]))
        alone, balanced = self._groups(rows), self._balanced(rows)
        candidates = []
        for setting in design.settings:
            if np.isinf(setting.strength):
                candidates.append(_Candidate(design, setting, base, base))
                continue
            objective = _Squares if setting.times else _CrossEntropy
            problem = objective(u, y, base, weights, setting)
            found = problem.minimum(found)
            candidates.append(_Candidate(design, setting, *problem.left_out(found, (alone, balanced))))
        return candidates

    def _whole(self, candidate: _Candidate, designs: Sequence[_Design]) -> tuple[Doubles, Doubles]:
        """Weights and bias of a candidate that is fitted on all samples."""
        design = next(each for each in designs if each.around_fleet == candidate.design.around_fleet)
        if np.isinf(candidate.setting.strength):
            return design.centre
        u, basis = _rows_only(design.u)
        weights = self._sample_weights(np.arange(len(self.y)))
        objective = _Squares if candidate.setting.times else _CrossEntropy
        problem = objective(u, self.y, design.base + self.offset, weights, candidate.setting)
        found = problem.minimum(np.zeros((design.base.shape[1], u.shape[1])))
        return design.linear(found if basis is None else found @ basis.T)

    def _held_out(
        self,
        candidates: Sequence[_Candidate],
        priors: Doubles,
        losses: Doubles,
        total: Doubles,
        folds: Sequence[Rows],
        y: Rows,
    ) -> tuple[Doubles, Doubles]:
        """Logits [m, K] of each sample by the mean of all candidates, and of those around zero, whose weights know nothing of its fold."""
        zero = np.array([not each.design.around_fleet for each in candidates])
        logits = np.stack([each.balanced for each in candidates])
        held, own = np.empty(logits.shape[1:]), np.empty(logits.shape[1:])
        for fold in folds:
            score = priors - (total - losses[:, fold].sum(axis=1))
            held[fold] = np.tensordot(_normalised(score), logits[:, fold], 1)
            own[fold] = np.tensordot(_normalised(score[zero]), logits[zero][:, fold], 1)
        order = np.concatenate(folds)
        half = self._half_shares(y[order])
        held[order] += half
        own[order] += half
        return held, own

    def _half_shares(self, y: Rows) -> Doubles:
        """What the offset of each sample changes [m, K] if half of its label does not count in the class shares."""
        if self.data.balanced:
            return np.zeros((len(y), len(self.kept)))
        return self._shares_without(y, 0.5) - self.offset

    def _shares_without(self, y: Rows, part: float) -> Doubles:
        """The offsets [m, K] without this part of each sample's own label; unlabelled samples keep what they were counted as."""
        own = np.tile(self.counts, (len(y), 1))
        own[np.arange(len(y)), y] -= part
        own = np.maximum(own, 1e-3)
        return self.fleet.factor * np.asarray(
            np.log(own / own.sum(axis=1, keepdims=True) / self.fleet.shares)
        )

    def _losses(self, logits: Doubles, rows: Rows) -> Doubles:
        """Weighted log-losses [m] of the samples, whose own labels do not count in the class shares."""
        y = self.y[rows]
        if not self.data.balanced:
            logits = logits - self.offset + self._shares_without(y, 1.0)
        right = _softmax(logits)[np.arange(len(y)), y]
        robust = (1 - DOUBT) * right + DOUBT / len(self.kept)
        return -self._sample_weights(rows) * np.log(robust)

    def _fleet_alone(self, rows: Rows) -> Doubles:
        return np.asarray(self.v[rows] @ self.fleet.weights.T + self.fleet.bias)

    def _contradicted(self, logits: Doubles, rows: Rows) -> tuple[tuple[int, int], ...]:
        """Classes that the fleet knows, of which most of LEAST_CONTRADICTED scenes or more are one other class to its head."""
        found, calls = [], logits.argmax(axis=1)
        for label in np.flatnonzero(self.fleet.known):
            mine = self.y[rows] == label
            totals = np.bincount(calls[mine], self.group_weights[rows[mine]], minlength=len(self.kept))
            if totals.sum() < LEAST_CONTRADICTED - 1e-6:
                continue
            other = int(totals.argmax())
            if other != label and 2 * totals[other] > totals.sum():
                found.append((int(self.kept[label]), int(self.kept[other])))
        return tuple(found)

    def _sample_weights(self, rows: Rows) -> Doubles:
        weights = self.data.weights * self.group_weights
        return np.asarray(weights[rows])

    def _groups(self, rows: Rows) -> list[Rows]:
        """The groups among `rows`, as positions in `rows`."""
        numbers = grouping.numbers(self.data.groups[rows] if len(self.data.groups) else rows, len(rows))
        return [np.flatnonzero(numbers == number) for number in range(int(numbers.max()) + 1)]

    def _balanced(self, rows: Rows) -> list[Rows]:
        """Folds of `rows`, as positions: one group of each class, as long as a class has any left."""
        rank = dict[int, int]()
        folds: list[list[Rows]] = []
        for group in self._groups(rows):
            label = int(self.y[rows[group[0]]])
            place = rank[label] = rank.get(label, -1) + 1
            if place == len(folds):
                folds.append([])
            folds[place].append(group)
        return [np.concatenate(fold) for fold in folds]

    def _with_offset(self, weights: Doubles, bias: Doubles) -> tuple[Doubles, Doubles]:
        return weights, bias + self.offset

    def _head(self, weights: Doubles, bias: Doubles) -> Head:
        kind = FleetCosine if self.fleet.directed else Fleet
        return kind(
            self.data.classes,
            self.data.extractor,
            np.ascontiguousarray(weights, np.float32),
            bias.astype(np.float32),
            self.kept,
        )

    def _spread(self, logits: Doubles) -> Doubles:
        every = np.full((len(logits), self.data.classes), -np.inf)
        every[:, self.kept] = logits
        return every

    def _over_all_shares(self) -> Doubles:
        shares = np.zeros(self.data.classes)
        shares[self.kept] = self.shares
        return shares


def _completed(fleet: FleetHead, kept: Rows, data: TrainingSet, own: NDArray[np.bool_]) -> FleetHead:
    """The fleet's head for the classes `kept`; a class that only this device has begins between the likely and the unlikely ones."""
    bias = fleet.bias.copy()
    alone = own & ~fleet.known
    if alone.any() and fleet.known.sum() > 1:
        logits = np.sort(fleet.logits(data.z)[:, fleet.known], axis=1)
        bias[alone] = np.median(logits[:, -2])
    shares = fleet.shares[kept] / fleet.shares[kept].sum()
    known = fleet.known[kept]
    return replace(fleet, weights=fleet.weights[kept], bias=bias[kept], shares=shares, known=known)


def _with_unlabelled(likely: Doubles, own: Doubles) -> Doubles:
    """Counts [K] with those of samples whose classes have the likelihoods [m, K], by expectation maximisation."""
    counts = own
    for _ in range(EM_STEPS):
        posterior = likely * counts
        counts = own + UNLABELLED_COUNT * (posterior / posterior.sum(axis=1, keepdims=True)).sum(axis=0)
    return counts


class _CrossEntropy:
    """The objective of a candidate: cross-entropy. u [n, r], y [n], base [n, K] and weights [n]."""

    def __init__(self, u: Doubles, y: Rows, base: Doubles, weights: Doubles, setting: _Setting) -> None:
        self.u, self.base, self.weights, self.strength = u, base, weights, setting.strength
        self.rows, self.y = np.arange(len(y)), y
        self.targets = np.eye(base.shape[1])[y]

    def minimum(self, start: Doubles) -> Doubles:
        """D [K, r], from `start`."""
        from scipy.optimize import minimize

        def objective(flat: Doubles) -> tuple[float, Doubles]:
            found = flat.reshape(start.shape)
            logits = self.base + self.u @ found.T
            norms = _log_sum(logits)
            loss = self.weights @ (norms - logits[self.rows, self.y]) + self.strength / 2 * flat @ flat
            errors = (np.exp(logits - norms[:, None]) - self.targets) * self.weights[:, None]
            return float(loss), np.asarray(errors.T @ self.u + self.strength * found).ravel()

        options = {"maxiter": ITERATIONS}
        result = minimize(objective, start.ravel(), jac=True, method="L-BFGS-B", options=options)
        return np.asarray(result.x.reshape(start.shape))

    def left_out(self, found: Doubles, divisions: tuple[Sequence[Rows], ...]) -> tuple[Doubles, ...]:
        """Logits [n, K] of the samples of each part of a division by the minimum without this part, to second order and class by class."""
        logits = self.base + self.u @ found.T
        errors, curvatures = self._slopes(logits)
        results = tuple(logits.copy() for _ in divisions)
        width = errors.shape[1] // curvatures.shape[1]
        for column, curvature in enumerate(curvatures.T):
            classes = slice(column * width, (column + 1) * width)
            hessian = self.u.T @ (curvature[:, None] * self.u)
            hessian[np.diag_indices_from(hessian)] += self.strength
            influence = self.u @ np.linalg.solve(hessian, self.u.T)
            for result, parts in zip(results, divisions, strict=True):
                for part in parts:
                    inner = influence[np.ix_(part, part)]
                    kept = np.eye(len(part)) - curvature[part, None] * inner
                    result[part, classes] += inner @ np.linalg.solve(kept, errors[part, classes])
        return results

    def _slopes(self, logits: Doubles) -> tuple[Doubles, Doubles]:
        """First [n, K] and second derivatives by the logits; the second ones [n, 1] if they are those of every class."""
        p = _softmax(logits)
        return (p - self.targets) * self.weights[:, None], np.maximum(p * (1 - p), 1e-9) * self.weights[
            :, None
        ]


class _Squares(_CrossEntropy):
    """The objective of a candidate: least squares, in closed form; what is left out is exact."""

    def __init__(self, u: Doubles, y: Rows, base: Doubles, weights: Doubles, setting: _Setting) -> None:
        super().__init__(u, y, base, weights, setting)
        self.targets = setting.times * (self.targets - _softmax(base))

    def minimum(self, start: Doubles) -> Doubles:
        """D [K, r]."""
        hessian = self.u.T @ (self.weights[:, None] * self.u)
        hessian[np.diag_indices_from(hessian)] += self.strength
        return np.asarray(np.linalg.solve(hessian, self.u.T @ (self.weights[:, None] * self.targets)).T)

    def _slopes(self, logits: Doubles) -> tuple[Doubles, Doubles]:
        return (logits - self.base - self.targets) * self.weights[:, None], self.weights[:, None]


def _rows_only(u: Doubles) -> tuple[Doubles, Doubles | None]:
    """u [n, r] in orthonormal coordinates of its rows, with their basis [r, n], if these are fewer: the penalty stays the same."""
    if len(u) >= u.shape[1]:
        return u, None
    basis, coordinates = np.linalg.qr(u.T)
    return coordinates.T, basis


def _normalised(scores: Doubles) -> Doubles:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())


def _softmax(logits: Doubles) -> Doubles:
    return np.asarray(np.exp(logits - _log_sum(logits)[:, None]))


def _log_sum(logits: Doubles) -> Doubles:
    highest = logits.max(axis=1)
    return np.asarray(highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1)))
