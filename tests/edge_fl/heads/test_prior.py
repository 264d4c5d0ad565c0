"""The prior: what other devices know helps with few labels, does no harm with many, and a useless one is ignored."""

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_fl import heads
from edge_fl.errors import ArtefactError
from edge_fl.heads import HeadPlan
from edge_fl.heads.class_statistics import prior, sums
from edge_fl.heads.head import Array, Extras, Head
from edge_fl.heads.linear import RIDGE, direction, leverage, regress

CLASSES, DIM, DEVICES = 6, 160, 8
CENTRES = np.random.default_rng(0).normal(size=(CLASSES, DIM))
Samples = tuple[NDArray[np.float32], NDArray[np.int64]]


def device(seed: int, per_class: int, classes: int = CLASSES, noise: float = 5) -> Samples:
    """Pictures of one device, all of them shifted by its style."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(classes), per_class)
    style = 2 * np.random.default_rng(seed % 100).normal(size=DIM)
    return (CENTRES[y] + style + noise * rng.normal(size=(len(y), DIM))).astype(np.float32), y


def fleet(per_class: int = 20, mixed_up: bool = False) -> dict[str, dict[str, Array]]:
    """The extra made by the devices 1 to 8; `mixed_up`: with the sums of other classes."""
    total = sum(sums.of(*device(seed, per_class), CLASSES).flat for seed in range(1, DEVICES + 1))
    found = sums.from_flat(np.asarray(total), sums.shape_of(CLASSES, DIM)).addends()
    if mixed_up:
        found["sums"] = np.roll(found["sums"], 1, axis=0)
    return {prior.PRIOR: found}


def fit(data: Samples, extras: Extras, **options: bool) -> Head:
    return heads.fit(
        "logistic", *data, CLASSES, unit_norm=False, plan=HeadPlan("cosine"), extras=extras, **options
    )


def accuracy(labels: int, extras: Extras) -> float:
    """Mean over ten devices that are not in the prior, each tested on 60 pictures of its own."""
    found = []
    for seed in range(20, 30):
        z, y = device(seed + 100, 10)
        found.append((fit(device(seed, labels), extras).predict(z) == y).mean())
    return float(np.mean(found))


def test_with_one_label_per_class_a_prior_is_worth_ten_points_and_with_fifty_it_does_no_harm() -> None:
    extras = fleet()
    assert accuracy(1, extras) >= accuracy(1, {}) + 0.10
    assert accuracy(50, extras) >= accuracy(50, {}) - 0.005


@pytest.mark.parametrize("labels", [1, 3, 20])
def test_a_prior_that_contradicts_the_own_labels_costs_little(labels: int) -> None:
    assert accuracy(labels, fleet(mixed_up=True)) >= accuracy(labels, {}) - 0.04


@pytest.mark.parametrize("mixed_up", [False, True])
@pytest.mark.parametrize("seed", [20, 21, 22])
def test_the_share_is_that_of_the_smallest_leave_one_out_error(
    monkeypatch: pytest.MonkeyPatch, mixed_up: bool, seed: int
) -> None:
    data, extras = device(seed, 3), fleet(1, mixed_up)
    errors = {}
    for share in prior.SHARES:
        left_out = []
        with monkeypatch.context() as patch:
            patch.setattr(prior, "SHARES", (share,))
            for row in range(len(data[1])):
                rest = np.arange(len(data[1])) != row
                scores = fit((data[0][rest], data[1][rest]), extras).logits(data[0][row : row + 1])[0]
                left_out.append(np.square(scores / 10 - np.eye(CLASSES)[data[1][row]]).sum())
        errors[share] = np.mean(left_out)
    best, chosen = min(errors, key=lambda share: errors[share]), fit(data, extras)
    monkeypatch.setattr(prior, "SHARES", (best,))
    assert np.array_equal(chosen.logits(data[0]), fit(data, extras).logits(data[0]))


@pytest.mark.parametrize("samples", [12, 200])
@pytest.mark.parametrize("equal", [True, False])
def test_leverage_gives_the_errors_of_regressions_without_each_sample(samples: int, equal: bool) -> None:
    rng = np.random.default_rng(1)
    u, t = rng.normal(size=(samples, 40)), rng.normal(size=(samples, 2))
    shares = np.ones(samples) if equal else rng.uniform(0.5, 2, samples)
    weights, bias = regress(u, t, shares)
    found = (t - (u @ weights.T + bias)) / (1 - leverage(u, shares))[:, None]
    for row in range(0, samples, 5):
        rest = np.arange(samples) != row
        weights, bias = regress(u[rest], t[rest], shares[rest])
        assert found[row] == pytest.approx(t[row] - (weights @ u[row] + bias))


def poisoned(label: int, count: int, opposite: bool) -> Extras:
    """The fleet's extra with `count` pictures more of a class, in the opposite direction or in that of the next class."""
    found = sums.from_arrays(fleet()[prior.PRIOR])
    mean = -found.sums[label] if opposite else found.sums[(label + 1) % CLASSES]
    mean = mean / np.linalg.norm(mean)
    found.counts[label] += count
    found.sums[label] += count * mean
    q = sums.project(mean[None], len(found.moment))
    found.moment[:] += count * q.T @ q
    return {prior.PRIOR: found.arrays()}


