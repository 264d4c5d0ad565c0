"""The round loop: federated rounds of any method on any clients.

    select -> broadcast -> collect -> aggregate -> compare -> evaluate -> record

The loop does not know where clients are: simulated in this process or on devices behind a broker. With a buffer
(`CohortConfig.buffer_size`) aggregation is asynchronous: an update may have started in an earlier round, and its change is then applied to
the current parts.
"""

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from edge_fl import logs
from edge_fl.console.progress import Count, Watch, unwatched
from edge_fl.errors import BudgetExhaustedError, RunError
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.aggregation.robust import Robust, robust
from edge_fl.learn.aggregation.staleness import moved
from edge_fl.learn.tree import Parts, size_bytes
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl.metrics import EPSILON, LOCAL, afterwards
from edge_fl_server.recipes.recipe import CohortConfig, Recipe
from edge_fl_server.training import cohorts
from edge_fl_server.training.clients import Broadcasts, ClientId, Clients
from edge_fl_server.training.gate import LEAST, PANEL, Gate, RoundCandidate
from edge_fl_server.training.records import RoundFigures, RoundVerdict

log = logging.getLogger(__name__)
Reports = Mapping[ClientId, Mapping[str, float]]
"""Metrics by client: client id -> metric name (`edge_fl.metrics`) -> value."""


def in_order(updates: Iterable[Update], members: Iterable[ClientId]) -> Iterator[Update]:
    """The updates in ascending client id. Early ones wait for their predecessors; unknown clients and repetitions are dropped."""
    waiting: dict[ClientId, Update] = {}
    order = sorted(members)
    missing = set(order)
    position = 0
    for update in updates:
        if update.client in missing:
            missing.remove(update.client)
            waiting[update.client] = update
        while position < len(order) and order[position] in waiting:
            yield waiting.pop(order[position])
            position += 1
    for client in order[position:]:
        if client in waiting:
            yield waiting.pop(client)


def first_updates(updates: Iterator[Update], goal: int) -> Iterator[Update]:
    """The first `goal` updates to arrive; then the round request is closed."""
    for count, update in enumerate(updates, 1):
        yield update
        if count == goal:
            break
    if isinstance(updates, Generator):
        updates.close()


def counted(updates: Iterable[Update], stage: str, expected: int, watch: Watch) -> Iterator[Update]:
    """The updates, with progress reported to `watch`."""
    done = 0
    watch(Count(stage, done, expected))
    for done, update in enumerate(updates, 1):
        watch(Count(stage, done, expected))
        yield update
    watch(Count(stage, done, done))


def merged(*reports: Reports) -> Reports:
    """The metrics of all reports, by client; of the same metric the last one counts."""
    found: dict[ClientId, Mapping[str, float]] = {}
    for each in reports:
        found |= {id: {**found.get(id, {}), **report} for id, report in each.items()}
    return found


@dataclass(frozen=True)
class Plan:
    """How many rounds, with which cohorts, from which seed; `evaluate_every` rounds all clients are evaluated (0: never).

    `panel` is the share of a round's clients that compare its outcome with the parts before it (`gate`; 0: none), with at least
    `panel_from` clients.
    """

    rounds: int
    seed: int = 0
    cohort: CohortConfig = CohortConfig()
    evaluate_every: int = 0
    robust: Robust = Robust()
    panel: float = 0.0
    panel_from: int = 2

    @classmethod
    def of(cls, recipe: Recipe, method: Method) -> "Plan":
        """The recipe's plan; a method without a model before its final personalisation is not evaluated between rounds."""
        updates = recipe.validation
        auto, devices = updates.panel == "auto", recipe.source in ("fleet", "hybrid")
        return cls(
            recipe.rounds,
            recipe.seed,
            recipe.cohort,
            recipe.evaluate_every if method.predicts_early or method.has_global else 0,
            Robust(updates.centre, updates.trim, updates.clip),
            PANEL * devices if updates.panel == "auto" else updates.panel,
            LEAST if auto else 2,
        )


