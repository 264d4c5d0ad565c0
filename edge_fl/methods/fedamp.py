"""FedAMP: each client trains its own model towards a mixture of the clients' models, in which similar models weigh more.

There is no global model. The server computes for every client a mixture u_i of all models in the round (attentive message passing). The
client trains its own model w_i, regularised towards u_i.

    server:  ξ_ij = α/σ exp(-||w_i - w_j||²/σ) for j ≠ i,  ξ_ii = 1 - Σ_{j≠i} ξ_ij,  u_i = Σ_j ξ_ij w_j    Eq. 4
    client:  w_i ← argmin_w ℓ(w) + λ/(2α) ||w - u_i||²                                                    Eq. 5

Source: Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei, Y. Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI
2021.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Mean, Update
from edge_fl.learn.batches import Batches
from edge_fl.learn.losses import unit
from edge_fl.learn.network.part import shared
from edge_fl.learn.objective import pulled
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.method import PERSONAL, PERSONAL_MODEL, SHARED_MODEL, HeadTier, Method, hyper


@dataclass(frozen=True)
class FedAMP(Method):
    """Personal model w_i, which is sent; the server's memory `mixed` holds the mixture u_i of every client.

    Unless `distances` is "absolute", α and σ of Eq. 4 count in units of the median squared distance of the round's models.
    """

    lam: float = hyper(0.02, "λ, the pull towards u_i is λ/α; 0 is Local", low=0, source="[D]; 1 [R]")
    alpha: float = hyper(0.1, "α_k; absolute 1e4 [R], 1 in PFLlib", low=1e-12, source="[D]")
    sigma: float = hyper(
        1.0, "σ, squared distance at which attention fades; absolute 1e6 [R]", low=1e-12, source="[D]"
    )
    distances: str = hyper(
        "relative",
        "unit of α and σ in Eq. 4: the median of the models' distances, or 1",
        choices=("relative", "absolute"),
        source="[D]",
    )
    variant: str = hyper(
        "fedamp", "attention by distance, or by cosine", choices=("fedamp", "heur"), source="[P]"
    )
    own_weight: float = hyper(0.5, "ξ_ii of `heur`", low=0, high=1, source="[R]")
    scale: float = hyper(10.0, "s of `heur`, attention ~ exp(s cos)", low=0, source="[R]")

    title = "FedAMP"
    citation = "Huang et al., AAAI 2021"
    family = "personal models, mixed"
    grid = {"lam": (0.02, 0.1, 0.5), "sigma": (0.3, 1.0, 3.0)}
    parts = {**SHARED_MODEL, "mixed": shared(), **PERSONAL_MODEL}
    sends = ("extractor", "head")
    exports = ()
    head_tier = HeadTier("none")
    deviations = (
        "α and σ of Eq. 4 count in units of the median squared distance of the round's models;"
        " attention to others that adds up to more than 1 is scaled to 1"
    )

    def init_shared(self) -> Parts:
        return {**super().init_shared(), "mixed": {}}

    def broadcast(self, shared: Parts, client: str) -> Parts:
        def pick(part: str) -> Params:
            return {key: shared["mixed"].get(f"{client}/{part}/{key}", t) for key, t in shared[part].items()}

        return {part: pick(part) for part in ("extractor", "head")}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        loss = pulled(self.loss, down, self.lam / self.alpha)  # Eq. 5
        w = tree.unprefixed(PERSONAL, own)
        w = self.train(loss, w, data, stage="personal")
        return w, tree.prefixed(PERSONAL, w)

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        sent = {update.client: update.parts for update in updates}
        models = list(sent.values())
        flat = vectors(models)
        median = median_distance(flat) if self.distances == "relative" else 1.0
        if self.variant == "heur":
            weights = attention_by_cosine(flat, self.own_weight, self.scale)
        else:
            weights = attention_by_distance(flat, self.alpha * median, self.sigma * median)
        mixed = dict(shared["mixed"])
        for client, model in zip(sent, mixtures(models, weights), strict=True):
            mixed |= {
                f"{client}/{part}/{key}": t for part, params in model.items() for key, t in params.items()
            }
        return {**shared, "mixed": mixed}


def median_distance(models: Tensor) -> float:
    """Median of the squared distances between models [n, D]; 0 for fewer than two, or equal ones."""
    pairs = torch.pdist(models)
    return float(pairs.median() ** 2) if len(pairs) else 0.0


def attention_by_distance(models: Tensor, alpha: float, sigma: float) -> Tensor:
    """FedAMP's weights ξ [n, n] of models [n, D] (Eq. 4); a row's weights for others that sum to more than 1 are scaled to 1."""
    if sigma == 0:  # all models are equal
        return torch.eye(len(models), dtype=models.dtype, device=models.device)
    squared = torch.cdist(models, models, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    others = _off_diagonal(models) * (alpha / sigma) * torch.exp(-squared / sigma)
    return _with_own_weight(others / others.sum(1, keepdim=True).clamp(min=1))


def attention_by_cosine(models: Tensor, own: float, scale: float) -> Tensor:
    """HeurFedAMP's weights ξ [n, n] (Eq. 9): `own` for the client itself, the rest in proportion to exp(scale * cosine)."""
    directions = unit(models)
    others = _off_diagonal(models) * torch.exp(scale * (directions @ directions.T))
    return _with_own_weight((1 - own) * others / others.sum(1, keepdim=True).clamp(min=1e-300))


def mixtures(models: Sequence[Parts], weights: Tensor) -> Iterator[Parts]:
    """u_i = Σ_j ξ_ij w_j for each row of `weights` [n, n], running statistics included."""
    for row in weights.tolist():
        means = {name: Mean() for name in models[0]}
        for model, weight in zip(models, row, strict=True):
            for name, mean in means.items():
                mean.add(model[name], weight)
        yield {name: value for name, mean in means.items() if (value := mean.value()) is not None}


def vectors(models: Sequence[Parts]) -> Tensor:
    """The parameters of each model in one float64 row, [n, D], without running statistics."""
    each = (tree.parameters(model) for model in models)
    return torch.stack([torch.cat([t.flatten() for _, t in sorted(w.items())]).double() for w in each])


def _off_diagonal(models: Tensor) -> Tensor:
    return 1 - torch.eye(len(models), dtype=models.dtype, device=models.device)


def _with_own_weight(others: Tensor) -> Tensor:
    """ξ_ii = 1 - Σ_{j≠i} ξ_ij."""
    return others + torch.diag(1 - others.sum(1))
