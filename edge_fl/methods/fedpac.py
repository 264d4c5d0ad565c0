"""FedPAC: clients share an extractor and class means of features, and the server combines a head for each client from all heads.

A client first trains its head on the frozen extractor f, then the extractor under the frozen head, with each feature pulled to the global
mean of its class (prototype). The server averages extractors by samples, prototypes by class, and gives every client its own convex
combination of all heads: the one with the least estimated error.

    z = f^t(x) before training:  π_c = n_{i,c}/n_i,  μ_c = mean z over class c,  H_i[c] = π_c μ_c,
                                 V_i = (mean ||z||² - Σ_c ||H_i[c]||²) / n_i
    s1      h_i ← argmin_h ℓ(h(z)), one epoch
    s2      f_i ← argmin_f ℓ(h_i(f(x))) + λ mean ||f(x) - c̄_y||²/d                                           Eq. 7
    server  h̃_i = Σ_j α_ij h_j,  α_i = argmin_{α ≥ 0, Σα = 1} Σ_j α_j² V_j + ||Σ_j α_j (H_i - H_j)||²        Eq. 11

Source: J. Xu, X. Tong, S.-L. Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR 2023.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_fl.learn.aggregation.mean import Update, mixture, prototypes, weighted_mean
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.losses import cross_entropy, squared_error
from edge_fl.learn.network.part import shared
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.method import HeadTier, Method, hyper

NEGLIGIBLE = 1e-3  # a smaller weight is set to 0
SMALLEST_EIGENVALUE = 0.01  # smaller ones are removed from a matrix that is not positive semidefinite
ROUNDING = 1e-9  # relative; an eigenvalue above -ROUNDING counts as 0


@dataclass(frozen=True)
class FedPAC(Method):
    """Shared extractor, prototypes and `head`, the mean of all heads; the server's memory `combined` holds each client's h̃_i."""

    lam: float = hyper(1.0, "λ, pull of a feature to its class's prototype; 0: none", low=0, source="[P]")
    head_lr: float = hyper(0.1, "learning rate of s1, momentum 0.5", low=0, source="[C]")
    title = "FedPAC"
    citation = "Xu et al., ICLR 2023"
    family = "shared extractor, heads combined by the server"
    grid = {"lam": (0.1, 1.0, 10.0)}
    sends = ("extractor", "head", "prototypes", "spread")
    parts = dict.fromkeys((*sends, "combined"), shared())
    head_tier = HeadTier(
        "native",
        "head",
        extras=("head", "prototypes"),
        updates={"head": "fitted_head", "prototypes": "class_means", "spread": "spread"},
        way="tuned",
        numbers={"lr": "head_lr", "momentum": 0.5, "weight_decay": 5e-4, "epochs": 1, "min_steps": 0},
    )
    deviations = (
        "a client that never took part gets the mean of the heads;"
        " official runs: E = 5, SGD 0.01, momentum 0.5, weight decay 5e-4"
    )

    def broadcast(self, shared: Parts, client: str) -> Parts:
        combined = shared.get("combined", {})
        head = {key: combined.get(f"{client}/{key}", t) for key, t in shared["head"].items()}
        return {"extractor": shared["extractor"], "head": head, "prototypes": shared["prototypes"]}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, count = self.net, down["prototypes"]["count"]
        z = data.features(net.extractor, down["extractor"])
        optimiser = Sgd(self.head_lr, 5e-4, momentum=0.5)
        head = fit(self.head_loss, down["head"], z, stage="s1", epochs=1, optimiser=optimiser)
        # where a class has no global prototype yet, the client's own one before training
        target = torch.where(count[:, None] > 0, down["prototypes"]["mean"], prototypes(z)["mean"])
        pull = self.lam * (count.sum() > 0)  # off in round 1, when there are no prototypes

        def loss(f: Params, batch: Batch) -> Tensor:  # Eq. 7
            features = net.extractor(f, batch.x)
            error = cross_entropy(net.head.frozen(head, features), batch.y, batch.mask)
            return error + pull * squared_error(features, target[batch.y], batch.mask)

        f = self.train(loss, down["extractor"], data, stage="s2")
        means = prototypes(data.features(net.extractor, f))
        return {"extractor": f, "head": head, "prototypes": means, "spread": spread(z)}, own

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        heads, spreads = dict[str, Params](), list[Params]()

        def without_spreads() -> Iterator[Update]:
            for update in updates:
                if {"head", "spread"} <= update.parts.keys():
                    heads[update.client] = update.parts["head"]
                    spreads.append(update.parts["spread"])
                yield replace(update, parts={n: p for n, p in update.parts.items() if n != "spread"})

        mean, combined = weighted_mean(shared, without_spreads()), dict(shared.get("combined", {}))
        for client, head in zip(heads, combine(list(heads.values()), spreads), strict=True):
            combined |= {f"{client}/{key}": t for key, t in head.items()}
        return {**mean, "combined": combined}


def spread(z: Batches) -> Params:
    """V [] and H [C, d] of features z [N, d]; rows with a label below 0 are padding."""
    means, number = prototypes(z), (z.y >= 0).sum()
    h = means["count"][:, None] * means["mean"] / number
    squared = torch.where(z.y >= 0, (z.x**2).sum(1), 0.0).sum() / number
    return {"V": ((squared - (h**2).sum()) / number).clamp(min=0), "H": h}


def combine(heads: Sequence[Params], spreads: Sequence[Params]) -> Iterator[Params]:
    """h̃_i of each client (Eq. 11); its own head where the weights cannot be found."""
    v, h = (np.array([s[key].cpu().numpy().ravel() for s in spreads], np.float64) for key in ("V", "H"))
    for own, weights in zip(heads, combination_weights(v.ravel(), h), strict=True):
        yield own if weights is None else mixture(heads, weights)


def combination_weights(
    v: NDArray[np.float64], h: NDArray[np.float64]
) -> Iterator[NDArray[np.float64] | None]:
    """α_i [N] for each of N clients from V [N] and H [N, K] (Eq. 11); None where not found."""
    for mine in h:
        bias = mine - h
        yield minimise(np.diag(v) + bias @ bias.T)


def minimise(quadratic: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """argmin of αᵀPα over α ≥ 0, Σα = 1, for symmetric P [N, N]; None if not found (docs/methods-formulas.md F11).

    Up to its scale, α is the non-negative least-squares solution of |Lᵀα|² + (Σα - 1)² with P = L Lᵀ, which an active-set method finds
    exactly.
    """
    from scipy.optimize import nnls

    if not np.isfinite(quadratic).all():
        return None
    scale = np.abs(quadratic).max() or 1.0
    values, vectors = np.linalg.eigh(quadratic / scale)
    if values.min() < -ROUNDING:
        values = np.where(values * scale < SMALLEST_EIGENVALUE, 0.0, values)
    rows = np.sqrt(values.clip(min=0))[:, None] * vectors.T
    try:
        weights, _ = nnls(np.vstack([rows, np.ones(len(rows))]), np.append(np.zeros(len(rows)), 1.0))
    except RuntimeError:  # iteration limit
        return None
    weights = weights / weights.sum()
    weights = np.where(weights < NEGLIGIBLE, 0.0, weights)
    normalised: NDArray[np.float64] = weights / weights.sum()
    return normalised
