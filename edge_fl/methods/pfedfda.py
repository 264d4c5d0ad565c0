"""pFedFDA: the head of a client follows from Gaussians of its features by class, interpolated between its own and the global ones.

All classes have one covariance. Heads are not trained, they follow from means μ [C, d], covariance Σ and the client's class frequencies π_i
(linear discriminant analysis). The extractor trains under the head of the global Gaussians. Then the client interpolates between its own
estimate and the global one, as far as its data justify it.

    h(μ, Σ, π):  W = μ Σ'⁻¹,  b_c = -½ μ_c·W_c + log π_c,  Σ' = (1 - ε) Σ + ε tr(Σ)/d I,  ε = 1e-4
    train        f_i ← argmin_f ℓ(h(μ^g, Σ^g, π_i)(f(x)), y)
    estimate     μ̂_c = mean of z = f_i(x) over class c, or μ^g_c;  Σ̂ = Σ_x (z - μ̂_y)(z - μ̂_y)ᵀ/(n_i - 1) + I
    adapt        μ_i = β μ̂ + (1 - β) μ^g,  Σ_i = β' Σ̂ + (1 - β') Σ^g;  β, β' minimise ℓ in two-fold cross-validation
    server       μ^g = Σ_i p_i μ_i,  Σ^g = Σ_i p_i Σ_i

Source: C. McLaughlin, L. Su, "Personalized Federated Learning via Feature Distribution Adaptation", NeurIPS 2024.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from edge_fl.learn import tree
from edge_fl.learn.batches import Batches
from edge_fl.learn.losses import one_hot
from edge_fl.learn.network.part import history, personal, shared
from edge_fl.learn.random import key_of, uniform
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.method import HeadTier, Method, hyper
from edge_fl.seeds import seed_for

EPSILON = 1e-4  # shrinkage of Σ, and of class frequencies
FEWEST = 2  # a class with at most so many samples takes the global mean


@dataclass(frozen=True)
class PFedFDA(Method):
    """Shared extractor and Gaussians; the personal head is computed from the adapted Gaussians."""

    single_beta: bool = hyper(False, "one β for means and covariance", source="two [C]")
    iterations: int = hyper(10, "limit of L-BFGS iterations for β; 0: β = 0.5", low=0, source="[C]")
    ridge: float = hyper(1.0, "added to the diagonal of Σ̂", low=0, source="[C]")

    title = "pFedFDA"
    citation = "McLaughlin and Su, NeurIPS 2024"
    family = "shared extractor, Gaussian heads"
    vectorises = False
    given = {"extractor": shared(), "gaussians": shared()}
    parts = {**given, "head": personal(), "history": history(trained=0.0)}
    head_tier = HeadTier("adapted", "head")
    deviations = (
        "statistics are those of the trained extractor (code: features gathered while it trains); between rounds the head is that of the"
        " last participation (code: adapted for every evaluation); the last round has as many clients as the others (code: all)"
    )

    def init_shared(self) -> Parts:
        c, d = self.net.classes, self.net.feature_dim
        mean = uniform(key_of(seed_for(self.net.seed, "init.gaussians")), c, d)
        return {**super().init_shared(), "gaussians": {"mean": mean, "covariance": torch.eye(d)}}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        head = discriminant(down["gaussians"], frequencies(data))
        f = self.fit_extractor(down["extractor"], head, data, stage="train")
        adapted = self._adapted(f, down["gaussians"], data)
        return {"extractor": f, "gaussians": adapted}, self._head(adapted, own, data)

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        return {}, self._head(self._adapted(down["extractor"], down["gaussians"], data), own, data)

    def _head(self, adapted: Params, own: Parts, data: Batches) -> Parts:
        trained = {"trained": torch.ones_like(own["history"]["trained"])}
        return {"head": discriminant(adapted, frequencies(data)), "history": trained}

    def _adapted(self, extractor: Params, known: Params, data: Batches) -> Params:
        """μ_i and Σ_i on the features of an extractor."""
        z = data.features(self.net.extractor, extractor)
        beta = self._beta(z, tree.map(Tensor.double, known), frequencies(data).double())
        x = z.x.double()
        return tree.map(Tensor.float, mixed(beta, self._estimate(x, z.y, known), known))

    def _estimate(self, z: Tensor, y: Tensor, known: Params) -> Params:
        """μ̂ and Σ̂ of features z [n, d] in float64."""
        member = one_hot(y, self.net.classes).to(z.dtype)
        count, fallback = member.sum(0)[:, None], known["mean"].to(z.dtype)
        mean = torch.where(count > FEWEST, member.T @ z / count.clamp(min=1), fallback)
        centred = z - mean[y]
        ridge = self.ridge * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        return {"mean": mean, "covariance": centred.T @ centred / max(len(z) - 1, 1) + ridge}

    def _beta(self, z: Batches, known: Params, prior: Tensor) -> Tensor:
        """(β, β'); 0 where no class has two samples to validate with."""
        from scipy.optimize import minimize

        y, x = z.y, z.x.double()
        member = one_hot(y, self.net.classes)
        half = (member.cumsum(0) - 1)[
            torch.arange(len(y), device=y.device), y
        ] % 2  # samples of a class alternate
        kept = member.sum(0)[y] > 1
        if not bool(kept.any()):
            return x.new_zeros(2)
        folds = [(kept & (half == k), kept & (half != k)) for k in (0, 1)]
        estimates = [self._estimate(x[rest], y[rest], known) for _, rest in folds]

        def error(values: Any) -> tuple[float, Any]:
            beta = x.new_tensor(values).requires_grad_()
            both = beta.expand(2)
            total = x.new_zeros(())
            with torch.enable_grad():
                for (test, _), estimate in zip(folds, estimates, strict=True):
                    head = discriminant(mixed(both, estimate, known), prior)
                    total = total + F.cross_entropy(x[test] @ head["weight"].T + head["bias"], y[test])
                (gradient,) = torch.autograd.grad(total, beta)
            return float(total.detach()), gradient.cpu().numpy()

        start = [0.5] * (1 if self.single_beta else 2)
        limits, settings = [(0.0, 1.0)] * len(start), {"maxiter": self.iterations, "gtol": 1e-3}
        found = (
            minimize(error, start, jac=True, bounds=limits, options=settings).x if self.iterations else start
        )
        return x.new_tensor(found).expand(2)

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        even = torch.full((self.net.classes,), 1 / self.net.classes, device=x.device)
        general = discriminant(parts["gaussians"], even)
        head = tree.where(parts["history"]["trained"], parts["head"], general)
        return self.classify({**parts, "head": head}, x)


def frequencies(data: Batches) -> Tensor:
    """π_i [C], positive for absent classes too."""
    share = data.counts / data.counts.sum() + EPSILON
    return share / share.sum()


def mixed(beta: Tensor, estimate: Params, known: Params) -> Params:
    """β and β' of the estimate, the rest of the global Gaussians."""
    return {
        key: b * estimate[key] + (1 - b) * known[key]
        for key, b in zip(("mean", "covariance"), beta, strict=True)
    }


def discriminant(gaussians: Params, prior: Tensor) -> Params:
    """h(μ, Σ, π): a linear head."""
    mean, covariance = gaussians["mean"], gaussians["covariance"]
    size = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device) * covariance.trace()
    weight = torch.linalg.solve((1 - EPSILON) * covariance + EPSILON / len(covariance) * size, mean.T).T
    return {"weight": weight.contiguous(), "bias": -0.5 * (mean * weight).sum(1) + prior.log()}
