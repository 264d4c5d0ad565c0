"""The bound of the accuracy gates, computed a second time from docs/gates.md: nothing here calls the product on the side that it checks."""

from functools import partial, reduce
from itertools import pairwise

import numpy as np
import pytest
from scipy.special import gammaln

from edge_fl_server.recipes.recipe import GateConfig
from edge_fl_server.release.rollout import gates
from edge_fl_server.release.rollout.gates import Outcome

GATES = GateConfig()
SPREAD, FALSE_ABORT = 0.02, 0.02
LOSSES = {
    "mean": 0.03 ** np.array([1, 2 / 3, 1 / 3, 0]),
    "decile": 0.1 ** np.array([1, 2 / 3, 1 / 3, 0]),
    "fleet": 0.03 ** np.array([1, 2 / 3, 1 / 3, 0]),
    "promise": 0.03 ** np.array([1, 2 / 3, 1 / 3, 0]),
    "pooled": 0.03 ** np.array([1, 2 / 3, 1 / 3, 0]),
}
SHARE = {"mean": 0.5, "decile": 0.1, "fleet": 0.5, "promise": 0.5, "pooled": 0.9}
GATE = np.log(300)
LIMIT = {**dict.fromkeys(("mean", "decile", "fleet", "promise"), GATE), "pooled": np.log(50)}
LARGEST = {**{name: 0.45 * limit for name, limit in LIMIT.items()}, "pooled": 0.65 * np.log(50)}


def outcome_for(test: str, images: int, lost: int, gained: int) -> Outcome:
    """The outcome of a device that reports these numbers to a test."""
    if test == "fleet":
        return Outcome(fleet_images=images, fleet_lost=int(lost), fleet_gained=int(gained))
    if test == "promise":
        return Outcome(promise_images=images, promise_lost=int(lost), promise_gained=int(gained))
    return Outcome("", images, int(lost), int(gained))


def tilts(test: str, images: int) -> np.ndarray:
    return LOSSES[test] / (LOSSES[test] + 0.06 + images * SPREAD**2)


def ratios(test: str, images: int, lost: np.ndarray, gained: np.ndarray) -> np.ndarray:
    """What reports multiply the ratios of a test by, [..., 4]."""
    t = tilts(test, images)
    harmed = (
        (1 + t) ** lost[..., None] * (1 - t) ** gained[..., None] * np.exp(-((t * SPREAD * images) ** 2) / 2)
    )
    return np.minimum(1 - SHARE[test] + SHARE[test] * harmed, np.exp(LARGEST[test]))


