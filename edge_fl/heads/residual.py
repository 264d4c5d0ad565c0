"""Residuals on the served head, for devices that are configured for an MLP or a support vector machine.

    logits = served head + s · residual(φ(z))

The residual is fitted with the served head's logits as given: an MLP by SGD on cross-entropy, whose last layer starts at zero; a linear one
by the squared hinge of the margin to the best other class (K. Crammer and Y. Singer, 2001). s is the mean of 0, 1/2 and 1, weighted as the
candidates of the served head are: by a prior and by the log-likelihood of samples that the residual was not fitted on. So with few labels
it is the served head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from edge_fl.heads.descent import probabilities
from edge_fl.heads.fleet import Adapted
from edge_fl.heads.head import Features, Graph, Head, TrainingSet, require_features
from edge_fl.heads.linear import Doubles, direction
from edge_fl.heads.mlp import Mlp, WithMlp
from edge_fl.heads.served import DOUBT, Estimate, Rows

SHARES = (0.0, 0.5, 1.0)
LOG_PRIORS = np.array([0.0, -1.0, -2.0])
FOLDS = 5
STRENGTH, ITERATIONS = 1.0, 200
LOWEST = -30.0
"""What a logit is at least, from the highest one of the sample, where a residual is fitted: the zero of logits means nothing."""
EXCLUDED = -1e6
"""Logit of a class that the served head excludes, where an MLP adds to it."""


@final
@dataclass(frozen=True, eq=False)
class FleetMlp(WithMlp):
    """The sum of an adapted fleet's head, `linear` [C, d] and `linear_bias` [C] on features or directions (`directed`), and `mlp`."""

    linear: Features
    linear_bias: Features
    directed: Features

    kind: ClassVar[str] = "fleet-mlp"
    shapes: ClassVar[Mapping[str, str]] = {
        **Mlp.shapes,
        "linear": "Cd",
        "linear_bias": "C",
        "directed": "1",
    }

    def logits(self, z: Features) -> Features:
        require_features(z, self.linear.shape[1], self.kind)
        u = direction(z) if self.directed[0] else z
        logits: Features = u @ self.linear.T + self.linear_bias + self.mlp.logits(z)
        return logits

    def graph(self, graph: Graph, z: str) -> str:
        u = graph.direction(z) if self.directed[0] else z
        return graph.node("Add", graph.affine(u, self.linear, self.linear_bias), self.mlp.graph(graph, z))


def fit(kind: str, data: TrainingSet, served: Estimate) -> Estimate:
    """The served head with a residual of this kind; with labels of a single class the served head."""
    if len(data.present) < 2:
        return served
    residual, combine = KINDS[kind]
    head = served.head
    assert isinstance(head, Adapted)
    base, held = _limited(head.logits(data.z)).astype(np.float32), _limited(served.logits)
    y = data.y[served.rows]
    added = np.zeros_like(held)
    for fold in _folds(served):
        rest = np.setdiff1d(np.arange(len(y)), fold)
        if len(np.unique(y[rest])) < 2:
            continue
        rows, out = served.rows[rest], served.rows[fold]
        added[fold] = residual(_taken(data, rows), base[rows], head)[0](data.z[out])
    likelihoods = [_log_likelihood(held + share * added, y) for share in SHARES]
    scores = LOG_PRIORS + np.array(likelihoods)
    weights = np.exp(scores - scores.max())
    share = float(weights @ np.array(SHARES) / weights.sum())
    return replace(
        served, head=combine(head, residual(data, base, head)[1], share), logits=served.logits + share * added
    )


def _limited(logits: Doubles | Features) -> Doubles:
    return np.asarray(np.maximum(logits, logits.max(axis=1, keepdims=True) + LOWEST), np.float64)


Logits = Callable[[Features], Features]
Residual = Callable[[TrainingSet, Features, Adapted], tuple[Logits, object]]
"""(data, logits of the served head [n, C], this head) -> the residual as a function of features, and what defines it."""


