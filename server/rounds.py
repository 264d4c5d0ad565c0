"""THE loop: rounds of any method on any fleet. Everything else on the server prepares it or shows what came out of it.

    draw a cohort -> broadcast -> fleet.train -> put updates in order -> aggregate -> evaluate -> remember

Whether the fleet is simulated here or made of devices behind a broker makes no difference to this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from edge_fl.config import CohortConfig
from edge_fl.errors import RunError
from edge_fl.learn.mean import Update
from edge_fl.learn.tree import Parts, size_bytes
from edge_fl.methods import steps
from edge_fl.methods.method import Method
from edge_fl.metrics import afterwards
from server import cohort as cohorts
from server.fleets.fleet import ClientId, Fleet


@dataclass(frozen=True)
class Plan:
    """What a run does: how many rounds, with whom, from which seed, and how often every client is evaluated (0: only at the end)."""

    rounds: int
    seed: int = 0
    cohort: CohortConfig = CohortConfig()
    evaluate_every: int = 0


@dataclass(frozen=True)
class RoundResult:
    """What one round gave: the new shared parts, who was asked, who answered, and the metrics by client where evaluated.

    `beside` are devices of no cohort whose parts joined. `bytes_down` and `bytes_up` are those of the tensors sent to and taken from the
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


Beside = Callable[[], Sequence[Update]]
"""Updates of some parts only, by ascending client, from devices that are in no cohort: head-only ones. Asked after the cohort's."""


class Broadcasts(Mapping[ClientId, Parts]):
    """What each client of a cohort receives, computed when it is asked for, so that a cohort costs no memory.

    `bytes` notes how much went to each client that was asked for.
    """

    def __init__(self, method: Method, shared: Parts, cohort: Iterable[ClientId]) -> None:
        self._method, self._shared, self._cohort = method, shared, tuple(cohort)
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
) -> Iterator[RoundResult]:
    """Rounds `first`..plan.rounds, yielding after each. Raises RunError when fewer than the quorum answer.

    What `beside` gives once the cohort has answered joins the round's aggregate.
    """
    shared = steps.start(method) if shared is None else shared
    for number in range(first, plan.rounds + 1):
        started = time.monotonic()
        now = method.at(number)
        clients = fleet.clients()
        cohort = (
            list(clients) if method.trains_everyone else cohorts.draw(clients, plan.cohort, plan.seed, number)
        )
        downs = Broadcasts(now, shared, cohort)
        answered: dict[ClientId, int] = {}
        updates = _noting(in_order(fleet.train(number, now, downs), cohort), answered)
        others: list[ClientId] = []
        updates = _joined(updates, beside, others)
        shared = steps.aggregate(now, shared, updates)
        for _ in updates:  # a method whose aggregate reads nothing still waits for its clients
            pass
        if len(answered) < cohorts.quorum(len(cohort), plan.cohort):
            raise RunError(
                f"round {number}: {len(answered)} of {len(cohort)} clients answered, "
                f"expected at least {cohorts.quorum(len(cohort), plan.cohort)}; the run stops with round {number - 1}'s model"
            )
        due = plan.evaluate_every and number % plan.evaluate_every == 0
        metrics = evaluate(now, fleet, shared, number) if due else {}
        seconds = time.monotonic() - started
        traffic = sum(downs.bytes.values()), sum(answered.values())
        yield RoundResult(
            number, shared, tuple(cohort), tuple(answered), seconds, metrics, *traffic, tuple(others)
        )


def evaluate(method: Method, fleet: Fleet, shared: Parts, round: int) -> dict[ClientId, Mapping[str, float]]:
    """Metrics of every client with the just-aggregated parts (`post_agg`, METHODS.md G13)."""
    clients = fleet.clients()
    return {
        u.client: u.metrics
        for u in in_order(fleet.evaluate(round, method, Broadcasts(method, shared, clients)), clients)
    }


def close(
    method: Method, fleet: Fleet, shared: Parts, round: int, beside: Beside = lambda: ()
) -> tuple[Parts, dict[ClientId, Mapping[str, float]]]:
    """The closing steps: personalise on every client, then finalise -> (shared parts, metrics before and after both by client)."""
    clients = fleet.clients()
    metrics: dict[ClientId, Mapping[str, float]] = {}

    def noted() -> Iterator[Update]:
        for update in in_order(
            fleet.personalise(round, method, Broadcasts(method, shared, clients)), clients
        ):
            metrics[update.client] = update.metrics
            yield update

    updates = noted()
    closed = steps.finalise(method, shared, _joined(updates, beside, []))
    for _ in updates:
        pass
    if closed is not shared:  # clients predict with something else now
        for client, found in evaluate(method, fleet, closed, round).items():
            metrics[client] = {**metrics.get(client, {}), **afterwards(found)}
    return closed, metrics


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


def _joined(updates: Iterator[Update], beside: Beside, noted: list[ClientId]) -> Iterator[Update]:
    """The cohort's updates, then the others', noting whose these are."""
    yield from updates
    for update in beside():
        noted.append(update.client)
        yield update


def _noting(updates: Iterator[Update], answered: dict[ClientId, int]) -> Iterator[Update]:
    """The updates, noting who sent how many bytes."""
    for update in updates:
        answered[update.client] = size_bytes(update.parts)
        yield update
