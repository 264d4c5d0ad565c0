"""Class means are compared across devices: what differs in its class is left out, honest skew is not."""

from collections.abc import Callable

import numpy as np
import pytest

from edge_fl.heads.class_statistics import bounds
from edge_fl.heads.class_statistics import sums as class_statistics
from edge_fl.heads.class_statistics.sums import MOST_PER_CLASS, Doubles, Statistics

CLASSES, DIM, DEVICES = 6, 200, 12
CENTRES = np.random.default_rng(0).normal(size=(CLASSES, DIM))
Lie = Callable[[Doubles, int], Doubles]


def device(seed: int, pictures: list[int]) -> Statistics:
    """Statistics of a device with a style of its own and so many pictures of each class."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(CLASSES), pictures)
    z = CENTRES[y] + 2 * rng.normal(size=DIM) + 2 * rng.normal(size=(len(y), DIM))
    return class_statistics.of(z.astype(np.float32), y, CLASSES)


def skewed(seed: int) -> Statistics:
    """Every third device has almost one class alone, the others some."""
    pictures = [0] * CLASSES
    pictures[seed % CLASSES], pictures[(seed + 1) % CLASSES] = (30, 1) if seed % 3 == 0 else (5, 5)
    if seed % 3 == 1:
        pictures = [8, 1, 3, 0, 2, 5]
    return device(seed, pictures)


def reversed_(mean: Doubles, label: int) -> Doubles:
    return -mean[label]


def of_another(mean: Doubles, label: int) -> Doubles:
    return np.asarray(mean[(label + 1) % CLASSES])


def lying(found: Statistics, means: Doubles, lie: Lie, labels: list[int]) -> Statistics:
    counts, sums = found.counts.copy(), found.sums.copy()
    for label in labels:
        counts[label] = MOST_PER_CLASS
        sums[label] = MOST_PER_CLASS * lie(means, label) / np.linalg.norm(lie(means, label))
    return Statistics(counts, sums, found.moment, found.centre)


def means_of(devices: list[Statistics]) -> Doubles:
    sums, counts = sum(one.sums for one in devices), sum(one.counts for one in devices)
    return np.asarray(sums / np.asarray(counts)[:, None])


@pytest.mark.parametrize("honest", [skewed, lambda seed: device(seed, [2] * CLASSES)])
def test_honest_devices_stay_however_skewed(honest: Callable[[int], Statistics]) -> None:
    far = bounds.far_classes([honest(seed) for seed in range(3 * DEVICES)])
    assert not any(len(classes) for classes in far)


@pytest.mark.parametrize("lie", [reversed_, of_another])
@pytest.mark.parametrize("liars", [1, 5])  # of 13 or more devices with the class
@pytest.mark.parametrize("honest", [skewed, lambda seed: device(seed, [2] * CLASSES)])
def test_who_lies_about_one_class_is_left_out_of_it_alone(
    honest: Callable[[int], Statistics], liars: int, lie: Lie
) -> None:
    devices = [honest(seed) for seed in range(3 * DEVICES)]
    means = means_of(devices)
    for place in range(liars):
        devices[3 * place + 1] = lying(devices[3 * place + 1], means, lie, [3])
    far = bounds.far_classes(devices)
    found = {place: classes.tolist() for place, classes in enumerate(far) if len(classes)}
    assert found == {3 * place + 1: [3] for place in range(liars)}


def test_who_lies_about_most_classes_is_left_out_altogether() -> None:
    devices = [device(seed, [2] * CLASSES) for seed in range(DEVICES)]
    devices[5] = lying(devices[5], means_of(devices), of_another, [0, 1, 2, 3])
    far = bounds.far_classes(devices)
    assert [len(classes) for classes in far] == [0] * 5 + [CLASSES] + [0] * 6


def test_classes_of_three_devices_are_not_compared() -> None:
    devices = [device(seed, [2] * CLASSES) for seed in range(3)]
    devices[1] = lying(devices[1], means_of(devices), reversed_, [2])
    assert not any(len(classes) for classes in bounds.far_classes(devices))
