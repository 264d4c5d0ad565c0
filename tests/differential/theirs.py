"""PFLlib's side: its own server and client objects from a checkout, with our data, initial weights and one batch per client.

Nothing of PFLlib is part of this repository. Its files stay as they are; in memory, three things are replaced: the function that reads a
client's data from disk, the batch size, which becomes each client's number of images, and the method that counts correct predictions, which
is called once per image, so that the comparison knows which images are predicted correctly.
"""

import importlib
import io
import random
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from edge_fl.errors import InputError
from edge_fl.learn.network.part import Net
from edge_fl.learn.tree import BUFFER, Params
from tests.differential.ours import RECIPE, Hits, Ours, tensors
from tools.bench.peers.pfllib_arguments import DEFAULTS

LR = RECIPE.method.optimiser.lr
ARGUMENTS: dict[str, Any] = {
    **DEFAULTS,
    "dataset": "ours",
    "num_clients": RECIPE.data.clients,
    "global_rounds": RECIPE.rounds,
    "local_epochs": RECIPE.method.epochs,
    "local_learning_rate": LR,
}


@dataclass(frozen=True)
class Theirs:
    """A method of PFLlib.

    server: module and class of its server. arguments: those of its main.py that the method reads. counts: the server's method that counts
    correct predictions. start: gives its clients the initial values of networks that only this method has. two_batches: clients train with
    two batches, each of all images.
    """

    server: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    counts: str = "test_metrics"
    start: Callable[[Any, Ours], None] | None = None
    two_batches: bool = False


class _FinishedError(Exception):
    """Ends PFLlib's training after the last round that is compared."""


def load(checkout: Path, methods: Iterable[Theirs] = ()) -> None:
    """Make PFLlib importable, and import the servers of `methods`. Raises InputError."""
    system = checkout / "system"
    if not (system / "flcore" / "servers").is_dir():
        raise InputError(f"{checkout}: no folder system/flcore/servers, expected a checkout of PFLlib")
    sys.path.insert(0, str(system.resolve()))
    try:
        for method in methods:
            _server_class(method)
    except ModuleNotFoundError as error:
        raise InputError(
            f"{checkout}: PFLlib needs the package {error.name}, which is not installed"
        ) from error


def run(method: Theirs, ours: Ours, changes: Iterable[Callable[[Any], None]] = ()) -> Hits:
    """Which test images PFLlib predicts correctly: before round 1, then after each round. `changes` are applied before training."""
    data = _Data(ours, repeat=2 if method.two_batches else 1)
    found: Hits = []
    with _replaced(data, method), redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        arguments = {**ARGUMENTS, "num_classes": ours.classes, "batch_size": 10_000, **method.arguments}
        server = _server_class(method)(Namespace(**arguments, model=_model(ours)), 0)
        if method.start:
            method.start(server, ours)
        for change in changes:
            change(server)
        _record(server, method.counts, data, found)
        with suppress(_FinishedError):
            server.train()
    return found


def load_part(module: nn.Module, params: Params) -> None:
    """Copy a part of ours into a module."""
    module.load_state_dict({name.removeprefix(BUFFER): t.clone() for name, t in params.items()})


def _server_class(method: Theirs) -> Callable[..., Any]:
    module, _, name = method.server.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"flcore.servers.{module}"), name)
    return found


def _model(ours: Ours) -> nn.Module:
    """PFLlib's model of base and head, with our network and its initial values."""
    net: Net = ours.method.net
    parts = []
    for name in ("extractor", "head"):
        module = net.parts[name].build()
        load_part(module, net.parts[name].init())
        parts.append(module)
    split: nn.Module = importlib.import_module("flcore.trainmodel.models").BaseHeadSplit(*parts)
    return split


class _Data:
    """The clients' images as PFLlib reads them; with `only`, one test image of each client."""

    def __init__(self, ours: Ours, repeat: int) -> None:
        self.only: int | None = None
        self._clients = [(tensors(data.train), tensors(data.test)) for data in ours.data.values()]
        self._repeat = repeat

    def read(self, dataset: str, client: int, is_train: bool = True) -> dict[str, np.ndarray]:
        """The replacement of PFLlib's read_data."""
        train, test = self._clients[client]
        if is_train:
            x, y = (torch.cat([t] * self._repeat) for t in train)
        else:
            x, y = test if self.only is None else (t[self.only : self.only + 1] for t in test)
        return {"x": x.numpy(), "y": y.numpy()}


@contextmanager
def _replaced(data: _Data, method: Theirs) -> Iterator[None]:
    client = importlib.import_module("flcore.clients.clientbase")
    init = client.Client.__init__

    def one_batch(
        self: Any, args: Namespace, id: int, train_samples: int, *rest: Any, **keywords: Any
    ) -> None:
        args.batch_size = train_samples // (2 if method.two_batches else 1)
        init(self, args, id, train_samples, *rest, **keywords)

    def in_order(samples: Any, size: int, *, drop_last: bool, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(samples, size, drop_last=drop_last)

    loader = in_order if method.two_batches else client.DataLoader
    with (
        patch.object(importlib.import_module("utils.data_utils"), "read_data", data.read),
        patch.object(client.Client, "__init__", one_batch),
        patch.object(client, "DataLoader", loader),
    ):
        yield


def _record(server: Any, counts: str, data: _Data, found: Hits) -> None:
    count = getattr(server, counts)

    def recorded() -> Any:
        hits = []
        for client in server.clients:
            for data.only in range(client.test_samples):
                hits.append(getattr(client, counts)()[0] > 0)
        data.only = None
        found.append(torch.tensor(hits))
        if len(found) > server.global_rounds:
            raise _FinishedError
        return count()

    setattr(server, counts, recorded)
