"""FedCAC: each client averages the values that matter most to it only with similar clients, and all other values with everybody.

Clients train whole models. In each tensor a share of the values is critical: those whose change matters most. Critical values are averaged
only over clients with critical values in similar places, the others over all clients. With the rounds a client gets fewer collaborators, in
the end none.

    server, from w_i^t as sent and w_i as trained:
    c_i = |(w_i - w_i^t) ⊙ w_i|,  M_i marks the τ largest c_i of each tensor
    O_ij = 1 - ||M_i - M_j||_1 / (2 ||M_i||_1),  collaborators: O_ij ≥ mean O + t/β (max O - mean O)
    u_i = mean of w_j over i and its collaborators,  w_i^{t+1} = M_i ⊙ u_i + (1 - M_i) ⊙ Σ_j p_j w_j

Source: X. Wu, X. Liu, J. Niu, G. Zhu, S. Tang, "Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through
Cautiously Aggressive Collaboration", ICCV 2023.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update, mixture, weighted_mean
from edge_fl.learn.network.part import shared
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.method import SHARED_MODEL, HeadTier, Method, hyper

ROUNDING = 1e-6  # relative; a bias before BatchNorm has no gradient and changes by rounding errors


@dataclass(frozen=True)
class FedCAC(Method):
    """Shared model; the server's memory holds each client's mask M_i (`critical`) and mixture u_i (`mixed`)."""

    tau: float = hyper(
        0.5, "τ, share of critical values", low=0, high=1, source="CIFAR-10; 0.4 for CIFAR-100 [C]"
    )
    beta: float = hyper(
        100.0, "β, rounds until no clients collaborate", low=1, source="CIFAR-10; 170 for CIFAR-100 [C]"
    )
    round: int = 1

    title = "FedCAC"
    citation = "Wu et al., ICCV 2023"
    family = "global model, mixed per client"
    grid = {"tau": (0.3, 0.5, 0.7), "beta": (10.0, 100.0)}
    parts = {**SHARED_MODEL, "critical": shared(), "mixed": shared()}
    sends = ("extractor", "head")
    head_tier = HeadTier("adapted", "head", ("head",))
    deviations = "the server computes the masks and the clients' models, so that only models travel"

    def at(self, round: int) -> Self:
        return replace(super().at(round), round=round)

    def init_shared(self) -> Parts:
        return {**super().init_shared(), "critical": {}, "mixed": {}}

    def broadcast(self, shared: Parts, client: str) -> Parts:
        def value(part: str, name: str, mean: Tensor) -> Tensor:
            key = f"{client}/{part}/{name}"
            if key not in shared["mixed"]:
                return mean
            return torch.where(shared["critical"][key], shared["mixed"][key], mean)

        return {part: {n: value(part, n, t) for n, t in shared[part].items()} for part in self.sends}

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        updates = list(updates)
        whole = [update for update in updates if set(self.sends) <= update.parts.keys()]
        masks = [critical(self.broadcast(shared, u.client), u.parts, self.tau) for u in whole]
        models = [named(update.parts) for update in whole]
        memory: Parts = {"critical": dict(shared["critical"]), "mixed": dict(shared["mixed"])}
        for place, chosen in enumerate(collaborators(masks, self.round / self.beta)):
            mixed = mixture(models, chosen.double() / chosen.sum())
            for part, values in (("critical", masks[place]), ("mixed", mixed)):
                memory[part] |= {f"{whole[place].client}/{name}": t for name, t in values.items()}
        return {**weighted_mean(shared, updates), **memory}


def named(parts: Parts) -> Params:
    """The parameters of a model by part and name."""
    return {"/".join(path): t for path, t in tree.parameters(parts).items()}


def critical(before: Parts, after: Parts, share: float) -> Params:
    """M, bool: in each tensor the values with the largest |change * value|; a change within rounding is none."""
    start, masks = named(before), dict[str, Tensor]()
    for name, value in named(after).items():
        change = value - start[name]
        weight = torch.where(change.abs() > ROUNDING * value.abs(), (change * value).abs(), 0.0)
        number = int(share * value.numel())
        least = weight.flatten().topk(number).values[-1] if number else torch.inf
        masks[name] = (weight >= least) & (weight > 0)
    return masks


def collaborators(masks: list[Params], progress: float) -> Tensor:
    """For each of n clients the clients whose models it mixes, itself included, bool [n, n]."""
    if not masks:
        return torch.zeros(0, 0, dtype=torch.bool)
    flat = torch.stack([torch.cat([t.flatten() for _, t in sorted(mask.items())]).double() for mask in masks])
    itself = torch.eye(len(flat), dtype=torch.bool, device=flat.device)
    different = torch.cdist(flat, flat, p=1)
    overlap = 1 - different / (2 * flat.sum(1, keepdim=True)).clamp(min=1)
    if len(others := overlap[~itself]) == 0:
        return itself
    mean, largest = others.mean(), others.max()
    return (overlap >= mean + progress * (largest - mean)) | itself
