"""A job: the folder with which all sides are started. It holds the data, the initial weights and the batches of round 1.

    job.json                settings
    dataset/peers/          the images in PFLlib's format
    images.npz, split.npz   the same images for edge-fl
    start.npz               initial weights in the network's order
    order.npz               per client, the rows of each epoch's batches in round 1: int64 [epochs, batches, batch size]

This module needs torch and NumPy only, because other simulators run in environments without edge-fl.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tools.bench.peers.cases import CASES, Case

CLASSES = 10
DATASET = "peers"

Network = TypeVar("Network", bound=nn.Module)


class Job:
    """A job's settings and arrays, read from its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings: dict[str, Any] = json.loads((folder / "job.json").read_text())
        self.case: Case = CASES[settings["case"]]
        self.clients: int = settings["clients"]
        self.shape: tuple[int, int, int] = tuple(settings["shape"])
        self.lr: float = settings["lr"]
        self.batch_size: int = settings["batch_size"]
        self.arguments: dict[str, Any] = settings["arguments"]

    @cached_property
    def start(self) -> list[Tensor]:
        """Initial weights in the order of the network's parameters."""
        arrays = np.load(self.folder / "start.npz")
        return [torch.from_numpy(arrays[name]) for name in arrays.files]

    @cached_property
    def orders(self) -> list[np.ndarray]:
        """Rows of the batches of round 1 by client, int64 [epochs, batches, batch size]."""
        arrays = np.load(self.folder / "order.npz")
        return [arrays[f"{client}"] for client in range(self.clients)]

    def samples(self, client: int) -> tuple[Tensor, Tensor]:
        """A client's training images [N, C, H, W] in -1..1 and labels [N]."""
        path = self.folder / "dataset" / DATASET / "train" / f"{client}.npz"
        data = np.load(path, allow_pickle=True)["data"].item()
        return torch.from_numpy(data["x"]), torch.from_numpy(data["y"])

    def network(self) -> nn.Sequential:
        """Two convolutions and two linear layers, or one linear layer, with the initial weights."""
        channels, height, width = self.shape
        if self.case.linear:
            network = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, CLASSES))
        else:
            first = [nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
            second = [nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
            hidden = [nn.Flatten(), nn.Linear(self.flat, 512), nn.ReLU()]
            network = nn.Sequential(*first, *second, *hidden, nn.Linear(512, CLASSES))
        return self.started(network)

    @property
    def flat(self) -> int:
        """Width of the convolutions' flattened output."""
        height, width = (((side - 4) // 2 - 4) // 2 for side in self.shape[1:])
        return 64 * height * width

    def started(self, network: Network) -> Network:
        """A network of the same parameters, with the initial weights."""
        for parameter, value in zip(network.parameters(), self.start, strict=True):
            parameter.data = value.clone()
        return network


def numbered(prefix: str, tensors: list[Tensor]) -> dict[str, np.ndarray]:
    """Weights for the comparison, as `<prefix>/<position>`."""
    return {f"{prefix}/{position}": tensor.detach().numpy().copy() for position, tensor in enumerate(tensors)}
