"""Labels to look at: planted wrong labels, files of many samples, many labels, near duplicates, culprits, few labels, and odd devices."""

import time

import numpy as np
import pytest

from edge_fl import heads
from edge_fl.data.samples import Array
from edge_fl.heads import HeadPlan, label_doctor
from edge_fl.heads.head import TrainingSet
from edge_fl.heads.label_doctor import Examination

CLASSES = ["cat", "dog", "fox", "owl"]
CENTRES = np.random.default_rng(1).normal(size=(4, 12)) * 1.8
NONE = np.empty(0, np.int64)


def samples(y: Array, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    return (CENTRES[y] + rng.normal(size=(len(y), 12))).astype(np.float32)


def given(
    z: Array,
    y: Array,
    *,
    fleet: bool = True,
    groups: Array | None = None,
    knows: tuple[int, ...] = (0, 1, 2, 3),
) -> TrainingSet:
    """In the order of `canonical_order`, so that rows are known. knows: whose centres the fleet's classes have."""
    centres = CENTRES[[*knows]]
    bias = -np.square(centres).sum(axis=1) / 2
    extras = {"toy": {"weight": centres.astype(np.float32), "bias": bias.astype(np.float32)}}
    plan = HeadPlan(fleet="toy", shares=[1 / len(knows)] * len(knows)) if fleet else HeadPlan()
    return heads.training_set(z, y, 4, False, "x", plan=plan, extras=extras, groups=groups)


def examined(truth: Array, wrong: dict[int, int], *, fleet: bool = True) -> tuple[Examination, list[str]]:
    """Examine labels of which some are wrong -> what is found, and the names of the listed ones, "3" for the row 3."""
    y = truth.copy()
    y[[*wrong]] = [*wrong.values()]
    z = samples(truth)
    order = heads.canonical_order(z, y)
    found = label_doctor.examine(
        given(z, y, fleet=fleet), np.arange(len(y)), [str(row) for row in order], CLASSES, NONE
    )
    return found, [str(order[each.file]) for each in found.labels]


@pytest.mark.parametrize("fleet", [True, False])
def test_wrong_labels_are_listed_first_with_the_class_that_they_are(fleet: bool) -> None:
    wrong = {3: 0, 17: 2, 30: 1}
    truth = np.arange(60) % 4
    found, names = examined(truth, wrong, fleet=fleet)
    assert {*names[:3]} == {"3", "17", "30"} and len(names) <= 5
    assert [found.labels[names.index(str(row))].likely for row in wrong] == [truth[row] for row in wrong]
    why = found.labels[names.index("3")].why
    assert (
        "other labels" in why
        and "owl" in why
        and ("fleet" in why) is fleet
        and "wrong with a probability of about" in why
    )
    assert found.files == 60 and 0.01 < found.share < 0.15


def test_clean_labels_are_hardly_listed() -> None:
    found, names = examined(np.arange(80) % 4, {})
    assert len(names) <= 2 and found.share < 0.05


@pytest.mark.parametrize("knows", [(1, 0, 2, 3), (1, 2, 3, 0), (0, 1, 2)])
def test_right_labels_are_not_listed_where_the_fleet_mixes_classes_up_or_lacks_one(
    knows: tuple[int, ...],
) -> None:
    y = np.arange(40) % 4
    data = given(samples(y), y, knows=knows)
    found = label_doctor.examine(data, np.arange(40), [""] * 40, CLASSES, NONE)
    assert len(found.labels) <= 1


def test_the_windows_of_a_recording_are_one_label() -> None:
    of_file = np.arange(40) % 4
    y, files = of_file.repeat(5), np.arange(40).repeat(5)
    z = samples(y, 2)
    y[files == 7] = 0  # it is an owl
    order = np.array(heads.canonical_order(z, y))
    data = given(z, y, groups=files)
    renumbered = np.unique(files[order], return_inverse=True)[1]
    found = label_doctor.examine(data, renumbered, [str(file) for file in range(40)], CLASSES, NONE)
    assert [(each.file, each.likely) for each in found.labels] == [(7, 3)] and found.files == 40


def test_many_labels_are_examined_in_parts() -> None:
    truth = np.arange(2000) % 4
    began = time.monotonic()
    found, names = examined(truth, {row: 1 + row // 20 % 3 for row in range(0, 2000, 20)})
    assert time.monotonic() - began < 60
    right = sum(int(name) % 20 == 0 for name in names)
    assert found.files == 2000 and right >= 70 and right / len(names) > 0.6


def test_of_near_duplicates_in_two_classes_the_rarer_one_is_listed_with_the_other() -> None:
    y = np.repeat([0, 1], 10)
    z = samples(y)
    order = heads.canonical_order(z, y)
    duplicates = np.arange(20)
    places = {row: place for place, row in enumerate(order)}
    for row in (3, 4, 15):  # two cats and a dog
        duplicates[places[row]] = 3
    names = [f"{CLASSES[y[row]]}/{row}.png" for row in order]
    found = label_doctor.examine(given(z, y), np.arange(20), names, CLASSES, duplicates)
    first = found.labels[0]
    assert names[first.file] == "dog/15.png" and first.likely == 0
    assert first.why in {f"nearly the same picture as cat/{row}.png, which is labelled cat" for row in (3, 4)}
    assert sum(names[each.file] == "dog/15.png" for each in found.labels) == 1


def test_the_culprits_of_a_confusion_are_labels_of_the_second_class_that_are_rather_the_first() -> None:
    y = np.repeat([0, 1], [10, 8])
    own = np.repeat([1, 0, 1], [3, 7, 8])
    wrong, likely = np.zeros(18), y.copy()
    wrong[[10, 12, 13, 14, 15]] = [0.3, 0.9, 0.05, 0.5, 0.8]
    likely[[10, 12, 13, 14]], likely[15] = 0, 2
    (found,) = label_doctor.confusions(y, label_doctor.Doubts(wrong, likely, own, np.full(18, -1)), 3)
    assert found[:4] == (0, 1, 3, 10) and found.culprits.tolist() == [12, 14, 10]
    names = [str(row) for row in range(18)]
    assert found.words(names, CLASSES) == "cat is often dog: 3 of 10 labels by the others; look at 12, 14, 10"


def test_most_labels_of_a_class_that_are_another_one_are_its_culprits() -> None:
    truth = np.arange(60) % 4
    y = truth.copy()
    y[np.flatnonzero(truth == 0)[:7]] = 1  # cats as dogs
    z = samples(truth)
    order = heads.canonical_order(z, y)
    found = label_doctor.examine(given(z, y), np.arange(60), [str(row) for row in order], CLASSES, NONE)
    (line,) = [line for line in found.remarks if line.startswith("cat is often dog: ")]
    named = [int(name) for name in line.partition("; look at ")[2].split(", ")]
    assert len(named) == 3 and all(truth[row] == 0 and y[row] == 1 for row in named)


def test_a_confusion_is_named_with_its_number_and_culprits() -> None:
    truth = np.arange(48) % 4
    y = truth.copy()
    y[[0, 4, 8, 12, 16]] = 1  # cats as dogs
    z = samples(truth)
    z[truth == 0] = z[truth == 0] * 0.2 + CENTRES[0] * 0.8
    order = heads.canonical_order(z, y)
    found = label_doctor.examine(given(z, y), np.arange(48), [str(row) for row in order], CLASSES, NONE)
    assert any("dog is often cat: " in line and "labels by the others" in line for line in found.remarks)


def test_classes_with_few_labels_are_named() -> None:
    found, _ = examined(np.repeat([0, 1, 2, 3], [12, 12, 2, 12]), {})
    assert "fox has 2 labels, half of the classes have 12 or more: label more of it" in found.remarks
    found, _ = examined(np.repeat([0, 1, 2], 12), {})
    (line,) = [line for line in found.remarks if line.startswith("owl")]
    assert line.startswith("owl has 0 of 36 labels, but 25 % of the fleet's data")


@pytest.mark.parametrize("fleet", [True, False])
@pytest.mark.parametrize("truth", [[], [1], [1, 1, 1], [0, 1]])
def test_devices_with_hardly_any_labels_have_an_examination(truth: list[int], fleet: bool) -> None:
    if not truth and not fleet:
        return
    found, names = examined(np.array(truth, np.int64), {}, fleet=fleet)
    assert found.files == len(truth) and len(names) <= 1
