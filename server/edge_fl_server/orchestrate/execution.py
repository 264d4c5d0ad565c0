"""The second form of a recipe (dataset, method and torch device that follow from it), and its execution: rounds and final personalisation.

The same code for simulated, fleet and hybrid sources. Modules that only runs with devices need are imported where they are used, so that a
simulation starts sooner.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from edge_fl import heads, metrics, models, plugins
from edge_fl.config import MethodSpec
from edge_fl.console.progress import Watch, unwatched
from edge_fl.errors import BudgetExhaustedError, ConfigError, GateError
from edge_fl.learn.network import precision
from edge_fl.learn.tree import Parts, to_device
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl.metrics import Summary
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.runs import summaries
from edge_fl_server.runs.checkpoint import Checkpoint
from edge_fl_server.training import cohorts, rounds, studies
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.engines import choice
from edge_fl_server.training.records import EngineTiming
from edge_fl_server.training.rounds import CombinedHooks, FinalResult, Plan, Reports, RunHooks
from edge_fl_server.training.studies import ClientStore, Study
from edge_fl_server.training.unreliable import DelayedClients, UnreliableClients, drawn

log = logging.getLogger(__name__)
HOOKS = "edge_fl.run_hooks"
"""The entry-point group of hooks that measure more: setting of a recipe -> class, called with the study and the torch device."""


@dataclass(frozen=True)
class RunSetup:
    """The recipe, resolved. `study` (dataset and split) is set where clients are simulated in this process.

    `chosen` is the engine that "auto" chose when a resumed run began.
    """

    recipe: Recipe
    study: Study | None
    spec: MethodSpec
    method: Method
    device: str
    chosen: EngineTiming | None = None

    @property
    def plan(self) -> Plan:
        """The arguments of the round loop."""
        return Plan.of(self.recipe, self.method)

    @property
    def data_hash(self) -> str:
        """Hash of the data trained on in this process and of their split; empty when only devices have data."""
        return self.study.fingerprint() if self.study else ""


def prepare(recipe: Recipe) -> RunSetup:
    """Load the dataset, if the server needs one, and build the method. Raises InputError."""
    if recipe.source in ("simulated", "hybrid"):
        return of_study(studies.prepare(recipe))
    recipe, spec = studies.without_data(recipe)
    # Aggregating alone is no work for a GPU: "auto" uses one only where clients train in this process.
    device = "cpu" if recipe.device == "auto" else torch_device(recipe.device)
    return _build(recipe, None, spec, device)


def of_study(study: Study) -> RunSetup:
    """The setup of a study whose data are loaded. Raises InputError."""
    return _build(study.recipe, study, study.spec, torch_device(study.recipe.device))


def torch_device(name: str) -> str:
    """The torch device to compute on; "auto" is CUDA if available. Raises ConfigError for an unavailable device."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r}: {reason}; expected auto, cpu or cuda") from error
    return name


def _build(recipe: Recipe, study: Study | None, spec: MethodSpec, device: str) -> RunSetup:
    models.require_usable(spec.model, spec.input)
    method = build_method(spec)
    method.net.to(device)
    if study:
        precision.require_trainable(recipe.precision, device)
    cohorts.require_bufferable(recipe.cohort, method, recipe.source)
    cohorts.require_simulable(recipe)
    choice.require(recipe.engine)
    _require_heads(recipe)
    if recipe.statistics.sums in ("masked", "plain") or recipe.broker.identity:
        from edge_fl_server.orchestrate import class_statistics

        class_statistics.settings_of(recipe, method)
    if recipe.release.heads:
        from edge_fl_server.release import export

        export.require_exportable(method)
    return RunSetup(recipe, study, spec, method, device)


def _require_heads(recipe: Recipe) -> None:
    """Raise ConfigError for an unknown head, or for heads without simulated clients."""
    if recipe.heads and recipe.source in ("fleet", "none"):
        raise ConfigError(
            f"heads = {recipe.heads} with source {recipe.source!r}: expected simulated clients; a device's head is configured on the device"
        )
    for name in recipe.heads:
        if name != heads.SERVED:
            heads.resolve(name)


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run: shared parts, metrics of each evaluated round, and those after it, also of clients that never trained.

    `exhausted` is set if the privacy budget ended the run before its last round, `stopped` if a gate stopped the roll-out of its last
    release.
    """

    method: Method
    shared: Parts
    evaluated: Mapping[int, Reports]
    final: Reports
    exhausted: BudgetExhaustedError | None = None
    stopped: GateError | None = None

    def reports(self) -> dict[str, dict[str, float]]:
        """Each client's metrics after the last round and the final personalisation."""
        last = self.evaluated.get(max(self.evaluated, default=0), {})
        return {client: {**last.get(client, {}), **report} for client, report in self.final.items()}

    def last(self) -> dict[str, Summary]:
        """Each metric over all clients after the last round and the final personalisation."""
        return metrics.summarise_reports(list(self.reports().values()))

    def best_by_validation(self) -> tuple[int, dict[str, Summary]] | None:
        """The round with the highest mean validation accuracy, and its metrics (`summaries.best_by_validation`)."""
        numbers = sorted(self.evaluated)
        rounds = [metrics.summarise_reports(list(self.evaluated[number].values())) for number in numbers]
        best = summaries.best_by_validation(rounds)
        return None if best is None else (numbers[best], rounds[best])


