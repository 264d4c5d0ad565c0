"""The fleet's head from the features of simulated clients: a linear discriminant, or its mean with the method's shared head.

Clients with different classes pull a shared head apart, while class means and a covariance are the same wherever the samples are. The mean
of both heads' logits is near the better one (docs/personal-heads.md has figures), also where the shared head has hardly been trained.

Each client's part is a sum: the number of samples, the sum of the features and that of their products, of each class. So it is what devices
could add up, and in a fleet of devices class statistics take its place (`edge_fl_server.orchestrate.class_statistics`).
"""

from collections.abc import Iterable
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from edge_fl.data.samples import ClientData
from edge_fl.heads import fleet, training_set
from edge_fl.heads.head import Extras
from edge_fl.heads.plan import PLAIN, HeadPlan
from edge_fl.learn.batches import in_batches
from edge_fl.learn.tree import Parts, to_arrays
from edge_fl.methods.contract import steps, tiers
from edge_fl.methods.contract.method import Method
from edge_fl.wire import tensors

NOTHING: Extras = MappingProxyType({})
MOST = 500
"""Training samples of a client whose features are computed, the first ones: means and covariance need no more."""


ClientFeatures = tuple[NDArray[np.float32], NDArray[np.int64]]


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
    counts, totals, products = np.zeros(classes), None, None
    for z, y in clients:
        if not len(y):
            continue
        z, members = z.astype(np.float64), np.eye(classes)[y]
        counts += members.sum(axis=0)
        totals = members.T @ z + (0 if totals is None else totals)
        products = z.T @ z + (0 if products is None else products)
    assert totals is not None and products is not None  # a study has training images
    means = totals / np.maximum(counts, 1)[:, None]
    within = (products - (means.T * counts) @ means) / counts.sum()
    weight, bias = fleet.discriminant(means, within)
    weight[counts == 0], bias[counts == 0] = 0, bias[counts > 0].min()
    if "weight" in extras.get(plan.fleet, {}):
        no_samples = np.empty((0, means.shape[1]), np.float32)
        shared = fleet.received(
            training_set(no_samples, np.empty(0, np.int64), classes, False, plan=plan, extras=extras)
        )
        assert shared is not None  # it is in the extras
        weight, bias = (weight + shared.weights) / 2, (bias + shared.bias) / 2
    return FleetExtra(*_packed(weight, bias, counts))


def _packed(weight: np.ndarray, bias: np.ndarray, counts: np.ndarray) -> tuple[bytes, list[float]]:
    small = np.abs(weight).max() < np.finfo(np.float16).max / 2
    arrays = {"weight": weight.astype(np.float16 if small else np.float32), "bias": bias.astype(np.float32)}
    return tensors.pack({fleet.FLEET: arrays}), [round(float(share), 4) for share in counts / counts.sum()]