def possible(images: int) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of lost and gained predictions."""
    lost, gained = np.meshgrid(np.arange(images + 1), np.arange(images + 1), indexing="ij")
    fits = lost + gained <= images
    return lost[fits], gained[fits]


def probability(images: int, lost: np.ndarray, gained: np.ndarray, lose: float, gain: float) -> np.ndarray:
    """Of each pair, if an image is lost with probability `lose` and gained with `gain`."""
    same = images - lost - gained
    log = gammaln(images + 1) - gammaln(lost + 1) - gammaln(gained + 1) - gammaln(same + 1)
    return np.exp(log) * float(lose) ** lost * float(gain) ** gained * (1 - lose - gain) ** same


@pytest.mark.parametrize("images", [1, 5, 10, 50])
@pytest.mark.parametrize("test", SHARE)
def test_the_gates_add_what_the_formula_says_for_every_possible_report(test: str, images: int) -> None:
    lost, gained = possible(images)
    found = [
        gates.added(test, outcome_for(test, images, a, b), GATES) for a, b in zip(lost, gained, strict=True)
    ]
    assert np.exp(found) == pytest.approx(ratios(test, images, lost, gained))


@pytest.mark.parametrize("images", [1, 5, 10, 50])
@pytest.mark.parametrize("change", [-0.3, -0.05, -0.01, 0.0, 0.01, 0.05, 0.3])
@pytest.mark.parametrize("changed", [0.0, 0.06, 0.4])
def test_the_mean_ratio_of_a_device_is_the_closed_form(images: int, change: float, changed: float) -> None:
    """For a real change c, summed over all reports: (1 + |c| t)^images or (1 - c t)^images, times the factor of the spread."""
    lost, gained = possible(images)
    lose, gain = changed / 2 + max(-change, 0.0), changed / 2 + max(change, 0.0)
    weights = probability(images, lost, gained, lose, gain)
    for loss in LOSSES["mean"]:
        t = loss / (loss + 0.06 + images * SPREAD**2)
        found = [
            gates._lost(Outcome("", images, int(a), int(b)), loss, SPREAD)
            for a, b in zip(lost, gained, strict=True)
        ]
        exact = (1 - change * t) ** images * np.exp(-((t * SPREAD * images) ** 2) / 2)
        assert weights @ np.exp(found) == pytest.approx(exact)


@pytest.mark.parametrize("images", [1, 5, 10, 50, 200])
@pytest.mark.parametrize("spread", [0.0, 0.01, 0.02])
@pytest.mark.parametrize("changed", [0.0, 0.005, 0.06, 0.4])
@pytest.mark.parametrize("test", SHARE)
def test_the_mean_of_what_a_harmless_report_multiplies_by_is_at_most_one(
    test: str, changed: float, spread: float, images: int
) -> None:
    """Exact sums over all reports and the quadrature of a normal change: nothing is drawn."""
    points, weights = np.polynomial.hermite_e.hermegauss(31)
    lost, gained = possible(images)
    found = np.exp(
        [gates.added(test, outcome_for(test, images, a, b), GATES) for a, b in zip(lost, gained, strict=True)]
    )
    mean = sum(
        weight
        / weights.sum()
        * probability(images, lost, gained, changed / 2 + max(-c, 0), changed / 2 + max(c, 0))
        for weight, c in zip(weights, spread * points, strict=True)
    )
    assert (mean @ found <= 1 + 1e-9).all()


@pytest.mark.parametrize("runs", [50_000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("images", "devices"), [(10, 20), (50, 10)])
def test_simulated_roll_outs_reach_a_limit_at_most_as_often_as_ville_says(
    images: int, devices: int, runs: int
) -> None:
    """Real changes as large as `spread` allows. The product objects in exactly the roll-outs in which the formula does."""
    rng, reached = np.random.default_rng(images), dict.fromkeys(SHARE, 0)
    for batch in range(runs // 10_000):
        change = rng.normal(0, SPREAD, (10_000, devices))
        lost = rng.binomial(images, 0.03 + np.maximum(-change, 0))
        gained = rng.binomial(
            images - lost, (gain := 0.03 + np.maximum(change, 0)) / (1 - 0.03 - np.maximum(-change, 0))
        )
        assert gain.max() < 0.5
        over = {test: crossed(test, images, lost, gained) for test in SHARE}
        for test, found in over.items():
            reached[test] += found.sum()
        if batch:
            continue
        chosen = np.unique(
            np.concatenate([np.arange(100), *(np.flatnonzero(found)[:50] for found in over.values())])
        )
        for run in chosen:
            pairs = [*zip(lost[run], gained[run], strict=True)]
            for test in SHARE:
                reports = [outcome_for(test, images, a, b) for a, b in pairs]
                assert product_crosses(test, reports) == over[test][run], (run, test)
    for test, count in reached.items():
        bound = np.exp(-LIMIT[test])
        assert count / runs <= bound + 3 * np.sqrt(bound / runs), test


def crossed(test: str, images: int, lost: np.ndarray, gained: np.ndarray) -> np.ndarray:
    """Whether the mean of the products of the ratios ever reaches the limit, [roll-outs]."""
    products = np.ones((len(lost), 4))
    found = np.zeros(len(lost), bool)
    for device in range(lost.shape[1]):
        products *= ratios(test, images, lost[:, device], gained[:, device])
        found |= products.mean(axis=1) >= np.exp(LIMIT[test])
    return found


def product_crosses(test: str, reports: list[Outcome]) -> bool:
    evidence = gates.START
    for report in reports:
        evidence = gates.updated(evidence, report, GATES)
        if gates.ratio(evidence, test) >= gates.limit(test, GATES):
            return True
    return False


def test_the_power_grows_with_the_harm() -> None:
    """The ratio of `mean` after three devices of 20 images rises with the loss, whatever the loss is."""
    found = []
    for lost in (2, 4, 8, 20):
        evidence = reduce(partial(gates.updated, gates=GATES), [Outcome("", 20, lost, 0)] * 3, gates.START)
        found.append(gates.ratio(evidence, "mean"))
    assert all(less < more for less, more in pairwise(found))
    assert found[1] < gates.limit("mean", GATES) < found[2]
