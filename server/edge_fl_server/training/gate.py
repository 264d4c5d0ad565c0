"""The round gate: clients compare a round's candidate, the aggregated shared parts, with the current ones before it becomes current.

    panel -> (looks worse) -> larger panel -> (is worse) -> leave groups out -> accepted | repaired | dropped | forced

A client compares image by image on its validation set and answers with three counts: images, lost, gained. Its change is
(gained - lost) / images, in [-1, 1], so that it weighs the same whatever it claims.

1. A random panel, a fifth of the round's clients, compares every candidate. Unless its mean change without the best answers is clearly
   negative, the candidate is accepted. This panel alone drops nothing. It is drawn from the next round's clients first: a device
   then has the candidate when it becomes the next broadcast, so its download is only moved forward.
2. Otherwise a larger panel, as large as the round, is asked. TRIM of its changes are removed at each end, so that so many liars can
   neither drop a round nor save one. The round is worse if the trimmed mean is below minus the margin, and below 0 by Z standard errors.
   The error is the larger of two: that of the discordant images, as if each were lost or gained by the flip of a fair coin, and that of
   the drawn clients, which is 0 where all were asked. Of two clients both must have lost GROSS; one client never drops a round.
3. A round that is worse is aggregated again without one group of its updates at a time, and some of the larger panel compare these
   candidates. The groups without which it is best are left out until it is no longer worse. Then their members come back one by one; those
   that make it worse again stay out, and are named if that is beyond chance. At most half of the updates are left out; if that does not
   help, the round is dropped and nobody is named.

After MOST_DROPPED rounds dropped in a row the next one is accepted whatever the panel says, so that a run cannot be stopped.

The margin: where all clients take part, the accuracy of honest rounds falls by little. Where few take part, honest rounds forget the
classes of the others; the margin grows with the share that did not (docs/robustness.md has the measured falls).
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts, same, size_bytes
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl.metrics import VALIDATION_GAINED, VALIDATION_LOST, VALIDATION_SAMPLES
from edge_fl.seeds import generator
from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.training import cohorts
from edge_fl_server.training.clients import Broadcasts, ClientId, Clients
from edge_fl_server.training.records import MOST_DROPPED, Outcome, RoundVerdict

log = logging.getLogger(__name__)

PANEL, SMALLEST_PANEL = 0.2, 3
"""The panel's share of a round's clients where the recipe says "auto", and its size at least."""
LEAST = 8
"""Available clients from which on "auto" has rounds compared."""
SUSPICIOUS = 2 / 3
"""A panel's mean change, in margins, from which on a larger panel is asked."""
LARGER_PANEL_MIN, LARGER_PANEL_MAX = 8, 50
MARGIN, MARGIN_OF_ABSENT = 0.10, 0.40
"""The fall in accuracy that is accepted where every client takes part, and what is added where none would."""
TRIM, Z = 0.2, 2.0
GROSS = 0.5
GROUPS, PANEL_OF_GROUPS = 5, 8
LEFT_OUT, NAMED = 0.05, 0.10
"""The fall that one client's update causes, from which on it is left out, and from which on its outlier score is 1."""
MAX_SCORE = 100.0


@dataclass(frozen=True)
class RoundComparison:
    """One client's comparison of two models on `images` validation images."""

    images: int
    lost: int
    gained: int

    @property
    def change(self) -> float:
        return (self.gained - self.lost) / self.images


@dataclass(frozen=True)
class Evidence:
    """The comparisons of one candidate by clients with validation images, drawn from `of` clients."""

    comparisons: Mapping[ClientId, RoundComparison]
    of: int

    def __or__(self, other: "Evidence") -> "Evidence":
        return Evidence({**self.comparisons, **other.comparisons}, max(self.of, other.of))

    @property
    def changes(self) -> np.ndarray:
        return np.array([comparison.change for comparison in self.comparisons.values()])

    @property
    def trimmed(self) -> float:
        return trimmed(self.changes)

    @property
    def error(self) -> float:
        """Standard error of the trimmed mean."""
        comparisons, n = list(self.comparisons.values()), len(self.comparisons)
        noise = sum(max(c.lost + c.gained, 1) / c.images**2 for c in comparisons) / n
        drawn = error_of(self.changes) * math.sqrt(1 - n / max(self.of, n))
        return max(math.sqrt(noise / (n - 2 * trimmed_off(n))), drawn)

    def suspicious(self, margin: float) -> bool:
        """Whether a few clients, without the best answers, lost so much that more should be asked: SUSPICIOUS of the margin, and more than
        one standard error of the images.
        """
        comparisons = sorted(self.comparisons.values(), key=lambda comparison: comparison.change)
        if not (kept := comparisons[: len(comparisons) - trimmed_off(len(comparisons))]):
            return False
        lost, gained = sum(c.lost for c in kept), sum(c.gained for c in kept)
        fell = sum(c.change for c in kept) / len(kept)
        return fell <= -SUSPICIOUS * margin and lost - gained > math.sqrt(lost + gained)

    def worse(self, margin: float) -> bool:
        """Whether the candidate is worse by more than the margin, beyond chance."""
        n = len(self.comparisons)
        if n < 3:
            return n == 2 and bool((self.changes <= -max(GROSS, margin)).all())
        return self.trimmed <= -margin and self.trimmed + Z * self.error < 0


