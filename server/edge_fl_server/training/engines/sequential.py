"""The reference engine: simulated clients, one after the other, in this process. Tests compare every other engine with it."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import to_device
from edge_fl.methods.contract.client import Client
from edge_fl.methods.contract.method import Method
from edge_fl_server.training.clients import MEASURES, ClientId, Downs, Step
from edge_fl_server.training.engines.personal import PersonalParts
from edge_fl_server.training.engines.simulated import SimulatedClients, take_step


class SequentialClients(SimulatedClients):
    """Clients by id, with personal parts in memory or in `folder`."""

    engine = "sequential"

    def __init__(
        self, clients: Mapping[ClientId, Client], method: Method, folder: Path | None = None
    ) -> None:
        super().__init__(sorted(clients), PersonalParts(method, folder))
        self._clients = clients

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        for id in downs:
            client = self._clients[id]
            own = to_device(self.personal.get(id), client.device)
            update, own = take_step(step, client, method, round, downs[id], own)
            if step not in MEASURES:
                self.personal.put(id, own)
            yield update
