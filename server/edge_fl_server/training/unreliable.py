"""Simulated clients that drop out or are slow (`CohortConfig`): the options -cdr and -tsr of PFLlib."""

from collections.abc import Iterator, Sequence
from math import floor

from edge_fl.learn.aggregation.mean import Update
from edge_fl.methods.contract.method import Method
from edge_fl.seeds import generator
from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.training.clients import ClientId, Clients, Downs, Step, WrappedClients
from edge_fl_server.training.engines.simulated import with_epochs
from edge_fl_server.training.hybrid import Subset


class UnreliableClients(WrappedClients):
    """Clients of which `drop_out` of each round's clients train in vain, and `slow_training` of all clients train half of the epochs."""

    def __init__(self, clients: Clients, cohort: CohortConfig, seed: int) -> None:
        super().__init__(clients)
        self._drop_out, self._seed = cohort.drop_out, seed
        self._slow = drawn(clients.ids(), cohort.slow_training, seed, "slow.training")

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        if step != "train":
            yield from self._clients.each(step, round, method, downs)
            return
        lost = drawn(sorted(downs), self._drop_out, self._seed, "drop.out", round)
        shorter = with_epochs(method, max(method.epochs // 2, 1))
        for way, members in ((method, set(downs) - self._slow), (shorter, set(downs) & self._slow)):
            if members:
                updates = self._clients.each(step, round, way, Subset(downs, members))
                yield from (update for update in updates if update.client not in lost)


def drawn(
    clients: Sequence[ClientId], share: float, seed: int, purpose: str, round: int = 0
) -> frozenset[ClientId]:
    """Draw floor(share * N) of N clients."""
    count = floor(share * len(clients) + 1e-9)
    chosen = generator(seed, purpose, round).choice(len(clients), size=count, replace=False) if count else ()
    return frozenset(clients[place] for place in chosen)