def trimmed_off(answers: int) -> int:
    """How many answers are removed at each end: TRIM of them, at least one of three."""
    return max(int(TRIM * answers), 1) if answers >= 3 else 0


def trimmed(changes: np.ndarray) -> float:
    """The mean without the smallest and largest values; 0 of none."""
    cut = trimmed_off(len(changes))
    return float(np.sort(changes)[cut : len(changes) - cut].mean()) if len(changes) else 0.0


def error_of(changes: np.ndarray) -> float:
    """The standard error of a trimmed mean of independent values, from the winsorised ones (Tukey and McLaughlin, 1963)."""
    n, cut = len(changes), trimmed_off(len(changes))
    if n < 2:
        return math.inf
    winsorised = np.clip(changes, *np.sort(changes)[[cut, n - 1 - cut]])
    return float(winsorised.std(ddof=1)) / (1 - 2 * cut / n) / math.sqrt(n)


@dataclass(frozen=True)
class RoundCandidate:
    """A round's outcome before it counts: `aggregate` is pure, and gives `shared` for all `updates`."""

    method: Method
    round: int
    current: Parts
    shared: Parts
    updates: Sequence[Update]
    aggregate: Callable[[Sequence[Update]], Parts]


@dataclass
class Gate:
    """The gate of a run. `panel`: the panel's share of a round's clients, 0: no gate; `least`: available clients from which on it works.

    `dropped`: rounds dropped in a row before the first one. Panels are drawn from `seed`, so a resumed run draws the same.
    """

    clients: Clients
    panel: float
    least: int = 2
    cohort: CohortConfig = CohortConfig()
    seed: int = 0
    dropped: int = 0
    _comparisons: int = field(default=0, init=False)
    _bytes: int = field(default=0, init=False)

    def applies(self, method: Method) -> bool:
        """Whether rounds of this method are compared now: enough clients, and a model that predicts between rounds."""
        predicts = method.has_global or method.predicts_early
        return bool(self.panel and predicts and len(self.clients.ids()) >= self.least)

    def decide(self, candidate: RoundCandidate) -> tuple[Parts, RoundVerdict | None]:
        """The shared parts after the round, and why; no verdict where nothing changed or no client could compare."""
        if same(candidate.current, candidate.shared) or not candidate.updates:
            return candidate.shared, None
        self._comparisons = self._bytes = 0
        order = self._order(candidate.round)
        members = len(candidate.updates)
        margin = MARGIN + MARGIN_OF_ABSENT * max(1 - members / max(len(self.clients.ids()), 1), 0)
        size = max(int(self.panel * members + 1e-9), SMALLEST_PANEL)
        evidence = self._ask(candidate, candidate.shared, order[:size])
        if evidence.suspicious(margin):
            larger = min(max(members, LARGER_PANEL_MIN), LARGER_PANEL_MAX)
            evidence |= self._ask(candidate, candidate.shared, order[size:larger])
            if evidence.worse(margin):
                return self._without_the_cause(candidate, evidence, margin)
        self.dropped = 0
        if not evidence.comparisons:
            log.info(
                "round %d: no client of the panel has validation samples; the round was not compared",
                candidate.round,
            )
            return candidate.shared, None
        return candidate.shared, self._verdict("accepted", evidence, margin)

    def _without_the_cause(
        self, candidate: RoundCandidate, evidence: Evidence, margin: float
    ) -> tuple[Parts, RoundVerdict]:
        """Leave out those who made the round worse; without them drop it, or accept it after too many."""
        panel = list(evidence.comparisons)[:PANEL_OF_GROUPS]
        found = _Search(candidate, lambda shared: self._ask(candidate, shared, panel), margin).run()
        if found:
            self.dropped = 0
            shared, without, named = found
            verdict = self._verdict("repaired", evidence, margin, without, named)
        elif self.dropped < MOST_DROPPED:
            self.dropped += 1
            shared, verdict = candidate.current, self._verdict("dropped", evidence, margin)
        else:
            self.dropped = 0
            shared, verdict = candidate.shared, self._verdict("forced", evidence, margin)
        level = logging.ERROR if verdict.outcome == "forced" else logging.WARNING
        log.log(level, "round %d: %s", candidate.round, verdict)
        return shared, verdict

    def _order(self, round: int) -> list[ClientId]:
        """The available clients in the order in which they are asked in this round, those of the next round first."""
        clients, working = self.clients, self.clients.at_work()
        idle = [client for client in clients.ids() if client not in working]
        order = [idle[place] for place in generator(self.seed, "gate", round).permutation(len(idle))]
        following = set(
            cohorts.draw(
                clients.trainable(),
                self.cohort,
                self.seed,
                round + 1,
                may_drop_out=clients.may_drop_out,
                at_work=working,
            )
        )
        return sorted(order, key=lambda client: client not in following)

    def _ask(self, candidate: RoundCandidate, shared: Parts, panel: Sequence[ClientId]) -> Evidence:
        """What these clients say about `shared` against the current parts; those that do not answer are missing."""
        method, sizes, found = candidate.method, dict[ClientId, int](), {}

        def both(client: ClientId) -> Parts:
            current, proposed = (
                steps.broadcast(method, each, client) for each in (candidate.current, shared)
            )
            sizes[client] = size_bytes(proposed)  # a client of this round has the rest
            return steps.paired(current, proposed)

        downs = Broadcasts(both, panel)
        for update in self.clients.each("compare", candidate.round, method, downs) if panel else ():
            counts = (
                update.metrics.get(name, 0.0)
                for name in (VALIDATION_SAMPLES, VALIDATION_LOST, VALIDATION_GAINED)
            )
            images, lost, gained = (int(count) for count in counts)
            self._comparisons += 1
            if images > 0 and min(lost, gained) >= 0 and lost + gained <= images:
                found[update.client] = RoundComparison(images, lost, gained)
        self._bytes += sum(sizes.values())
        return Evidence({id: found[id] for id in panel if id in found}, len(self.clients.ids()))

    def _verdict(
        self,
        outcome: Outcome,
        evidence: Evidence,
        margin: float,
        without: Collection[ClientId] = (),
        named: Mapping[ClientId, float] | None = None,
    ) -> RoundVerdict:
        comparisons = evidence.comparisons.values()
        return RoundVerdict(
            outcome,
            round(evidence.trimmed, 4),
            round(margin, 4),
            len(comparisons),
            sum(c.images for c in comparisons),
            sum(c.lost for c in comparisons),
            sum(c.gained for c in comparisons),
            tuple(sorted(without)),
            dict(named or {}),
            self._comparisons,
            self._bytes,
        )


