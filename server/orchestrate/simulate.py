"""Federated training in one process: a study -> its clients -> rounds; for research, and as the baseline of a real fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from edge_fl import metrics
from edge_fl.config import Recipe
from edge_fl.console.progress import Watch, unwatched
from edge_fl.errors import BudgetExhaustedError, ConfigError
from edge_fl.learn.aggregation.robust import Robust
from edge_fl.learn.tree import Parts, to_device
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl.metrics import Summary
from server.training import cohort as cohorts
from server.training import newcomers, rounds
from server.training.client_store import ClientStore
from server.training.delayed import DelayedFleet
from server.training.engines import choice
from server.training.fleet import Fleet
from server.training.rounds import Plan, RoundResult
from server.training.study import Study

Reports = Mapping[str, Mapping[str, float]]  # metrics by client


@dataclass(frozen=True)
class SimulationResult:
    """What a run gave: its shared parts, the reports of every evaluated round, of the closing step, and of the unseen clients.

    `spent` says why it ended before its last round, if it did.
    """

    method: Method
    shared: Parts
    evaluated: Mapping[int, Reports]
    closing: Reports
    unseen: Reports = field(default_factory=dict)
    spent: BudgetExhaustedError | None = None

    def last(self) -> dict[str, Summary]:
        """Each metric over all clients after the last round and the closing step."""
        return {**metrics.summarise_reports(list(self.reports().values())), **self._of_unseen()}

    def reports(self) -> dict[str, dict[str, float]]:
        """Each client's metrics after the last round and the closing step."""
        rounds = self.evaluated.get(max(self.evaluated, default=0), {})
        return {client: {**rounds.get(client, {}), **report} for client, report in self.closing.items()}

    def _of_unseen(self) -> dict[str, Summary]:
        return metrics.summarise_reports(list(self.unseen.values()))

    def best_by_validation(self) -> tuple[int, dict[str, Summary]] | None:
        """The round whose mean validation accuracy was highest, and its metrics; None without validation data."""
        numbers = sorted(self.evaluated)
        summaries = [metrics.summarise_reports(list(self.evaluated[number].values())) for number in numbers]
        best = metrics.best_round([_validation(summary) for summary in summaries])
        return None if best is None else (numbers[best], summaries[best])


def fleet(study: Study, method: Method, device: str, say: Callable[[str], None] = lambda line: None) -> Fleet:
    """The study's clients, simulated here by the recipe's engine; `say` hears which one was chosen, and why."""
    recipe, cohort = study.recipe, study.recipe.cohort
    effort = choice.Effort(recipe.rounds, cohort)
    clients = choice.build(recipe.engine, ClientStore.of(study, device), method, effort, say)
    if not (size := cohort.buffer_size):
        return clients
    return DelayedFleet(clients, method, recipe.seed, buffer_size=size, max_staleness=cohort.max_staleness)


def run(
    study: Study,
    progress: Callable[[RoundResult], None] = lambda result: None,
    ending: Callable[[Method, Parts, Fleet], None] = lambda method, shared, fleet: None,
    say: Callable[[str], None] = lambda line: None,
    watch: Watch = unwatched,
) -> SimulationResult:
    """The whole run of the study's recipe. `progress` sees every round; `ending` sees the clients once more before they are gone.

    `say` hears which engine was chosen, `watch` how far the rounds are and the clients within them. Raises SpentError when no round was
    possible at all.
    """
    device = torch_device(study.recipe.device)
    method = build_method(study.spec)
    cohorts.require_bufferable(study.recipe.cohort, method, "simulated")
    method.net.to(device)
    clients = fleet(study, method, device, say)
    shared, evaluated, trained = to_device(steps.start(method), device), {}, set[str]()
    reached, spent = study.recipe.rounds, None
    try:
        for result in rounds.run(method, clients, plan(study.recipe), shared, watch=watch):
            shared = result.shared
            trained.update(result.answered)
            if result.metrics:
                evaluated[result.round] = result.metrics
            progress(result)
    except BudgetExhaustedError as error:
        if not trained:
            raise
        reached, spent = result.round, error
    last = method.at(max(reached, 1))
    shared, closing = rounds.close(last, clients, shared, reached, watch=watch)
    ending(last, shared, clients)
    unseen = _meet_unseen(study, last, shared, clients, trained)
    spent = rounds.with_epsilon(spent, closing) if spent else None
    return SimulationResult(method, shared, evaluated, closing, unseen, spent)


def _meet_unseen(study: Study, method: Method, shared: Parts, clients: Fleet, trained: set[str]) -> Reports:
    unseen = study.unseen_data()
    if not unseen:
        return {}
    samples = {id: len(data.train) for id, data in study.data().items() if id in trained}
    model = newcomers.newcomers_model(method, shared, clients.personal_state(), samples)
    return newcomers.meet(model, unseen, torch_device(study.recipe.device)) if model else {}


def plan(recipe: Recipe) -> Plan:
    """The part of a recipe that the round loop needs."""
    validation = recipe.validation
    return Plan(
        recipe.rounds,
        recipe.seed,
        recipe.cohort,
        recipe.evaluate_every,
        Robust(validation.centre, validation.trim, validation.clip),
    )


def torch_device(name: str) -> str:
    """Where torch computes: for "auto", CUDA when there is one. Raises ConfigError for a device that torch does not have."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {name!r}: {str(error).splitlines()[0]}; expected auto, cpu or cuda"
        ) from error
    return name


def _validation(summary: Mapping[str, Summary]) -> float:
    for name in (metrics.PERSONAL_VALIDATION_BEFORE, metrics.GLOBAL_VALIDATION):
        if name in summary:
            return summary[name].mean
    return float("nan")
