"""The fleet's head from the features of simulated clients: a linear discriminant, or its mean with the method's shared head.

A covariance from the clients knows nothing of how far another client's samples are from theirs, and its discriminant is too sure of them.
So shrinkage and a factor on the logits are those with which the head of one half of the clients predicts the other half's samples best.

Clients with different classes pull a shared head apart, while class means and a covariance are the same wherever the samples are. The mean
of both heads' logits is near the better one (docs/personal-heads.md has figures), also where the shared head has hardly been trained.

Each client's part is a sum: the number of samples, the sum of the features and that of their products, of each class. So it is what devices
could add up, and in a fleet of devices class statistics take its place (`edge_fl_server.orchestrate.class_statistics`).
"""

from collections.abc import Iterable, Sequence
from itertools import product
from types import MappingProxyType
from typing import NamedTuple, Self

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from scipy.special import logsumexp

from edge_fl import heads
from edge_fl.data.samples import ClientData
from edge_fl.heads import fleet, promise, training_set
from edge_fl.heads.head import Array, Extras, Features
from edge_fl.heads.linear import Doubles
from edge_fl.heads.plan import PLAIN, HeadPlan
from edge_fl.learn.batches import in_batches
from edge_fl.learn.tree import Parts, to_arrays
from edge_fl.methods.contract import steps, tiers
from edge_fl.methods.contract.method import Method
from edge_fl.wire import tensors

NOTHING: Extras = MappingProxyType({})
MOST = 500
"""Training samples of a client whose features are computed, the first ones: means and covariance need no more."""
SHRINKAGES, FACTORS = (1.0, 0.3, 0.1), (1.0, 0.5, 0.25, 0.15, 0.1, 0.06)
NEAR = 0.5
"""A factor from here on is taken as 1: with flatter logits one label moves more, and more devices lose by it (docs/personal-heads.md)."""
LEAST_SAMPLES = 10
"""Samples of each class, on average, that a half needs to say anything of the whole: with fewer its head is a much worse one."""
LEAST_VARIANCE = 0.01
"""Of the mean variance, for the spread of a feature: one that is almost constant in the fleet may not be so on a device."""
TESTED = 50
"""Samples of a client on which shrinkage and factor are tested."""
FITTED, LABELLED = 10, 10
"""Clients of each half whose served heads are fitted, and their labels of each class, for the survivals of held-out predictions."""

ClientFeatures = tuple[Features, NDArray[np.int64]]


class FleetExtra(NamedTuple):
    """The packed extra `edge_fl.heads.fleet.FLEET`, and the class shares of the samples that it was computed from."""

    payload: bytes
    shares: list[float]


def compute(
    method: Method, shared: Parts, clients: Iterable[ClientData], classes: int, device: str
) -> FleetExtra:
    """The fleet's head for all `classes` on the exported features of the clients' training images."""
    method.net.to(device)
    extras = to_arrays({name: shared[name] for name in method.head_tier.extras if shared.get(name)})
    plan = tiers.head_plan(method, 1, collect=False)

    def features(data: ClientData) -> ClientFeatures:
        x = torch.from_numpy(data.train.x[:MOST]).to(device)
        z = in_batches(lambda batch: steps.exported_features(method, shared, batch), x)
        return z.cpu().numpy(), data.train.y[:MOST]

    return of_features(map(features, clients), classes, plan, extras)


