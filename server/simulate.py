"""Federated training in one process: dataset -> split -> clients -> rounds; for research, and as the baseline of a real fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from edge_fl import metrics
from edge_fl.config import Recipe, TaskSpec
from edge_fl.data import datasets, partition
from edge_fl.data.samples import ClientData, Dataset
from edge_fl.errors import ConfigError
from edge_fl.learn.robust import Robust
from edge_fl.learn.tree import Parts, to_device
from edge_fl.methods import build_method, steps
from edge_fl.methods.method import Method
from edge_fl.metrics import Summary
from edge_fl.progress import Watch, unwatched
from server import cohort as cohorts
from server import newclients, rounds
from server.fleets import engines
from server.fleets.delayed import DelayedFleet
from server.fleets.fleet import Fleet
from server.fleets.site import Site
from server.rounds import Plan, RoundResult

Reports = Mapping[str, Mapping[str, float]]  # metrics by client


@dataclass(frozen=True)
class Study:
    """What several methods can be compared on: a recipe, its dataset, and which images each client has."""

    recipe: Recipe
    dataset: Dataset = field(repr=False)
    split: partition.Split = field(repr=False)

    @property
    def spec(self) -> TaskSpec:
        """The task of the recipe's method on this dataset."""
        return task_spec(self.recipe, self.dataset)

    @property
    def unseen(self) -> tuple[str, ...]:
        """The clients that never train; usually none."""
        return newclients.draw(self.split.clients, self.recipe.data.unseen, self.recipe.seed)

    def data(self) -> dict[str, ClientData]:
        """The images of every client that trains."""
        return self._of(set(self.split.clients) - set(self.unseen))

    def unseen_data(self) -> dict[str, ClientData]:
        """The images of the clients that never train."""
        return self._of(set(self.unseen))

    def _of(self, clients: set[str]) -> dict[str, ClientData]:
        return {id: self.split.client(self.dataset, id) for id in self.split.clients if id in clients}

    def histogram(self) -> str:
        """Samples per client and class, as text."""
        return partition.histogram_text(self.dataset, self.split)

    def with_method(self, method: msgspec.Struct) -> Study:
        """The same clients under another method."""
        return Study(msgspec.structs.replace(self.recipe, method=method), self.dataset, self.split)


@dataclass(frozen=True)
class Outcome:
    """What a run gave: its shared parts, the reports of every evaluated round, of the closing step, and of the unseen clients."""

    method: Method
    shared: Parts
    evaluated: Mapping[int, Reports]
    closing: Reports
    unseen: Reports = field(default_factory=dict)

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


def prepare(recipe: Recipe) -> Study:
    """Loads the dataset and draws the split. Raises DataError."""
    dataset = datasets.load(recipe.data.dataset, Path(recipe.data.data_dir))
    return Study(recipe, dataset, partition.split_clients(dataset, recipe.data, recipe.seed))


def task_spec(recipe: Recipe, dataset: Dataset) -> TaskSpec:
    """All that rebuilds the recipe's method for a dataset."""
    task = recipe.model, dataset.input, list(dataset.classes), recipe.method, recipe.seed
    return TaskSpec(*task, recipe.compression, recipe.privacy)


def fleet(study: Study, method: Method, device: str, say: Callable[[str], None] = lambda line: None) -> Fleet:
    """The study's clients, simulated here by the recipe's engine; `say` hears which one was chosen, and why."""
    recipe, cohort = study.recipe, study.recipe.cohort
    effort = engines.Effort(recipe.rounds, cohort)
    clients = engines.build(recipe.engine, Site.of(study, device), method, effort, say)
    if not (size := cohort.buffer_size):
        return clients
    return DelayedFleet(clients, method, recipe.seed, buffer_size=size, max_staleness=cohort.max_staleness)


def run(
    study: Study,
    progress: Callable[[RoundResult], None] = lambda result: None,
    ending: Callable[[Method, Parts, Fleet], None] = lambda method, shared, fleet: None,
    say: Callable[[str], None] = lambda line: None,
    watch: Watch = unwatched,
) -> Outcome:
    """The whole run of the study's recipe. `progress` sees every round; `ending` sees the clients once more before they are gone.

    `say` hears which engine was chosen, `watch` how far the rounds are and the clients within them.
    """
    device = torch_device(study.recipe.device)
    method = build_method(study.spec)
    cohorts.require_bufferable(study.recipe.cohort, method, "simulated")
    method.net.to(device)
    clients = fleet(study, method, device, say)
    shared, evaluated, trained = to_device(steps.start(method), device), {}, set[str]()
    for result in rounds.run(method, clients, plan(study.recipe), shared, watch=watch):
        shared = result.shared
        trained.update(result.answered)
        if result.metrics:
            evaluated[result.round] = result.metrics
        progress(result)
    last = method.at(max(study.recipe.rounds, 1))
    shared, closing = rounds.close(last, clients, shared, study.recipe.rounds, watch=watch)
    ending(last, shared, clients)
    return Outcome(method, shared, evaluated, closing, _meet_unseen(study, last, shared, clients, trained))


def _meet_unseen(study: Study, method: Method, shared: Parts, clients: Fleet, trained: set[str]) -> Reports:
    strangers = study.unseen_data()
    if not strangers:
        return {}
    samples = {id: len(data.train) for id, data in study.data().items() if id in trained}
    model = newclients.stranger(method, shared, clients.personal_state(), samples)
    return newclients.meet(model, strangers, torch_device(study.recipe.device)) if model else {}


def plan(recipe: Recipe) -> Plan:
    """The part of a recipe that the round loop needs."""
    judge = recipe.judge
    return Plan(
        recipe.rounds,
        recipe.seed,
        recipe.cohort,
        recipe.evaluate_every,
        Robust(judge.centre, judge.trim, judge.clip),
    )


def torch_device(name: str) -> str:
    """Where torch computes: for "auto", CUDA when there is one. Raises ConfigError for a device that torch does not have."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {name!r}: {str(error).splitlines()[0]}; expected auto, cpu or cuda; nothing was started"
        ) from error
    return name


def _validation(summary: Mapping[str, Summary]) -> float:
    for name in (metrics.PERSONAL_VALIDATION_BEFORE, metrics.GLOBAL_VALIDATION):
        if name in summary:
            return summary[name].mean
    return float("nan")