@dataclass
class _Search:
    """The search for the updates that made a round worse. `ask` has the same panel compare any candidate with the current parts."""

    candidate: RoundCandidate
    ask: Callable[[Parts], Evidence]
    margin: float

    def run(self) -> tuple[Parts, set[ClientId], dict[ClientId, float]] | None:
        """The shared parts without them, who they are, and the outlier scores of those who certainly did; None if nothing helps."""
        updates = self._by_contribution()
        out = self._groups_without_which_it_is_better(updates)
        if not out:
            return None
        shared, evidence = self._compared(out)
        without, named = set(out), dict[ClientId, float]()
        for update in reversed(updates):  # who contributed least comes back first
            if update.client not in out:
                continue
            with_it, evidence_with_it = self._compared(without - {update.client})
            harm, error = fall(evidence, evidence_with_it)
            if harm < LEFT_OUT:
                without, shared, evidence = without - {update.client}, with_it, evidence_with_it
            elif harm >= NAMED and harm > Z * error:
                named[update.client] = round(min(harm / NAMED, MAX_SCORE), 3)
        if not without or not self._is_cured(evidence):
            return None
        return shared, without, named

    def _groups_without_which_it_is_better(self, updates: Sequence[Update]) -> set[ClientId]:
        """The members of the fewest groups without which the round is not worse; empty if there are none."""
        groups = [list(group) for group in np.array_split(np.arange(len(updates)), min(GROUPS, len(updates)))]
        members = [{updates[place].client for place in group} for group in groups]
        alone = [self._compared(group)[1] for group in members]
        out: set[ClientId] = set()
        for place in sorted(range(len(members)), key=lambda place: -alone[place].trimmed):
            out |= members[place]
            if len(out) > len(updates) / 2:
                break
            evidence = alone[place] if out == members[place] else self._compared(out)[1]
            if self._is_cured(evidence):
                return out
        return set()

    def _is_cured(self, evidence: Evidence) -> bool:
        return bool(evidence.comparisons) and evidence.trimmed > -self.margin

    def _compared(self, without: Collection[ClientId]) -> tuple[Parts, Evidence]:
        kept = [update for update in self.candidate.updates if update.client not in without]
        shared = self.candidate.aggregate(kept)
        return shared, self.ask(shared)

    def _by_contribution(self) -> list[Update]:
        """The updates in descending order of their inner product with the round's change, so that colluders are neighbours."""
        current, change = self.candidate.current, self.candidate.shared

        def contribution(update: Update) -> float:
            total = 0.0
            for part, params in update.parts.items():
                for name, tensor in params.items():
                    before, after = (tree.get(part, {}).get(name) for tree in (current, change))
                    if before is None or after is None or not before.shape == after.shape == tensor.shape:
                        continue
                    if tensor.is_floating_point():
                        total += float(((tensor - before).double() * (after - before).double()).sum())
            return total if math.isfinite(total) else math.inf

        return sorted(self.candidate.updates, key=lambda update: (-contribution(update), update.client))


def fall(better: Evidence, worse: Evidence) -> tuple[float, float]:
    """By how much the accuracy with one candidate is below another's, over the clients that compared both, and its standard error."""
    both = [client for client in better.comparisons if client in worse.comparisons]
    falls = np.array([better.comparisons[c].change - worse.comparisons[c].change for c in both])
    return trimmed(falls), error_of(falls)