def of_features(
    clients: Iterable[ClientFeatures], classes: int, plan: HeadPlan = PLAIN, extras: Extras = NOTHING
) -> FleetExtra:
    """The fleet's head for all `classes` from features z [n, d] and class ids y [n] of each client.

    `plan` and `extras` are those of the method's release, whose linear head counts for half. Prototypes do not: they are class means, too.
    """
    halves, tests = [_Moments(*np.zeros(3))] * 2, (list[ClientFeatures](), list[ClientFeatures]())
    labelled = list[ClientFeatures](), list[ClientFeatures]()
    for place, (z, y) in enumerate((z, y) for z, y in clients if len(y)):
        some = slice(None, None, -(-len(y) // TESTED))
        tests[place % 2].append((z[some], y[some]))
        halves[place % 2] += _Moments.of(z, y, classes)
        if len(labelled[place % 2]) < FITTED:
            labelled[place % 2].append((z[: LABELLED * classes], y[: LABELLED * classes]))
    every = halves[0] + halves[1]
    shrinkage, factor = _calibrated(halves, tests)
    survivals = _survivals(halves, tests, labelled, shrinkage, factor)
    weight, bias, spread = every.discriminant(shrinkage)
    shares = every.counts / every.counts.sum()
    if "weight" in extras.get(plan.fleet, {}):
        no_samples = np.empty((0, len(spread)), np.float32)
        shared = fleet.received(
            training_set(no_samples, np.empty(0, np.int64), classes, False, plan=plan, extras=extras)
        )
        assert shared is not None  # it is in the extras
        weight, bias = (weight + shared.weights) / 2, (bias + shared.bias) / 2
    arrays = _arrays(weight, bias, spread, factor) | survivals
    return FleetExtra(tensors.pack({fleet.FLEET: arrays}), [round(float(share), 4) for share in shares])


class _Moments(NamedTuple):
    """Sums over samples: the number [C] and the features [C, d] of each class, and the products of all features [d, d]."""

    counts: Doubles
    totals: Doubles
    products: Doubles

    @classmethod
    def of(cls, z: Features, y: NDArray[np.int64], classes: int) -> Self:
        wide, members = z.astype(np.float64), np.eye(classes)[y]
        return cls(members.sum(axis=0), members.T @ wide, wide.T @ wide)

    def __add__(self, other: "_Moments") -> "_Moments":  # type: ignore[override]
        return _Moments(*(mine + its for mine, its in zip(self, other, strict=True)))

    def discriminant(self, shrinkage: float) -> tuple[Doubles, Doubles, Doubles]:
        """weight [C, d], bias [C] and the standard deviation of each feature [d], by which features are divided before shrinkage."""
        counts, number = self.counts, self.counts.sum()
        mean = self.totals.sum(axis=0) / number
        variance = np.diag(self.products) / number - mean**2
        spread = np.sqrt(np.maximum(variance, LEAST_VARIANCE * variance.mean() + 1e-9))
        means = self.totals / np.maximum(counts, 1)[:, None] / spread
        within = self.products / number / np.outer(spread, spread) - (means.T * counts / number) @ means
        weight, bias = fleet.discriminant(means, within, shrinkage)
        weight[counts == 0], bias[counts == 0] = 0, bias[counts > 0].min()
        return weight / spread, bias, spread


def _calibrated(halves: Sequence[_Moments], tests: Sequence[Sequence[ClientFeatures]]) -> tuple[float, float]:
    """Shrinkage and factor with the least log-loss of the head of one half of the clients on samples of the other half's."""
    if min(np.mean(half.counts) for half in halves) < LEAST_SAMPLES:
        return SHRINKAGES[0], FACTORS[0]
    losses = np.zeros((len(SHRINKAGES), len(FACTORS)))
    for (row, shrinkage), half in product(enumerate(SHRINKAGES), (0, 1)):
        weight, bias, _ = halves[half].discriminant(shrinkage)
        for z, y in tests[1 - half]:
            known = halves[half].counts[y] > 0
            logits = np.multiply.outer(FACTORS, z[known] @ weight.T + bias)
            right = np.take_along_axis(logits, y[None, known, None], axis=2)[..., 0]
            losses[row] += (logsumexp(logits, axis=2) - right).sum(axis=1)
    best = int(losses.argmin())
    factor = FACTORS[best % len(FACTORS)]
    return SHRINKAGES[best // len(FACTORS)], factor if factor < NEAR else 1.0


def _survivals(
    halves: Sequence[_Moments],
    tests: Sequence[Sequence[ClientFeatures]],
    labelled: Sequence[Sequence[ClientFeatures]],
    shrinkage: float,
    factor: float,
) -> dict[str, Array]:
    """What devices' prediction sets need of the fleet (`edge_fl.heads.promise`); nothing where the halves say nothing of each other.

    From the discriminant of one half of the clients: of samples of the other half, and of held-out labels of heads that adapt it.
    """
    if min(np.mean(half.counts) for half in halves) < LEAST_SAMPLES:
        return {}
    rows = np.zeros((2, promise.BINS))
    for half in (0, 1):
        extras = {fleet.FLEET: _arrays(*halves[half].discriminant(shrinkage), factor)}
        counts = halves[half].counts
        plan = replace(PLAIN, fleet=fleet.FLEET, shares=(counts / counts.sum()).tolist())
        for z, y in tests[1 - half]:
            none = training_set(z[:0], y[:0], len(counts), False, plan=plan, extras=extras)
            head, known = heads.fitted("logistic", none), counts[y] > 0
            if known.any():
                rows[0] += promise.histogram(promise.survivals(head.logits(z[known]), y[known]))
        for z, y in labelled[1 - half]:
            data = training_set(z, y, len(counts), False, plan=plan, extras=extras)
            found = heads.estimated("logistic", data)
            held = found.logits.astype(np.float32)
            rows[1] += promise.histogram(promise.survivals(held, data.y[found.rows]))
    return {promise.SURVIVALS: rows.astype(np.float32)}


def _arrays(weight: Doubles, bias: Doubles, spread: Doubles, factor: float) -> dict[str, Array]:
    small = max(np.abs(weight).max(), spread.max()) < np.finfo(np.float16).max / 2
    half = np.float16 if small else np.float32
    arrays = {
        "weight": (factor * weight).astype(half),
        "bias": (factor * bias).astype(np.float32),
        "spread": spread.astype(half),
    }
    return {**arrays, "factor": np.array([factor], np.float32)}