class RoundResult(RoundFigures, frozen=True, kw_only=True):
    """The outcome of one round: the new shared parts, and metrics by client, empty in rounds without evaluation."""

    shared: Parts
    seconds: float
    metrics: Reports


@dataclass(frozen=True)
class FinalResult:
    """The outcome of the final personalisation after round `round`: the method as it was then, shared parts, metrics by client.

    `trained` are the clients that responded in any round.
    """

    round: int
    method: Method
    shared: Parts
    metrics: Reports
    trained: frozenset[ClientId] = frozenset()


class RunHooks:
    """Extension points of a run. Every method does nothing by default."""

    def before_round(self, round: int) -> None:
        """Called before each attempt of a round; may wait until enough clients are available."""

    def head_updates(self) -> Sequence[Update]:
        """Return and forget the updates of head-only devices received so far, in ascending client id."""
        return ()

    def screen(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        """Return the updates to aggregate; may drop or change some. `shared` are the parts before the round."""
        return updates

    def screen_final(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        """Return the updates of the final personalisation that count; may drop or change some."""
        return updates

    def after_round(self, result: RoundResult, clients: Clients) -> None:
        """Called after each round."""

    def before_final(self, method: Method, shared: Parts, round: int) -> None:
        """Called before the final personalisation, after round `round`."""

    def measure(self, result: FinalResult, clients: Clients) -> Reports:
        """Return more metrics by client, also of clients that did not train; they are added to those of the final personalisation."""
        return {}

    def after_final(self, result: FinalResult, clients: Clients) -> None:
        """Called after the final personalisation."""


class CombinedHooks(RunHooks):
    """Several hooks, called in their order."""

    def __init__(self, *hooks: RunHooks) -> None:
        self._hooks = hooks

    def before_round(self, round: int) -> None:
        for hooks in self._hooks:
            hooks.before_round(round)

    def head_updates(self) -> Sequence[Update]:
        return [update for hooks in self._hooks for update in hooks.head_updates()]

    def screen(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        for hooks in self._hooks:
            updates = hooks.screen(updates, shared)
        return updates

    def screen_final(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        for hooks in self._hooks:
            updates = hooks.screen_final(updates, shared)
        return updates

    def after_round(self, result: RoundResult, clients: Clients) -> None:
        for hooks in self._hooks:
            hooks.after_round(result, clients)

    def before_final(self, method: Method, shared: Parts, round: int) -> None:
        for hooks in self._hooks:
            hooks.before_final(method, shared, round)

    def measure(self, result: FinalResult, clients: Clients) -> Reports:
        return merged(*(hooks.measure(result, clients) for hooks in self._hooks))

    def after_final(self, result: FinalResult, clients: Clients) -> None:
        for hooks in self._hooks:
            hooks.after_final(result, clients)


def run(
    method: Method,
    clients: Clients,
    plan: Plan,
    shared: Parts | None = None,
    first: int = 1,
    hooks: RunHooks | None = None,
    watch: Watch = unwatched,
    dropped: int = 0,
) -> Iterator[RoundResult]:
    """Run rounds `first`..plan.rounds, yielding after each. `dropped`: rounds that the gate dropped in a row just before the first one.

    Raises RunError when a round misses its quorum in every attempt, BudgetExhaustedError when no client has privacy budget left.
    """
    shared = steps.start(method) if shared is None else shared
    hooks = hooks or RunHooks()
    gate = Gate(clients, plan.panel, plan.panel_from, plan.cohort, plan.seed, dropped)
    watch(Count("rounds", first - 1, plan.rounds))
    for number in range(first, plan.rounds + 1):
        logs.set_context(round=number)
        result = _round(method.at(number), clients, plan, shared, number, hooks, watch, gate)
        shared = result.shared
        watch(Count("rounds", number, plan.rounds))
        hooks.after_round(result, clients)
        yield result


def _round(
    method: Method,
    clients: Clients,
    plan: Plan,
    shared: Parts,
    number: int,
    hooks: RunHooks,
    watch: Watch,
    gate: Gate,
) -> RoundResult:
    """Run one round, retrying until the quorum responds. Raises RunError after the last attempt."""
    started = time.monotonic()
    head_updates: list[Update] = []  # kept over attempts: a failed attempt does not lose them
    for attempt in range(1, plan.cohort.attempts + 1):
        hooks.before_round(number)
        exhausted = _exhausted(clients, number)
        selection = _select(method, clients, plan, number)
        broadcasts = Broadcasts(partial(steps.broadcast, method, shared), selection.requested)
        collected = _Collected(
            clients.each("train", number, method, broadcasts), selection, head_updates, hooks, watch
        )
        received = (moved(update, shared) for update in steps.received(method, collected, broadcasts))
        updates: Iterable[Update] = hooks.screen(received, shared)

        def aggregate(updates: Iterable[Update]) -> Parts:
            return steps.aggregate(method, shared, robust(updates, shared, plan.robust))

        if gated := gate.applies(method):
            updates = list(updates)  # aggregated again without some of them if the round makes clients worse
        aggregated = aggregate(updates)
        collected.drain()  # a method that aggregates nothing still waits for its clients
        needed = cohorts.quorum(selection.goal, plan.cohort) if selection.goal else 0
        if len(collected.bytes_up) >= needed:
            break
        reason = f"round {number}: {len(collected.bytes_up)} of {len(selection.members)} clients responded, expected at least {needed}"
        if attempt == plan.cohort.attempts:
            _exhausted(clients, number)  # devices report an exhausted budget only when asked
            raise RunError(f"{reason}; the run stops with the model of round {number - 1}")
        log.warning("%s; retrying", reason)
    verdict: RoundVerdict | None = None
    if gated:
        candidate = RoundCandidate(method, number, shared, aggregated, list(updates), aggregate)
        aggregated, verdict = gate.decide(candidate)
    due = plan.evaluate_every and number % plan.evaluate_every == 0
    metrics = evaluate(method, clients, aggregated, number, watch) if due else {}
    metrics = merged(metrics, collected.local) if due else {}
    return RoundResult(
        round=number,
        shared=aggregated,
        selected=tuple(selection.members),
        responded=tuple(collected.bytes_up),
        seconds=time.monotonic() - started,
        metrics=metrics,
        bytes_down=sum(broadcasts.bytes.values()) + (verdict.bytes_down if verdict else 0),
        bytes_up=sum(collected.bytes_up.values()),
        head_updates=tuple(update.client for update in head_updates),
        attempts=attempt,
        staleness=collected.staleness,
        budget_exhausted=exhausted,
        verdict=verdict,
    )


@dataclass(frozen=True)
class _Selection:
    """`requested` receive a new broadcast, `members` are all whose update can count, `goal` updates end the round."""

    requested: list[ClientId]
    members: list[ClientId]
    goal: int


def _select(method: Method, clients: Clients, plan: Plan, round: int) -> _Selection:
    """Draw the cohort of a round from the clients with privacy budget."""
    able, working = clients.trainable(), clients.at_work()
    if method.trains_everyone:
        everyone = list(able) if cohorts.trains_everyone_in(plan.cohort, round) else []
        return _Selection(everyone, everyone, len(everyone))
    requested = cohorts.draw(
        able, plan.cohort, plan.seed, round, may_drop_out=clients.may_drop_out, at_work=working
    )
    members = sorted({*requested, *working})
    if size := plan.cohort.buffer_size:
        return _Selection(requested, members, min(size, len(members)))
    return _Selection(requested, members, cohorts.goal(len(able), plan.cohort, plan.seed, round))


@dataclass(eq=False)
class _Collected:
    """The updates of a round as they stream in: the first `goal` of the cohort in client order, then those of head-only devices.

    Iterated once. Afterwards `bytes_up` maps each client that responded to the size of its update, `staleness` those that were late,
    `local` those that evaluated it to the accuracies before aggregation.
    """

    updates: Iterator[Update]
    selection: _Selection
    head_updates: list[Update]
    hooks: RunHooks
    watch: Watch
    bytes_up: dict[ClientId, int] = field(default_factory=dict)
    staleness: dict[ClientId, int] = field(default_factory=dict)
    local: dict[ClientId, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stream = self._received()

    def __iter__(self) -> Iterator[Update]:
        return self._stream

    def drain(self) -> None:
        """Receive the updates that have not been read."""
        for _ in self._stream:
            pass

    def _received(self) -> Iterator[Update]:
        goal = self.selection.goal
        arriving = counted(first_updates(self.updates, goal), "clients", goal, self.watch)
        for update in in_order(arriving, self.selection.members):
            self.bytes_up[update.client] = size_bytes(update.parts)
            if update.staleness:
                self.staleness[update.client] = update.staleness
            if found := {name: value for name, value in update.metrics.items() if name in LOCAL}:
                self.local[update.client] = found
            yield update
        self.head_updates.extend(self.hooks.head_updates())
        yield from self.head_updates


def _exhausted(clients: Clients, round: int) -> tuple[ClientId, ...]:
    """Clients whose privacy budget is exhausted. Raises BudgetExhaustedError when that is every client and no update is outstanding."""
    ids = clients.ids()
    exhausted = tuple(sorted(set(ids).difference(clients.trainable())))
    if ids and len(exhausted) == len(ids) and not clients.at_work():
        raise BudgetExhaustedError(
            f"round {round}: the privacy budget of all {len(exhausted)} clients is exhausted;"
            f" the run ends with the model of round {round - 1}"
        )
    return exhausted


def evaluate(
    method: Method, clients: Clients, shared: Parts, round: int, watch: Watch = unwatched
) -> Reports:
    """Metrics of every idle client with the just-aggregated parts (`post_agg`, docs/methods.md G13)."""
    working = clients.at_work()
    idle = [client for client in clients.ids() if client not in working]
    updates = clients.each(
        "evaluate", round, method, Broadcasts(partial(steps.broadcast, method, shared), idle)
    )
    arriving = counted(updates, "evaluations", len(idle), watch)
    return {update.client: update.metrics for update in in_order(arriving, idle)}


def final_personalisation(
    method: Method,
    clients: Clients,
    shared: Parts,
    round: int,
    hooks: RunHooks | None = None,
    watch: Watch = unwatched,
) -> tuple[Parts, Reports]:
    """Personalise on every client, then finalise on the server -> (shared parts, metrics before and after by client)."""
    ids = clients.ids()
    broadcasts = Broadcasts(partial(steps.broadcast, method, shared), ids)
    metrics: dict[ClientId, Mapping[str, float]] = {}

    def collected() -> Iterator[Update]:
        updates = clients.each("personalise", round, method, broadcasts)
        for update in in_order(counted(updates, "final personalisation", len(ids), watch), ids):
            metrics[update.client] = update.metrics
            yield update
        if hooks:
            yield from hooks.head_updates()

    updates = steps.received(method, collected(), broadcasts)
    updates = hooks.screen_final(updates, shared) if hooks else updates
    final = steps.finalise(method, shared, updates)
    for _ in updates:
        pass
    if final is not shared:  # clients now predict with other shared parts
        again = evaluate(method, clients, final, round, watch)
        return final, merged(metrics, {client: afterwards(report) for client, report in again.items()})
    return final, metrics


def with_epsilon(error: BudgetExhaustedError, final: Reports) -> BudgetExhaustedError:
    """The error with the largest epsilon spent by any client."""
    spent = [report[EPSILON] for report in final.values() if EPSILON in report]
    return BudgetExhaustedError(f"{error}; largest epsilon spent: {max(spent):.3g}" if spent else str(error))
