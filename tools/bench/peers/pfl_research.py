"""pfl-research (the package pfl): its simulated backend in one process, FedAvg by its own algorithm.

It takes a user's samples in the order in which they are stored; they are stored in the order of the job's batches.
"""

import dataclasses
from importlib import metadata
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F

from tools.bench.peers.job import Job, numbered
from tools.bench.peers.turns import Turns


class Network(nn.Module):
    """The job's network with the methods that pfl-research calls."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """None: nothing is evaluated."""
        return {}


class TrainingOnly(FederatedAveraging):  # type: ignore[misc]
    """FedAvg without the evaluation of iteration 0."""

    def get_next_central_contexts(self, *settings: Any) -> Any:
        contexts, model, metrics = super().get_next_central_contexts(*settings)
        return tuple(dataclasses.replace(each, do_evaluation=False) for each in contexts), model, metrics


class Paced(TrainingProcessCallback):  # type: ignore[misc]
    """Waits for the next turn after each round."""

    def __init__(self, turns: Turns, network: nn.Module) -> None:
        self._turns, self._network = turns, network

    def after_central_iteration(self, *results: Any, central_iteration: int) -> tuple[bool, Any]:
        self._turns.wait(lambda: numbered("shared", list(self._network.parameters())))
        return False, Metrics()


def run(job: Job, turns: Turns) -> None:
    """Train until the end of the input."""
    threads = torch.get_num_threads()
    turns.about |= {"version": metadata.version("pfl"), "setting": f"threads: {threads}"}
    users = {}
    for client in range(job.clients):
        x, y = job.samples(client)
        rows = torch.from_numpy(job.orders[client][0].flatten())
        users[client] = PyTorchTensorDataset((x[rows], y[rows]), user_id=str(client))
    data = FederatedDataset(users.__getitem__, MinimizeReuseUserSampler(list(users)))
    network = Network(job.network())
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    algorithm = NNAlgorithmParams(
        central_num_iterations=1_000_000,
        evaluation_frequency=1_000_000,
        train_cohort_size=job.clients,
        val_cohort_size=0,
    )
    training = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=job.lr, local_batch_size=job.batch_size
    )
    turns.wait()
    TrainingOnly().run(
        algorithm,
        SimulatedBackend(data, data, [WeightByDatapoints()]),
        model,
        training,
        callbacks=[Paced(turns, network)],
    )
