"""Hooks that keep the results of a run's rounds, for assertions."""

from __future__ import annotations

from edge_fl_server.training.clients import Clients
from edge_fl_server.training.rounds import RoundResult, RunHooks


class RoundsSeen(RunHooks):
    """Keeps every round's result in `results`."""

    def __init__(self) -> None:
        self.results: list[RoundResult] = []

    def after_round(self, result: RoundResult, fleet: Clients) -> None:
        self.results.append(result)