def recall(labels: int, extras: Extras, label: int) -> tuple[float, float]:
    """Accuracy on the pictures of one class, and on those of the others, over ten devices that are not in the prior."""
    found = []
    for seed in range(20, 30):
        z, y = device(seed + 100, 20)
        right = fit(device(seed, labels), extras).predict(z) == y
        found.append((right[y == label].mean(), right[y != label].mean()))
    one, others = np.mean(found, axis=0)
    return float(one), float(others)


@pytest.mark.parametrize("opposite", [True, False])
@pytest.mark.parametrize("labels", [3, 10])
def test_a_poisoned_class_loses_its_own_prior_and_the_others_keep_theirs(labels: int, opposite: bool) -> None:
    honest, none = recall(labels, fleet(), 4), recall(labels, {}, 4)
    found = recall(labels, poisoned(4, 5000, opposite), 4)
    assert found[0] >= none[0] - 0.1  # its pictures are compared with classes that are better known
    assert found[1] >= honest[1] - 0.03 > none[1] + 0.1


def trusted(data: Samples, extras: Extras) -> list[bool]:
    u, y = direction(data[0]).astype(np.float64), data[1]
    labels, pictures = np.unique(y, return_counts=True)
    found = sums.from_arrays(extras[prior.PRIOR])
    return prior.trusted_classes(found, labels, prior.own_means(u, y), pictures).tolist()


@pytest.mark.parametrize("labels", [1, 2, 5, 20])
def test_an_honest_prior_is_trusted_in_every_class(labels: int) -> None:
    found = [trusted(device(seed, labels), fleet()) for seed in range(20, 60)]
    assert np.mean(found) > 0.98


@pytest.mark.parametrize("labels", [3, 5, 20])
def test_a_poisoned_class_is_not_trusted_and_the_others_are(labels: int) -> None:
    found = np.array([trusted(device(seed, labels), poisoned(4, 600, True)) for seed in range(20, 60)])
    assert found[:, 4].mean() < 0.05 and np.delete(found, 4, axis=1).mean() > 0.98


def test_with_more_than_a_third_of_the_classes_poisoned_it_is_the_cosine_head() -> None:
    extras = fleet()
    extras[prior.PRIOR]["sums"][:3] *= -1
    data = device(20, 4)
    assert trusted(data, extras) == [False] * 3 + [True] * 3
    assert np.array_equal(fit(data, extras).logits(data[0]), fit(data, {}).logits(data[0]))


def test_pictures_that_are_all_alike_are_fitted() -> None:
    z, y = np.ones((4, DIM), np.float32), np.array([0, 0, 1, 1])
    assert np.isfinite(fit((z, y), fleet()).logits(z)[:, :2]).all()


