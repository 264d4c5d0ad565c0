"""PFLlib from a checkout, unchanged: its server's `train` runs, and instead of evaluating waits for its next turn.

In round 1 the clients' loaders have the job's batches, so that the weights can be compared; from round 2 on everything is PFLlib's own.
"""

import importlib
import importlib.util
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from tools.bench.peers.job import CLASSES, Job, numbered
from tools.bench.peers.turns import Turns

UNUSED = ("h5py",)  # imported by PFLlib to store results, which it does not do here


class Epochs:
    """A batch sampler with the next epoch's batches at each iteration."""

    def __init__(self, order: Iterator[np.ndarray]) -> None:
        self._order = order

    def __iter__(self) -> Iterator[list[int]]:
        return iter(next(self._order).tolist())


def run(job: Job, turns: Turns, checkout: Path) -> None:
    """Train until the end of the input."""
    for name in UNUSED:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = ModuleType(name)
    sys.path.insert(0, str((checkout / "system").resolve()))
    turns.about |= {"version": _commit(checkout), "setting": f"threads: {torch.get_num_threads()}"}
    os.chdir(job.folder / "system")
    module, _, name = job.case.server.partition(":")
    kind = getattr(importlib.import_module(f"flcore.servers.{module}"), name)
    server = kind(Namespace(**job.arguments, model=_model(job)), 0)
    for client in server.clients:
        _give_batches(client, iter(job.orders[client.id]))
    rounds = 0

    def next_turn() -> None:
        nonlocal rounds
        turns.wait((lambda: _weights(job, server)) if rounds else None)
        rounds += 1
        if rounds == 2:
            for client in server.clients:
                del client.load_train_data

    server.evaluate = next_turn  # PFLlib calls it once a round, before training
    server.evaluate_personalized = lambda: None
    server.train()


def _model(job: Job) -> nn.Module:
    models = importlib.import_module("flcore.trainmodel.models")
    channels, height, width = job.shape
    if job.case.linear:
        return job.started(models.Mclr_Logistic(channels * height * width, num_classes=CLASSES))
    model = job.started(models.FedAvgCNN(in_features=channels, num_classes=CLASSES, dim=job.flat))
    if not job.case.split:
        return model
    head, model.fc = model.fc, nn.Identity()
    split: nn.Module = models.BaseHeadSplit(model, head)
    return split


def _give_batches(client: Any, order: Iterator[np.ndarray]) -> None:
    """Replace a client's loader by one of the same images with the given batches."""
    read = importlib.import_module("utils.data_utils").read_client_data

    def load_train_data() -> DataLoader[Any]:
        images = read(client.dataset, client.id, is_train=True, few_shot=client.few_shot)
        return DataLoader(images, batch_sampler=Epochs(order))  # type: ignore[arg-type]

    client.load_train_data = load_train_data


def _weights(job: Job, server: Any) -> dict[str, np.ndarray]:
    found = numbered("shared", list(server.global_model.parameters())) if job.case.shared else {}
    for client in server.clients if job.case.own else ():
        model = getattr(client, "model_per", client.model)
        own = model.head if job.case.own == ("head",) and job.case.split else model
        found |= numbered(f"own/{client.id}", list(own.parameters()))
    return found


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown commit"
