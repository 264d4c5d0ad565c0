"""The fleet's head of a method without a shared one, from the features of simulated clients: a linear discriminant.

Each client's part is a sum: the number of samples, the sum of the features and that of their products, of each class. So it is what devices
could add up, and in a fleet of devices class statistics take its place (`edge_fl_server.orchestrate.class_statistics`).
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from edge_fl.data.samples import ClientData
from edge_fl.heads import fleet
from edge_fl.learn.batches import in_batches
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl.wire import tensors

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

    def features(data: ClientData) -> ClientFeatures:
        x = torch.from_numpy(data.train.x[:MOST]).to(device)
        z = in_batches(lambda batch: steps.exported_features(method, shared, batch), x)
        return z.cpu().numpy(), data.train.y[:MOST]

    return of_features(map(features, clients), classes)


def of_features(clients: Iterable[ClientFeatures], classes: int) -> FleetExtra:
    """The fleet's head for all `classes` from features z [n, d] and class ids y [n] of each client."""
    counts, totals, products = np.zeros(classes), None, None
    for z, y in clients:
        if not len(y):
            continue
        z, members = z.astype(np.float64), np.eye(classes)[y]
        counts += members.sum(axis=0)
        totals = members.T @ z + (0 if totals is None else totals)
        products = z.T @ z + (0 if products is None else products)
    assert totals is not None and products is not None  # a study has training images
    return FleetExtra(*_packed(counts, totals, products))


def _packed(counts: np.ndarray, totals: np.ndarray, products: np.ndarray) -> tuple[bytes, list[float]]:
    means = totals / np.maximum(counts, 1)[:, None]
    within = (products - (means.T * counts) @ means) / counts.sum()
    weight, bias = fleet.discriminant(means, within)
    weight[counts == 0], bias[counts == 0] = 0, bias[counts > 0].min()
    small = np.abs(weight).max() < np.finfo(np.float16).max / 2
    arrays = {"weight": weight.astype(np.float16 if small else np.float32), "bias": bias.astype(np.float32)}
    return tensors.pack({fleet.FLEET: arrays}), [round(float(share), 4) for share in counts / counts.sum()]