def test_the_prior_head_is_the_ridge_regression_on_the_features_themselves() -> None:
    z, y = device(1, 40)
    u = direction(z[:, :100]).astype(float)
    u -= u.mean(axis=0)
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    members, everything = np.eye(CLASSES)[y], np.ones(CLASSES, bool)
    found = sums.Statistics(
        members.sum(axis=0), members.T @ u, u.T @ u, np.zeros(100)
    )  # nothing is projected
    weights = prior.ridge_head(found, np.arange(CLASSES), 100, found.sums, everything)
    centred = u - u.mean(axis=0)
    covariance = centred.T @ centred / len(u) + prior.RIDGE * np.eye(100)
    expected = np.linalg.solve(covariance, centred.T @ (np.eye(CLASSES)[y] - 1 / CLASSES) / len(u)).T
    assert weights == pytest.approx(expected)


def test_only_classes_with_own_labels_are_predicted_and_unknown_ones_are_learned_from_them() -> None:
    extras = fleet()
    extras[prior.PRIOR]["count"][2] = 0
    extras[prior.PRIOR]["sums"][2] = 0
    z, y = device(20, 6)
    some = np.isin(y, (1, 2, 4))
    logits = fit((z[some], y[some]), extras).logits(z)
    assert np.isfinite(logits).any(axis=0).tolist() == [False, True, True, False, True, False]
    assert (logits.argmax(axis=1)[some] == y[some]).mean() > 0.9


def test_without_two_known_classes_it_is_the_cosine_head() -> None:
    extras = fleet()
    extras[prior.PRIOR]["count"][1:] = 0
    extras[prior.PRIOR]["sums"][1:] = 0
    data = device(20, 4)
    assert np.array_equal(fit(data, extras).logits(data[0]), fit(data, {}).logits(data[0]))


def test_share_0_is_the_cosine_head_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prior, "SHARES", (0.0,))
    data = device(20, 4)
    assert fit(data, fleet()).logits(data[0]) == pytest.approx(fit(data, {}).logits(data[0]), abs=1e-5)


def test_it_is_saved_as_a_cosine_head_and_also_fitted_where_that_is_configured() -> None:
    data, extras = device(20, 4), fleet()
    head = fit(data, extras)
    again = heads.from_arrays(head.to_arrays(), head.describe())
    chosen = heads.fit("cosine", *data, CLASSES, unit_norm=False, extras=extras)
    assert again.kind == chosen.kind == "cosine"
    for other in (again, chosen):
        assert np.array_equal(other.logits(data[0]), head.logits(data[0]))


def test_a_longer_list_of_classes_keeps_the_prior() -> None:
    z, y = device(20, 3)
    appended = np.where(y == 4, CLASSES + 1, y)  # a class that no device of the prior knows
    head = heads.fit("cosine", z, appended, CLASSES + 2, unit_norm=False, extras=fleet())
    some = y != 4
    shares = [(np.argmax(head.logits(z), axis=1) == appended)[rows].mean() for rows in (some, ~some)]
    assert min(shares) > 0.9


def test_noise_in_the_second_moment_does_not_break_the_prior() -> None:
    extras = fleet()
    noise = np.random.default_rng(0).normal(size=extras[prior.PRIOR]["moment"].shape)
    extras[prior.PRIOR]["moment"] += noise.astype(np.float32) * 20
    assert accuracy(1, extras) >= accuracy(1, {}) + 0.08


@pytest.mark.parametrize("balanced", [False, True])
def test_balanced_samples_are_weighted(balanced: bool) -> None:
    z, y = device(20, 8)
    rows = np.flatnonzero((y == 0) | (np.arange(len(y)) % 8 == 0))
    found = fit((z[rows], y[rows]), fleet(), balanced=balanced).predict(device(120, 20)[0])
    assert ((found == 0).mean() > 0.3) is not balanced


def test_an_extra_of_another_network_or_of_more_classes_is_an_error() -> None:
    z, y = device(20, 2)
    for cut, classes in ((z[:, :50], CLASSES), (z[y < 4], 4)):
        labels = y if len(cut) == len(y) else y[y < 4]
        with pytest.raises(ArtefactError, match=r"extra 'prior': .*; no head was fitted"):
            heads.fit("cosine", cut, labels, classes, unit_norm=False, extras=fleet())
    with pytest.raises(ArtefactError, match="extra 'prior': count"):
        heads.fit("cosine", z, y, CLASSES, unit_norm=False, extras={"prior": {"count": y}})
    assert (
        RIDGE == 0.3
    )  # the strength of the prior, too: the accuracies in docs/class-statistics.md are with it