@dataclass(frozen=True)
class Training:
    """The outcome of the rounds: the last one, the shared parts, metrics of each evaluated round, and the clients that responded in any.

    `exhausted` is set if the privacy budget ended the rounds before the last one.
    """

    round: int
    shared: Parts
    evaluated: Mapping[int, Reports]
    trained: frozenset[str]
    exhausted: BudgetExhaustedError | None = None


def execute(
    setup: RunSetup,
    clients: Clients,
    hooks: RunHooks,
    watch: Watch = unwatched,
    resumed: Checkpoint | None = None,
) -> RunResult:
    """Run all rounds of the recipe on the clients, then the final personalisation.

    Raises RunError as `rounds.run` and for an error in a user's own code, and BudgetExhaustedError when not even one round was possible.
    """
    hooks = measuring(setup, hooks)
    return finish(setup, clients, hooks, train(setup, clients, hooks, watch, resumed), watch)


def train(
    setup: RunSetup,
    clients: Clients,
    hooks: RunHooks,
    watch: Watch = unwatched,
    resumed: Checkpoint | None = None,
) -> Training:
    """Run the rounds. Raises as `execute`."""
    with _blaming(setup):
        return _train(setup, clients, hooks, watch, resumed)


def finish(
    setup: RunSetup, clients: Clients, hooks: RunHooks, training: Training, watch: Watch = unwatched
) -> RunResult:
    """The final personalisation after the rounds, and all that is measured at the end. Raises as `execute`."""
    with _blaming(setup):
        return _finish(setup, clients, hooks, training, watch)


def _blaming(setup: RunSetup) -> AbstractContextManager[None]:
    return plugins.blaming(setup.method.title, setup.spec.method.name, setup.spec.model.name)


def _train(
    setup: RunSetup, clients: Clients, hooks: RunHooks, watch: Watch, resumed: Checkpoint | None
) -> Training:
    method = setup.method
    if resumed:
        clients.restore(iter(resumed.own.items()))
    shared = to_device(resumed.shared if resumed else steps.start(method), setup.device)
    reached = resumed.round if resumed else 0
    evaluated: dict[int, Reports] = dict(resumed.evaluated) if resumed else {}
    trained: set[str] = set(resumed.trained) if resumed else set()
    exhausted: BudgetExhaustedError | None = None
    try:
        dropped = resumed.dropped if resumed else 0
        for result in rounds.run(method, clients, setup.plan, shared, reached + 1, hooks, watch, dropped):
            reached, shared = result.round, result.shared
            trained.update(result.responded)
            if result.metrics:
                evaluated[result.round] = result.metrics
    except BudgetExhaustedError as error:
        if not reached:
            raise
        exhausted = error
    return Training(reached, shared, evaluated, frozenset(trained), exhausted)


def _finish(
    setup: RunSetup, clients: Clients, hooks: RunHooks, training: Training, watch: Watch
) -> RunResult:
    method, reached = setup.method.at(max(training.round, 1)), training.round
    hooks.before_final(method, training.shared, reached)
    shared, final = rounds.final_personalisation(method, clients, training.shared, reached, hooks, watch)
    end = FinalResult(reached, method, shared, final, training.trained)
    end = replace(end, metrics=rounds.merged(final, hooks.measure(end, clients)))
    hooks.after_final(end, clients)
    exhausted = rounds.with_epsilon(training.exhausted, final) if training.exhausted else None
    return RunResult(method, shared, training.evaluated, end.metrics, exhausted)


def simulate(
    study: Study,
    hooks: RunHooks | None = None,
    watch: Watch = unwatched,
    say: Callable[[str], None] = lambda line: None,
) -> RunResult:
    """Simulate a study in this process. Raises as `execute`; `say` receives which engine was chosen, and why."""
    setup = of_study(study)
    return execute(setup, simulated_clients(setup, say, watch), hooks or RunHooks(), watch)


def simulated_clients(
    setup: RunSetup, say: Callable[[str], None] = lambda line: None, watch: Watch = unwatched
) -> Clients:
    """The study's clients, trained in this process by the recipe's engine; `watch` receives the progress of its choice."""
    assert setup.study is not None, "source 'fleet' has no simulated clients"
    recipe, cohort = setup.recipe, setup.recipe.cohort
    if warning := precision.slowdown(recipe.precision, setup.device):
        log.warning("%s", warning)
    clients = choice.build(
        recipe.engine,
        ClientStore.of(setup.study, setup.device),
        setup.method,
        setup.plan,
        say,
        setup.chosen,
        watch,
    )
    if cohort.drop_out or cohort.slow_training:
        clients = UnreliableClients(clients, cohort, recipe.seed)
    if not (size := cohort.buffer_size):
        return clients
    slow = drawn(clients.ids(), cohort.slow_sending, recipe.seed, "slow.sending")
    staleness = cohort.max_staleness
    return DelayedClients(
        clients, setup.method, recipe.seed, buffer_size=size, max_staleness=staleness, slow=slow
    )


def measuring(setup: RunSetup, hooks: RunHooks) -> RunHooks:
    """`hooks`, and those of other packages whose setting the recipe has. Raises ConfigError if one cannot be imported."""
    if setup.study is None:
        return hooks
    others = [
        make(setup.study, setup.device)
        for name in plugins.names(HOOKS)
        if attrgetter(name)(setup.recipe)
        and (make := plugins.registered(HOOKS, name, "setting", ConfigError))
    ]
    return CombinedHooks(hooks, *others)
