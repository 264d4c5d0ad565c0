"""Hooks that keep the results of a run, for assertions."""

from edge_fl_server.training.clients import Clients
from edge_fl_server.training.rounds import FinalResult, RoundResult, RunHooks


class RoundsSeen(RunHooks):
    """Keeps every round's result in `results`, and that of the final personalisation in `final`."""

    def __init__(self) -> None:
        self.results: list[RoundResult] = []
        self.final: list[FinalResult] = []

    def after_round(self, result: RoundResult, clients: Clients) -> None:
        self.results.append(result)

    def after_final(self, result: FinalResult, clients: Clients) -> None:
        self.final.append(result)
