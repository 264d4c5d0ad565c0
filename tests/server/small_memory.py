"""Run as a process of its own: the vectorised engine under a limit on its memory that a chunk of all clients breaks."""

import os
import resource
import sys
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # torch.func does it at the first gradient, which would be below the limit

from edge_fl.config import MethodConfig, MethodSpec, ModelConfig
from edge_fl.data.samples import ClientData, Samples
from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.client import Client
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.engines.vector import VectorClients

CLIENTS, EXTRA_BYTES = 64, 250 * 2**20
SPEC = MethodSpec(
    ModelConfig("tests.edge_fl.methods.toy:Flat", {"feature_dim": 250}),
    InputSpec((1, 64, 64)),
    ["a", "b"],
    MethodConfig("fedavg", 1, 2),
    seed=0,
)


def client(number: int) -> Client:
    rng = np.random.default_rng(number)
    some = Samples(rng.integers(0, 256, (2, 1, 64, 64)).astype(np.uint8), np.array([0, 1]))
    return Client(f"c{number:03}", ClientData(some, some, some), 2, batch_size=2)


def trained(fleet: Clients, down: tree.Parts) -> dict[str, Update]:
    downs = dict.fromkeys(fleet.ids(), down)
    return {u.client: _summary(u) for u in fleet.each("train", 1, build_method(SPEC), downs)}


def _summary(update: Update) -> Update:
    """A few numbers of an update, which is too large to keep many of."""
    return Update(
        update.client,
        2,
        {"sums": {"/".join(p): t.sum() for p, t in tree.leaves(update.parts).items()}},
    )


def main() -> None:
    torch.set_num_threads(1)
    method, clients = build_method(SPEC), {c.id: c for c in map(client, range(CLIENTS))}
    down = steps.broadcast(method, steps.start(method), "")
    expected = trained(SequentialClients(clients, method), down)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    fleet = VectorClients(clients, method, chunk=CLIENTS)
    found = trained(fleet, down)
    assert fleet.capacity.clients < CLIENTS, "it all fitted"
    for id, update in expected.items():
        for name, value in update.parts["sums"].items():
            assert torch.isclose(found[id].parts["sums"][name], value, atol=1e-3), (id, name)
    sys.stdout.write("halved and equal")


if __name__ == "__main__":
    main()
