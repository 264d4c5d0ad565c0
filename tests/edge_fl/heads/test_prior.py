"""The prior, through the served head: it helps with few labels, does no harm with many, and a useless one is ignored."""

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_fl import heads
from edge_fl.errors import ArtefactError, StatisticsError
from edge_fl.heads import HeadPlan
from edge_fl.heads.class_statistics import prior, sums
from edge_fl.heads.head import Array, Extras, Head
from edge_fl.heads.linear import direction

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


def fit(data: Samples, extras: Extras, classes: int = CLASSES, **options: bool) -> Head:
    """The served head; without extras the cosine head."""
    plan = HeadPlan("cosine", fleet=prior.PRIOR if extras else "")
    return heads.fit("logistic", *data, classes, unit_norm=False, plan=plan, extras=extras, **options)


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


def of_no_fleet() -> Extras:
    """An extra that knows no class: the served head follows from the device's own labels alone."""
    nothing = sums.from_flat(np.zeros(sums.shape_of(CLASSES, DIM).length), sums.shape_of(CLASSES, DIM))
    return {prior.PRIOR: nothing.addends()}


def test_with_more_than_a_third_of_the_classes_poisoned_the_own_labels_decide_alone() -> None:
    extras = fleet()
    extras[prior.PRIOR]["sums"][:3] *= -1
    data = device(20, 4)
    assert trusted(data, extras) == [False] * 3 + [True] * 3
    assert np.array_equal(fit(data, extras).logits(data[0]), fit(data, of_no_fleet()).logits(data[0]))
    assert not np.allclose(fit(data, fleet()).logits(data[0]), fit(data, extras).logits(data[0]), atol=0.1)


def test_pictures_that_are_all_alike_are_fitted() -> None:
    z, y = np.ones((4, DIM), np.float32), np.array([0, 0, 1, 1])
    assert np.isfinite(fit((z, y), fleet()).logits(z)[:, :2]).all()


def test_it_is_the_linear_discriminant_of_the_features_themselves() -> None:
    z, y = device(1, 40)
    u = direction(z[:, :100]).astype(float)
    style = u.mean(axis=0)
    u -= style
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    members = np.eye(CLASSES)[y]
    found = sums.Statistics(
        members.sum(axis=0), members.T @ u, u.T @ u, len(u) * style
    )  # nothing is projected
    given = prior.discriminant(found, np.empty((0, 100)), np.empty(0, int))
    means = members.T @ u / 40
    within = (u - means[y]).T @ (u - means[y]) / len(u) + prior.DISCRIMINANT_RIDGE * np.eye(100)
    weights = np.linalg.solve(within, means.T).T
    length = np.sqrt(1 - style @ style)
    assert given.known.all() and given.centre == pytest.approx(style)
    assert given.weights == pytest.approx(weights / length)
    assert given.bias == pytest.approx(-0.5 * (weights * means).sum(axis=1) - weights @ style / length)


@pytest.mark.parametrize(
    ("classes", "own"), [(1, 1 / (1 + prior.STEADY)), (CLASSES, CLASSES / (CLASSES + prior.STEADY))]
)
def test_the_centre_moves_towards_the_device_with_each_class_that_has_labels(
    classes: int, own: float
) -> None:
    found = sums.from_arrays(fleet()[prior.PRIOR])
    z, y = device(20, 10)
    u = direction(z).astype(float)
    alone = prior.discriminant(found, np.empty((0, DIM)), np.empty(0, int)).centre
    rows = y < classes
    given = prior.discriminant(found, u[rows], y[rows]).centre
    moved = (given - alone) @ (u.mean(axis=0) - alone) / np.square(u.mean(axis=0) - alone).sum()
    assert moved == pytest.approx(own, abs=0.1)


def test_unknown_classes_are_learned_from_the_labels_and_those_without_any_wait() -> None:
    extras = fleet()
    for unknown in (2, 5):
        extras[prior.PRIOR]["count"][unknown] = 0
        extras[prior.PRIOR]["sums"][unknown] = 0
    z, y = device(20, 6)
    some = np.isin(y, (1, 2, 4))
    logits = fit((z[some], y[some]), extras).logits(z)
    assert np.isfinite(logits).any(axis=0).tolist() == [True] * 5 + [False]
    assert (logits.argmax(axis=1)[some] == y[some]).mean() > 0.9
    closed = fit((z[some], y[some]), extras, closed=True).logits(z)
    assert np.isfinite(closed).any(axis=0).tolist() == [False, True, True, False, True, False]


def test_without_two_known_classes_the_own_labels_decide_alone() -> None:
    extras = fleet()
    extras[prior.PRIOR]["count"][1:] = 0
    extras[prior.PRIOR]["sums"][1:] = 0
    data = device(20, 4)
    assert np.array_equal(fit(data, extras).logits(data[0]), fit(data, of_no_fleet()).logits(data[0]))


def test_a_prior_does_not_change_the_cosine_head_of_a_release_that_asks_for_it() -> None:
    data, alone = device(20, 4), fit(device(20, 4), {})
    for kind in ("logistic", "cosine"):
        plan = HeadPlan("cosine", serves="way", fleet=prior.PRIOR)
        head = heads.fit(kind, *data, CLASSES, unit_norm=False, plan=plan, extras=fleet())
        assert head.kind == alone.kind == "cosine"
        assert np.array_equal(head.logits(data[0]), alone.logits(data[0]))


def test_a_longer_list_of_classes_keeps_the_prior() -> None:
    z, y = device(20, 3)
    appended = np.where(y == 4, CLASSES + 1, y)  # a class that no device of the prior knows
    head = fit((z, appended), fleet(), CLASSES + 2)
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
    found = fleet()[prior.PRIOR]
    prior.received(found, CLASSES, DIM)
    for arrays, classes, dim in (
        (found, CLASSES, 50),
        (found, 4, DIM),
        ({"count": found["count"]}, CLASSES, DIM),
    ):
        with pytest.raises(StatisticsError):
            prior.received(arrays, classes, dim)
    none = np.empty((0, 50), np.float32), np.empty(0, np.int64)
    with pytest.raises(ArtefactError, match=r"fleet's head 'prior': .*; no head was fitted"):
        fit(none, fleet())
