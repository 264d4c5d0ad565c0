"""THE loop: rounds of any method on any fleet. Everything else on the server prepares it or shows what came out of it.

    draw a cohort -> broadcast -> fleet.train -> put updates in order -> aggregate -> evaluate -> remember

Whether the fleet is simulated here or made of devices behind a broker makes no difference to this module. Nor does it much matter
whether a round ends with its cohort or with a buffer of updates: then some of them began in earlier rounds, and are moved to the newest
parts before the method sees them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from edge_fl import logs
from edge_fl.config import CohortConfig
from edge_fl.console.progress import Count, Watch, unwatched
from edge_fl.errors import BudgetExhaustedError, RunError
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.aggregation.robust import Robust, robust
from edge_fl.learn.aggregation.staleness import moved
from edge_fl.learn.tree import Parts, size_bytes
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl.metrics import EPSILON, afterwards
from server.training import cohort as cohorts
from server.training.fleet import ClientId, Fleet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What a run does: how many rounds, with whom, from which seed, and how often every client is evaluated (0: only at the end)."""

    rounds: int
    seed: int = 0
    cohort: CohortConfig = CohortConfig()
    evaluate_every: int = 0
    robust: Robust = Robust()


@dataclass(frozen=True)
class RoundResult:
    """What one round gave: the new shared parts, who was asked, who answered, and the metrics by client where evaluated.

    Asked are those whose update could count, also if they were asked in an earlier round; `staleness` says of such an answer how many
    rounds ago. `beside` are devices of no cohort whose parts joined; `attempts` is how often it was asked. `spent` are clients that
    train no more, since their privacy budget is spent.
    `bytes_down` and `bytes_up` are those of the tensors sent to and taken from the
    cohort together, without any framing.
    """

    round: int
    shared: Parts
    asked: tuple[ClientId, ...]
    answered: tuple[ClientId, ...]
    seconds: float
    metrics: Mapping[ClientId, Mapping[str, float]] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    beside: tuple[ClientId, ...] = ()
    attempts: int = 1
    staleness: Mapping[ClientId, int] = field(default_factory=dict)
    spent: tuple[ClientId, ...] = ()


Beside = Callable[[], Sequence[Update]]
"""Updates of some parts only, by ascending client, from devices that are in no cohort: head-only ones. Asked after the cohort's."""


class Broadcasts(Mapping[ClientId, Parts]):
    """What each client of a cohort receives, computed when it is asked for, so that a cohort costs no memory.

    `bytes` notes how much went to each client that was asked for.
    """

    def __init__(self, method: Method, shared: Parts, cohort: Iterable[ClientId]) -> None:
        self._method, self._shared, self._cohort = method, shared, dict.fromkeys(cohort)
        self.bytes: dict[ClientId, int] = {}

    def __getitem__(self, client: ClientId) -> Parts:
        if client not in self._cohort:
            raise KeyError(client)
        down = steps.broadcast(self._method, self._shared, client)
        self.bytes[client] = size_bytes(down)
        return down

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._cohort)

    def __len__(self) -> int:
        return len(self._cohort)


def run(
    method: Method,
    fleet: Fleet,
    plan: Plan,
    shared: Parts | None = None,
    first: int = 1,
    beside: Beside = lambda: (),
    ready: Callable[[], None] = lambda: None,
    watch: Watch = unwatched,
) -> Iterator[RoundResult]:
    """Rounds `first`..plan.rounds, yielding after each. Raises RunError when fewer than the quorum answer, however often they are asked,
    SpentError when nobody may answer any more: the closing steps can still follow.

    What `beside` gives once the cohort has answered joins the round's aggregate. `ready` is called before clients are asked, and may
    wait until there are enough. `watch` is told how many rounds are over, and within each how many clients answered.
    """
    shared = steps.start(method) if shared is None else shared
    watch(Count("rounds", first - 1, plan.rounds))
    for number in range(first, plan.rounds + 1):
        logs.about(round=number)
        started = time.monotonic()
        now = method.at(number)
        attempt = _attempt(now, fleet, plan, shared, number, beside, ready, watch)
        shared, cohort, answered = attempt.shared, attempt.cohort, attempt.answered
        due = plan.evaluate_every and number % plan.evaluate_every == 0
        metrics = evaluate(now, fleet, shared, number, watch) if due else {}
        seconds = time.monotonic() - started
        watch(Count("rounds", number, plan.rounds))
        yield RoundResult(
            number,
            shared,
            cohort,
            tuple(answered),
            seconds,
            metrics,
            attempt.bytes_down,
            sum(answered.values()),
            attempt.beside,
            attempt.number,
            attempt.staleness,
            attempt.spent,
        )


