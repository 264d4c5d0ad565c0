"""Flower's simulation with Ray: one actor with one thread per core, FedAvg by its own strategy."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import flwr
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tools.bench.peers.job import Job, numbered
from tools.bench.peers.turns import Turns

client_app = ClientApp()


def run(job: Job, turns: Turns) -> None:
    """Train until the end of the input."""
    turns.about |= {"version": flwr.__version__, "setting": f"actors: {os.cpu_count()}"}
    server_app = ServerApp()

    @server_app.main()  # type: ignore[untyped-decorator]
    def serve(grid: Grid, context: Context) -> None:
        start = ArrayRecord(job.network().state_dict())
        settings = ConfigRecord({"folder": str(job.folder)})
        strategy = Paced(turns, fraction_evaluate=0.0, min_available_nodes=job.clients)
        strategy.start(grid, start, num_rounds=1_000_000, train_config=settings)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, job.clients, backend_config=resources)


class Paced(FedAvg):
    """Flower's FedAvg, which waits for its turn before each round."""

    def __init__(self, turns: Turns, **settings: Any) -> None:
        super().__init__(**settings)
        self._turns = turns

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Any:
        self._turns.wait(lambda: numbered("shared", list(arrays.to_torch_state_dict().values())))
        return super().configure_train(server_round, arrays, config, grid)


@client_app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """One epoch of a client, in an actor."""
    config = message.content["config"]
    folder, client = Path(str(config["folder"])), int(context.node_config["partition-id"])
    job, dataset = _job(folder), _dataset(folder, client)
    model = job.network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=job.lr)
    if config["server-round"] == 1:
        loader = DataLoader(dataset, batch_sampler=job.orders[client][0].tolist())
    else:
        loader = DataLoader(dataset, batch_size=job.batch_size, shuffle=True)
    for x, y in loader:
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(dataset)}),
    }
    return Message(content=RecordDict(content), reply_to=message)


@cache
def _job(folder: Path) -> Job:
    return Job(folder)


@cache
def _dataset(folder: Path, client: int) -> Any:
    """A client's images, kept in the actor."""
    return list(zip(*_job(folder).samples(client), strict=True))