def _mlp(data: TrainingSet, base: Features, head: Adapted) -> tuple[Logits, Mlp]:
    found = Mlp.trained(data, base)
    return found.logits, found


def _with_mlp(head: Adapted, found: object, share: float) -> Head:
    assert isinstance(found, Mlp)
    linear, bias = head.over_all()
    return FleetMlp(
        head.classes,
        head.extractor,
        mlp=found.times(share),
        linear=linear,
        linear_bias=np.where(np.isfinite(bias), bias, EXCLUDED).astype(np.float32),
        directed=np.array([head.directed], np.float32),
    )


def _hinge(data: TrainingSet, base: Features, head: Adapted) -> tuple[Logits, Doubles]:
    """Weights [k, d + 1] of a linear residual on φ(z) divided by its length, and a constant."""
    from scipy.optimize import minimize

    length = max(float(np.sqrt(np.square(head.space(data.z)).sum(axis=1).mean())), 1e-12)

    def inputs(z: Features) -> Doubles:
        return np.hstack([head.space(z) / length, np.ones((len(z), 1))])

    u, rows, costs = inputs(data.z), np.arange(len(data.y)), data.weights
    given = base[:, head.present].astype(np.float64)
    y = np.searchsorted(head.present, data.y)

    def objective(flat: Doubles) -> tuple[float, Doubles]:
        found = flat.reshape(len(head.present), -1)
        logits = given + u @ found.T
        others = logits.copy()
        others[rows, y] = -np.inf
        best = others.argmax(axis=1)
        short = np.maximum(1 + others[rows, best] - logits[rows, y], 0)
        errors = np.zeros_like(logits)
        errors[rows, best] += 2 * costs * short
        errors[rows, y] -= 2 * costs * short
        loss = costs @ short**2 + STRENGTH / 2 * flat @ flat
        return float(loss), np.asarray(errors.T @ u + STRENGTH * found).ravel()

    start = np.zeros(len(head.present) * u.shape[1])
    options = {"maxiter": ITERATIONS}
    flat = minimize(objective, start, jac=True, method="L-BFGS-B", options=options).x
    found = np.asarray(flat.reshape(len(head.present), -1))

    def logits(z: Features) -> Features:
        every = np.zeros((len(z), head.classes), np.float32)
        every[:, head.present] = inputs(z) @ found.T
        return every

    scaled = found / np.append(np.full(u.shape[1] - 1, length), 1.0)
    return logits, scaled


def _with_linear(head: Adapted, found: object, share: float) -> Head:
    assert isinstance(found, np.ndarray)
    weights = head.weights + np.float32(share) * found[:, :-1].astype(np.float32)
    bias = head.bias + np.float32(share) * found[:, -1].astype(np.float32)
    return replace(head, weights=weights, bias=bias)


def _folds(served: Estimate) -> list[Rows]:
    """The folds of the served head, several joined to one so that there are at most FOLDS."""
    joined = [served.folds[start::FOLDS] for start in range(min(FOLDS, len(served.folds)))]
    return [np.concatenate(folds) for folds in joined]


def _taken(data: TrainingSet, rows: Rows) -> TrainingSet:
    groups = data.groups[rows] if len(data.groups) else data.groups
    return replace(data, z=data.z[rows], y=data.y[rows], groups=groups)


def _log_likelihood(logits: Doubles, y: Rows) -> float:
    right = probabilities(logits.astype(np.float32))[np.arange(len(y)), y]
    return float(np.log((1 - DOUBT) * right + DOUBT / logits.shape[1]).sum())


KINDS: dict[str, tuple[Residual, Callable[[Adapted, object, float], Head]]] = {
    "mlp": (_mlp, _with_mlp),
    "svm": (_hinge, _with_linear),
}
"""By kind of head: what fits the residual, and what joins it with the served head."""