@dataclass(frozen=True)
class _Attempt:
    """One time that a round was asked: who answered, with how many bytes, and what came of it."""

    number: int
    shared: Parts
    cohort: tuple[ClientId, ...]
    goal: int
    answered: dict[ClientId, int]
    bytes_down: int
    beside: tuple[ClientId, ...]
    staleness: dict[ClientId, int]
    spent: tuple[ClientId, ...]


def _attempt(
    method: Method,
    fleet: Fleet,
    plan: Plan,
    shared: Parts,
    round: int,
    beside: Beside,
    ready: Callable[[], None],
    watch: Watch,
) -> _Attempt:
    """A round until enough have answered. Raises RunError when they do not, the last time too."""
    others: list[Update] = []
    found = ""

    def and_others() -> list[Update]:
        others.extend(beside())  # those of an attempt that failed are not lost
        return others

    for number in range(1, plan.cohort.attempts + 1):
        ready()
        made = _ask(method, fleet, plan, shared, round, number, and_others, watch)
        if len(made.answered) >= (needed := cohorts.quorum(made.goal, plan.cohort)):
            return made
        found = f"round {round}: {len(made.answered)} of {len(made.cohort)} clients answered, expected at least {needed}"
        if number < plan.cohort.attempts:
            log.warning("%s; it is abandoned and asked anew", found)
    _spent(fleet, round)  # devices say so only once they are asked
    raise RunError(f"{found}; the run stops with round {round - 1}'s model")


def _ask(
    method: Method,
    fleet: Fleet,
    plan: Plan,
    shared: Parts,
    round: int,
    number: int,
    beside: Beside,
    watch: Watch,
) -> _Attempt:
    spent = _spent(fleet, round)
    asked, cohort, goal = _cohort(method, fleet, plan, round)
    downs = Broadcasts(method, shared, asked)
    answered: dict[ClientId, int] = {}
    staleness: dict[ClientId, int] = {}
    first_come = _counted(_first(fleet.train(round, method, downs), goal), "clients", goal, watch)
    updates = steps.received(method, _noting(in_order(first_come, cohort), answered, staleness), downs)
    updates = map(partial(moved, shared=shared), updates)
    others: list[ClientId] = []
    updates = _joined(robust(updates, shared, plan.robust), beside, others)
    shared = steps.aggregate(method, shared, updates)
    for _ in updates:  # a method whose aggregate reads nothing still waits for its clients
        pass
    bytes_down = sum(downs.bytes.values())
    return _Attempt(
        number, shared, tuple(cohort), goal, answered, bytes_down, tuple(others), staleness, spent
    )


def _cohort(
    method: Method, fleet: Fleet, plan: Plan, round: int
) -> tuple[list[ClientId], list[ClientId], int]:
    """(who is asked now, everybody whose update can count, how many of these end the round)."""
    clients, at_work, how = fleet.trainable(), fleet.at_work(), plan.cohort
    if method.trains_everyone:
        return list(clients), list(clients), len(clients)
    drops = fleet.may_drop_out
    asked = cohorts.draw(clients, how, plan.seed, round, may_drop_out=drops, at_work=at_work)
    cohort = sorted({*asked, *at_work})
    if how.buffer_size:
        return asked, cohort, min(how.buffer_size, len(cohort))
    return asked, cohort, cohorts.goal(len(clients), how, plan.seed, round)


def _spent(fleet: Fleet, round: int) -> tuple[ClientId, ...]:
    """Whose privacy budget is spent. Raises SpentError when that is everybody, and nobody is still at work."""
    clients = fleet.clients()
    spent = tuple(sorted(set(clients).difference(fleet.trainable())))
    if clients and len(spent) == len(clients) and not fleet.at_work():
        raise BudgetExhaustedError(
            f"round {round}: the privacy budget of all {len(spent)} clients is spent; the run ends with round {round - 1}'s model"
        )
    return spent


