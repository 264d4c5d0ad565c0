"""A small fleet on scikit-learn's digits: features of a network that was trained on some of them, its linear head, and devices' labels."""

import warnings
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

from edge_fl import heads
from edge_fl.heads import HeadPlan
from edge_fl.heads.head import Array, Extras, Features, Head, TrainingSet

CLASSES, DIM, TRAINED, OWN = 10, 32, 400, 700
PLAN = HeadPlan(fleet="head")
Labels = NDArray[np.int64]


@lru_cache(maxsize=1)
def samples() -> tuple[Features, Labels, Features, Features]:
    """Features z [n, 32] and class ids y [n] of images that the network was not trained on; its weights [10, 32] and bias [10]."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order] / 16, y[order].astype(np.int64)
    net = MLPClassifier((DIM,), learning_rate_init=0.01, max_iter=40, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has not converged, like a fleet's
        net.fit(x[:TRAINED], y[:TRAINED])
    z = np.maximum(x[TRAINED:] @ net.coefs_[0] + net.intercepts_[0], 0).astype(np.float32)
    return z, y[TRAINED:], net.coefs_[1].T.astype(np.float32), net.intercepts_[1].astype(np.float32)


Z, Y, WEIGHT, BIAS = samples()
EXTRAS: dict[str, dict[str, Array]] = {"head": {"weight": WEIGHT, "bias": BIAS}}
UNSEEN = slice(OWN, None)
"""Rows that no device of the tests has a label of."""


def device(seed: int, per_class: int = 0, of: Labels | None = None, total: int = 0) -> Labels:
    """Rows of a device's labels: so many of each class of `of` [all], or so many of them in all."""
    order = np.random.default_rng(seed).permutation(OWN)
    order = order[np.isin(Y[order], np.arange(CLASSES) if of is None else of)]
    if total:
        return order[:total]
    return np.concatenate([order[Y[order] == label][:per_class] for label in np.unique(Y[order])])


def given(rows: Labels, extras: Extras = EXTRAS, plan: HeadPlan = PLAN, **options: object) -> TrainingSet:
    """The input of a fit on the labels of these rows."""
    settings = {"y": Y[rows], "classes": CLASSES, **options}
    return heads.training_set(Z[rows], unit_norm=False, plan=plan, extras=extras, **settings)  # type: ignore[arg-type]


def fit(rows: Labels, extras: Extras = EXTRAS, plan: HeadPlan = PLAN, **options: object) -> Head:
    """The served head of a device with the labels of these rows."""
    return heads.fitted("logistic", given(rows, extras, plan, **options))


def own(rows: Labels, **options: object) -> Head:
    """The head of a release without a fleet's head."""
    return fit(rows, {}, HeadPlan(), **options)


def accuracy(head: Head, y: Labels = Y, rows: Array | slice = UNSEEN) -> float:
    """Accuracy in per cent on unseen samples."""
    return 100 * float((head.predict(Z[rows]) == y[rows]).mean())


NONE = np.empty(0, np.int64)
