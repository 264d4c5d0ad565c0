"""Execute a run: rounds, final personalisation, clients that never trained. The same code for simulated, fleet and hybrid sources."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from edge_fl import metrics
from edge_fl.console.progress import Watch, unwatched
from edge_fl.errors import BudgetExhaustedError
from edge_fl.learn.network import precision
from edge_fl.learn.tree import Parts, to_device
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.client import Client
from edge_fl.methods.contract.method import Method
from edge_fl.metrics import Summary
from edge_fl_server.orchestrate import setup as setups
from edge_fl_server.orchestrate.setup import RunSetup
from edge_fl_server.runs import statistics
from edge_fl_server.runs.checkpoint import Checkpoint
from edge_fl_server.training import heads, newcomers, rounds
from edge_fl_server.training.client_store import ClientStore
from edge_fl_server.training.delayed import DelayedFleet
from edge_fl_server.training.engines import choice
from edge_fl_server.training.engines.calibration.measure import Effort
from edge_fl_server.training.fleet import Fleet
from edge_fl_server.training.rounds import FinalResult, Plan, Reports, RunHooks
from edge_fl_server.training.study import Study
from edge_fl_server.training.unreliable import UnreliableFleet, drawn

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run: shared parts, metrics of each evaluated round, of the final personalisation and of unseen clients.

    `exhausted` is set if the privacy budget ended the run before its last round.
    """

    method: Method
    shared: Parts
    evaluated: Mapping[int, Reports]
    final: Reports
    unseen: Reports = field(default_factory=dict)
    exhausted: BudgetExhaustedError | None = None

    def reports(self) -> dict[str, dict[str, float]]:
        """Each client's metrics after the last round and the final personalisation."""
        last = self.evaluated.get(max(self.evaluated, default=0), {})
        return {client: {**last.get(client, {}), **report} for client, report in self.final.items()}

    def last(self) -> dict[str, Summary]:
        """Each metric over all clients after the last round and the final personalisation."""
        found = metrics.summarise_reports(list(self.reports().values()))
        return {**found, **metrics.summarise_reports(list(self.unseen.values()))}

    def best_by_validation(self) -> tuple[int, dict[str, Summary]] | None:
        """The round with the highest mean validation accuracy, and its metrics (`statistics.best_by_validation`)."""
        numbers = sorted(self.evaluated)
        summaries = [metrics.summarise_reports(list(self.evaluated[number].values())) for number in numbers]
        best = statistics.best_by_validation(summaries)
        return None if best is None else (numbers[best], summaries[best])


def execute(
    setup: RunSetup,
    fleet: Fleet,
    hooks: RunHooks,
    watch: Watch = unwatched,
    resumed: Checkpoint | None = None,
) -> RunResult:
    """Run all rounds of the recipe on a fleet, then the final personalisation.

    Raises RunError as `rounds.run`, and BudgetExhaustedError when not even one round was possible.
    """
    method, recipe = setup.method, setup.recipe
    if resumed:
        fleet.restore(iter(resumed.own.items()))
    shared = to_device(resumed.shared if resumed else steps.start(method), setup.device)
    reached = resumed.round if resumed else 0
    evaluated: dict[int, Reports] = dict(resumed.evaluated) if resumed else {}
    trained: set[str] = set(resumed.trained) if resumed else set()
    exhausted: BudgetExhaustedError | None = None
    try:
        plan = Plan.of(recipe, method)
        dropped = resumed.dropped if resumed else 0
        for result in rounds.run(method, fleet, plan, shared, reached + 1, hooks, watch, dropped):
            reached, shared = result.round, result.shared
            trained.update(result.responded)
            if result.metrics:
                evaluated[result.round] = result.metrics
    except BudgetExhaustedError as error:
        if not reached:
            raise
        exhausted = error
    method = method.at(max(reached, 1))
    hooks.before_final(method, shared, reached)
    shared, final = rounds.final_personalisation(method, fleet, shared, reached, hooks, watch)
    final = _with_heads(setup, method, shared, final)
    hooks.after_final(FinalResult(reached, method, shared, final), fleet)
    unseen = _unseen(setup, method, shared, fleet, trained)
    exhausted = rounds.with_epsilon(exhausted, final) if exhausted else None
    return RunResult(method, shared, evaluated, final, unseen, exhausted)


def simulate(
    study: Study,
    hooks: RunHooks | None = None,
    watch: Watch = unwatched,
    say: Callable[[str], None] = lambda line: None,
) -> RunResult:
    """Simulate a study in this process. Raises as `execute`; `say` receives which engine was chosen, and why."""
    setup = setups.of_study(study)
    return execute(setup, simulated_fleet(setup, say), hooks or RunHooks(), watch)


def simulated_fleet(setup: RunSetup, say: Callable[[str], None] = lambda line: None) -> Fleet:
    """The study's clients, trained in this process by the recipe's engine."""
    assert setup.study is not None, "source 'fleet' has no simulated clients"
    recipe, cohort = setup.recipe, setup.recipe.cohort
    if warning := precision.slowdown(recipe.precision, setup.device):
        log.warning("%s", warning)
    clients = choice.build(
        recipe.engine,
        ClientStore.of(setup.study, setup.device),
        setup.method,
        Effort(recipe.rounds, cohort),
        say,
        setup.chosen,
    )
    if cohort.drop_out or cohort.slow_training:
        clients = UnreliableFleet(clients, cohort, recipe.seed)
    if not (size := cohort.buffer_size):
        return clients
    slow = drawn(clients.clients(), cohort.slow_sending, recipe.seed, "slow.sending")
    staleness = cohort.max_staleness
    return DelayedFleet(
        clients, setup.method, recipe.seed, buffer_size=size, max_staleness=staleness, slow=slow
    )


def _with_heads(
    setup: RunSetup, method: Method, shared: Parts, final: Reports
) -> dict[str, Mapping[str, float]]:
    """Add the accuracies of the recipe's heads to the metrics of the simulated clients."""
    if not (setup.recipe.heads and setup.study):
        return dict(final)
    data, seed = setup.study.data(), setup.recipe.seed
    found = heads.fitted(setup.recipe.heads, method, shared, data, seed, setup.device)
    return {id: {**report, **found.get(id, {})} for id, report in final.items()}


def _unseen(setup: RunSetup, method: Method, shared: Parts, fleet: Fleet, trained: set[str]) -> Reports:
    """Metrics of the clients that never train, where all training clients are simulated here."""
    study = setup.study
    if study is None or setup.recipe.source != "simulated" or not (unseen := study.unseen_data()):
        return {}
    samples = {id: len(data.train) for id, data in study.data().items() if id in trained}
    model = newcomers.newcomers_model(method, shared, fleet.personal_state(), samples)
    reports = newcomers.meet(model, unseen, setup.device) if model else {}
    if epochs := setup.recipe.data.unseen_epochs:
        kind = setup.recipe.method.batch_size, setup.recipe.seed, setup.device
        clients = [Client(id, data, len(setup.spec.classes), *kind) for id, data in unseen.items()]
        own = fleet.personal_state()
        after = newcomers.fine_tuned(method, shared, own, samples, clients, epochs)
        reports = {id: {**reports.get(id, {}), **report} for id, report in after.items()}
    return reports
