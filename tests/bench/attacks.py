"""`python -m tests.bench.attacks`: what attacking devices cost under each kind of aggregation, as the table of docs/robustness.md.

FedAvg on the digits with 20 clients and 10 rounds, simulated with the product's round loop. A cost is the accuracy of the global model on
the correct clients' test data in the same fleet without attackers and protection, minus that under attack: paired by seed, in percentage
points.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

import numpy as np
import torch
from torch import Tensor

from edge_fl import metrics
from edge_fl.config import Recipe, with_settings
from edge_fl.console.tables import Table, markdown
from edge_fl.errors import EdgeFLError
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.aggregation.robust import Robust
from edge_fl.learn.aggregation.screening import Screen
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl_server.orchestrate import setup as setups
from edge_fl_server.orchestrate.execute import simulated_fleet
from edge_fl_server.training import rounds
from edge_fl_server.training import study as studies
from edge_fl_server.training.fleet import ClientId, Downs, Fleet, Step, WrappedFleet
from edge_fl_server.training.rounds import Plan, RoundResult, RunHooks

CLIENTS, ROUNDS = 20, 10
CLAIMED = 2**30
NAMED = 3  # dropped updates
Attack = Callable[[Update, Parts, Sequence[Update]], Update]
"""(the attacker's honest update, the broadcast, the honest updates of the round) -> what it sends."""


def replaced(update: Update, value: Callable[[str, str, Tensor], Tensor]) -> Update:
    """The update with every floating-point tensor replaced by `value(part, name, tensor)`."""
    parts = {
        part: {name: value(part, name, t) if t.is_floating_point() else t for name, t in params.items()}
        for part, params in update.parts.items()
    }
    return replace(update, parts=parts)


def sign_flip(update: Update, before: Parts, honest: Sequence[Update]) -> Update:
    return replaced(update, lambda part, name, tensor: 2 * before[part][name] - tensor)


def scaling(update: Update, before: Parts, honest: Sequence[Update]) -> Update:
    return replaced(update, lambda part, name, tensor: -900 * tensor)


def inflation(update: Update, before: Parts, honest: Sequence[Update]) -> Update:
    return replace(sign_flip(update, before, honest), samples=CLAIMED)


def not_a_number(update: Update, before: Parts, honest: Sequence[Update]) -> Update:
    return replaced(update, lambda part, name, tensor: tensor * torch.nan)


def little(update: Update, before: Parts, honest: Sequence[Update]) -> Update:
    """One standard deviation below the mean in every coordinate (Baruch et al., NeurIPS 2019, with z = 1)."""

    def value(part: str, name: str, tensor: Tensor) -> Tensor:
        sent = torch.stack([one.parts[part][name] for one in honest])
        return sent.mean(0) - sent.std(0)

    return replaced(update, value)


ATTACKS: Mapping[str, Attack] = {
    "sign flip": sign_flip,
    "scaling by -900": scaling,
    "flip, 2^30 samples": inflation,
    "NaN": not_a_number,
    "a little is enough": little,
}


class AttackedFleet(WrappedFleet):
    """Simulated clients, some of which replace their updates."""

    def __init__(self, fleet: Fleet, attack: Attack, attackers: Collection[ClientId]) -> None:
        super().__init__(fleet)
        self._attack, self._attackers = attack, attackers

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        updates = list(self._fleet.each(step, round, method, downs))
        honest = [update for update in updates if update.client not in self._attackers]
        for update in updates:
            attacks = step == "train" and update.client in self._attackers
            yield self._attack(update, downs[update.client], honest) if attacks else update


@dataclass
class Protection(RunHooks):
    """What a server does by default: bound weights, screen updates, quarantine repeated outliers. `protected` False: nothing."""

    recipe: Recipe
    protected: bool
    screen_: Screen = field(init=False)
    dropped: list[ClientId] = field(default_factory=list)
    quarantined: set[ClientId] = field(default_factory=set)
    _counts: Counter[ClientId] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.screen_ = Screen(self.recipe.validation.max_norm)

    def screen(self, updates: Iterator[Update], shared: Parts) -> Iterator[Update]:
        if not self.protected:
            return updates
        counted = [update for update in updates if update.client not in self.quarantined]
        limit = round(self.recipe.validation.max_weight * median(min(u.samples, 10**9) for u in counted))
        return self.screen_.round((replace(u, samples=min(u.samples, limit)) for u in counted), shared)

    def after_round(self, result: RoundResult, fleet: Fleet) -> None:
        self.dropped.extend(self.screen_.dropped)
        self._counts.update(self.screen_.outliers.keys())
        self.quarantined = {
            c for c, n in self._counts.items() if n >= self.recipe.validation.quarantine_after
        }


@dataclass(frozen=True)
class Outcome:
    """Test accuracy of the global model by client (empty: no usable model), the clients in a random order, and who was detected.

    `dropped` has a client once per update that was not used.
    """

    accuracies: Mapping[ClientId, float]
    order: Sequence[ClientId]
    dropped: Sequence[ClientId]
    quarantined: Collection[ClientId]


@dataclass(frozen=True)
class Defence:
    """A way to aggregate; `protected`: with the server's defaults."""

    name: str
    protected: bool
    robust: Robust = Robust()


DEFENCES = (
    Defence("mean, unprotected", False),
    Defence("mean (defaults)", True),
    Defence("clipped mean, 1.0", False, Robust(clip=1.0)),
    Defence("trimmed mean, 0.2", False, Robust("trimmed", trim=0.2)),
    Defence("median", False, Robust("median")),
    Defence("geometric median", False, Robust("geometric")),
    Defence("defaults and median", True, Robust("median")),
)


def run(beta: float, seed: int, defence: Defence, attack: str = "", attackers: int = 0) -> Outcome:
    """Run one fleet in which the first `attackers` clients of a random order attack."""
    settings = (f"data.clients={CLIENTS}", f"data.beta={beta}", f"seed={seed}", f"rounds={ROUNDS}")
    others = ("method.name=fedavg", f"evaluate_every={ROUNDS}", "engine=sequential", "device=cpu")
    recipe = with_settings(Recipe(), (*settings, *others))
    setup = setups.of_study(studies.prepare(recipe))
    fleet = simulated_fleet(setup)
    order = [str(client) for client in np.random.default_rng(seed).permutation(sorted(fleet.clients()))]
    attacked = AttackedFleet(fleet, ATTACKS[attack], order[:attackers]) if attack else fleet
    protection = Protection(recipe, defence.protected)
    plan = replace(Plan.of(recipe, setup.method), robust=defence.robust)
    accuracies: dict[ClientId, float] = {}
    try:
        *_, last = rounds.run(setup.method, attacked, plan, steps.start(setup.method), hooks=protection)
        accuracies = {client: report[metrics.GLOBAL_TEST] for client, report in last.metrics.items()}
    except (EdgeFLError, KeyError):  # the model is not finite
        pass
    return Outcome(accuracies, order, protection.dropped, protection.quarantined)


class Study:
    """Runs of the same fleets, paired by seed; honest unprotected fleets are run once."""

    def __init__(self, beta: float, seeds: int) -> None:
        self._beta, self._seeds = beta, range(seeds)
        self._reference = [run(beta, seed, DEFENCES[0]) for seed in self._seeds]

    @property
    def reference(self) -> float:
        """Mean accuracy of honest fleets without protection, in per cent."""
        return 100 * fmean(fmean(outcome.accuracies.values()) for outcome in self._reference)

    def cell(self, defence: Defence, attack: str = "", attackers: int = 0) -> str:
        """Cost in points; with protection also the named and quarantined attackers, and what it did to correct clients."""
        costs, named, quarantined, dropped, wrong = [], 0, 0, 0, 0
        for seed, reference in zip(self._seeds, self._reference, strict=True):
            outcome = run(self._beta, seed, defence, attack, attackers)
            correct, bad = outcome.order[attackers:], set(outcome.order[:attackers])
            reached = fmean(outcome.accuracies.get(client, 0.0) for client in correct)
            costs.append(100 * (fmean(reference.accuracies[client] for client in correct) - reached))
            named += sum(outcome.dropped.count(client) >= NAMED for client in bad)
            quarantined += len(bad.intersection(outcome.quarantined))
            dropped += sum(client not in bad for client in outcome.dropped)
            wrong += len(set(outcome.quarantined) - bad)
        text = f"{fmean(costs):.1f}"
        if defence.protected:
            seeds = len(self._seeds)
            share = dropped / ((CLIENTS - attackers) * ROUNDS * seeds)
            text += f" ({named}, {quarantined} of {attackers * seeds}; {share:.1%}, {wrong})"
        return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.attacks", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--beta", type=float, default=0.3, help="Dirichlet concentration; small is uneven")
    parser.add_argument("--attackers", type=int, nargs="*", default=[1, 3], help=f"of {CLIENTS} clients")
    parser.add_argument("--defences", nargs="*", default=[defence.name for defence in DEFENCES])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    study = Study(options.beta, options.seeds)
    columns = [(attack, attackers) for attack in ATTACKS for attackers in options.attackers]
    rows = []
    for defence in (defence for defence in DEFENCES if defence.name in options.defences):
        cells = [study.cell(defence), *(study.cell(defence, *column) for column in columns)]
        rows.append([defence.name, *cells])
        print(" | ".join(rows[-1]), flush=True)
    headings = ["aggregation", "no attack", *(f"{attack}, {attackers}" for attack, attackers in columns)]
    print(markdown(Table(headings, rows)))
    print(
        f"\nReference: {study.reference:.1f} % mean test accuracy; n = {options.seeds} seeds, {CLIENTS} clients."
    )


if __name__ == "__main__":
    main()
