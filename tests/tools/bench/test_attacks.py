"""A sample of the attack table in CI: two of ten attackers are named and cost little, honest one-class clients lose nothing."""

from functools import cache
from statistics import fmean

import pytest

from tools.bench.attacks import ATTACKS, DEFAULTS, HONEST, NAMED, UNPROTECTED, Fleets, Outcome

FLEETS = Fleets(10)
SEED, BAD = 1, 2


@cache
def without_attackers(fleets: Fleets, bad: int) -> Outcome:
    return fleets.run(SEED, UNPROTECTED, "", bad)


def cost(fleets: Fleets, outcome: Outcome, bad: int) -> float:
    """Percentage points that the correct clients lose against the same fleet without the attackers."""
    reference = without_attackers(fleets, bad).accuracies
    correct = outcome.order[bad:]
    return 100 * fmean(reference[id] - outcome.accuracies[id] for id in correct)


@pytest.mark.parametrize(
    "attack", [name for name in ATTACKS if name not in ("backdoor", "drift back, own noise")]
)
def test_two_of_ten_attackers_are_named_and_cost_little(attack: str) -> None:
    outcome = FLEETS.run(SEED, DEFAULTS, attack, BAD)
    assert cost(FLEETS, outcome, BAD) <= 10  # of one seed; docs/attacks.md has the means
    assert all(outcome.dropped.count(id) >= NAMED for id in outcome.order[:BAD])
    assert set(outcome.quarantined) <= set(outcome.order[:BAD])


def test_without_protection_the_worst_attack_costs_everything() -> None:
    outcome = FLEETS.run(SEED, UNPROTECTED, "running_mean = 5", BAD)
    assert cost(FLEETS, outcome, BAD) > 40


@pytest.mark.parametrize("name", [name for name, _, _ in HONEST if "one class" in name])
def test_honest_clients_with_one_class_lose_nothing(name: str) -> None:
    method, settings = next((method, settings) for found, method, settings in HONEST if found == name)
    fleets = Fleets(10, settings, method)
    outcome = fleets.run(SEED, DEFAULTS)
    assert abs(cost(fleets, outcome, 0)) < 0.5
    assert not outcome.quarantined