def evaluate(
    method: Method, fleet: Fleet, shared: Parts, round: int, watch: Watch = unwatched
) -> dict[ClientId, Mapping[str, float]]:
    """Metrics of every client that is not at work with the just-aggregated parts (`post_agg`, METHODS.md G13)."""
    at_work = fleet.at_work()
    clients = [client for client in fleet.clients() if client not in at_work]
    updates = fleet.evaluate(round, method, Broadcasts(method, shared, clients))
    counted = _counted(updates, "evaluations", len(clients), watch)
    return {update.client: update.metrics for update in in_order(counted, clients)}


def close(
    method: Method,
    fleet: Fleet,
    shared: Parts,
    round: int,
    beside: Beside = lambda: (),
    watch: Watch = unwatched,
) -> tuple[Parts, dict[ClientId, Mapping[str, float]]]:
    """The closing steps: personalise on every client, then finalise -> (shared parts, metrics before and after both by client)."""
    clients = fleet.clients()
    downs, metrics = Broadcasts(method, shared, clients), dict[ClientId, Mapping[str, float]]()

    def noted() -> Iterator[Update]:
        asked = fleet.personalise(round, method, downs)
        for update in in_order(_counted(asked, "closing steps", len(clients), watch), clients):
            metrics[update.client] = update.metrics
            yield update

    updates = steps.received(method, noted(), downs)
    closed = steps.finalise(method, shared, _joined(updates, beside, []))
    for _ in updates:
        pass
    if closed is not shared:  # clients predict with something else now
        for client, found in evaluate(method, fleet, closed, round, watch).items():
            metrics[client] = {**metrics.get(client, {}), **afterwards(found)}
    return closed, metrics


def with_epsilon(
    spent: BudgetExhaustedError, closing: Mapping[ClientId, Mapping[str, float]]
) -> BudgetExhaustedError:
    """The end of a run that closed, with how much its clients' updates have told at most."""
    told = [found[EPSILON] for found in closing.values() if EPSILON in found]
    return BudgetExhaustedError(
        f"{spent}, and its updates have told epsilon {max(told):.3g} at most" if told else str(spent)
    )


def in_order(updates: Iterable[Update], cohort: Iterable[ClientId]) -> Iterator[Update]:
    """The updates in ascending client id; one that came early waits for those before it, strangers and second ones are dropped."""
    waiting: dict[ClientId, Update] = {}
    due = sorted(cohort)
    members = set(due)
    position = 0
    for update in updates:
        if update.client in members:
            members.remove(update.client)
            waiting[update.client] = update
        while position < len(due) and due[position] in waiting:
            yield waiting.pop(due[position])
            position += 1
    for client in due[position:]:
        if client in waiting:
            yield waiting.pop(client)


def _first(updates: Iterator[Update], goal: int) -> Iterator[Update]:
    """The first `goal` updates to come; whoever still works then does so in vain."""
    for count, update in enumerate(updates, 1):
        yield update
        if count == goal:
            break
    if isinstance(updates, Generator):
        updates.close()


def _counted(updates: Iterable[Update], stage: str, of: int, watch: Watch) -> Iterator[Update]:
    """The updates, telling how many of those expected have come; whoever has not by the end is no longer expected."""
    done = 0
    watch(Count(stage, done, of))
    for done, update in enumerate(updates, 1):
        watch(Count(stage, done, of))
        yield update
    watch(Count(stage, done, done))


def _joined(updates: Iterator[Update], beside: Beside, noted: list[ClientId]) -> Iterator[Update]:
    """The cohort's updates, then the others', noting whose these are."""
    yield from updates
    for update in beside():
        noted.append(update.client)
        yield update


def _noting(
    updates: Iterator[Update], answered: dict[ClientId, int], staleness: dict[ClientId, int]
) -> Iterator[Update]:
    """The updates, noting who sent how many bytes, and who was how late."""
    for update in updates:
        answered[update.client] = size_bytes(update.parts)
        if update.staleness:
            staleness[update.client] = update.staleness
        yield update
