"""Heads and accuracies in words: with the number of scenes, the interval and the fleet's head; nothing is shown below eight scenes."""

import numpy as np
import pytest

from edge_fl import heads, metrics
from edge_fl.heads import HeadPlan, fleet, probability_calibration, wording
from edge_fl.heads.probability_calibration import LEAST_MEASURED, Calibration
from edge_fl.heads.unknowns import NO_CLASSES
from edge_fl.heads.wording import NOT_PERSONAL, OWN, WITH_LABELS, DeviceWords, MeasuredAccuracy, head_words

NAMES = ["cat", "dog", "owl"]


@pytest.mark.parametrize("kind", [*fleet.KINDS, "fleet-mlp"])
def test_the_words_of_a_head_follow_from_its_labels_and_their_weight(kind: str) -> None:
    assert head_words(kind, 0) == head_words(kind, 0, 1.0) == NOT_PERSONAL
    assert head_words(kind, 1, 0.5) == WITH_LABELS
    assert head_words(kind, 40, 0.51) == OWN
    assert head_words("logistic", 0) == head_words("logistic", 9, 1.0) == "logistic"


def test_an_accuracy_comes_with_its_scenes_interval_and_the_fleets_head() -> None:
    found = {metrics.PERSONAL_AFTER: 0.83, metrics.FLEET: 0.76, metrics.TEST_SAMPLES: 60.0}
    words = "83.0 % of 60 scenes (90 % interval 74 to 90 %; fleet's head 76.0 % on the same, +7.0 points)"
    assert MeasuredAccuracy.of_report(found).words == words
    narrow, wide = found, found | {metrics.TEST_EFFECTIVE: 12.0}
    low, high = MeasuredAccuracy.of_report(wide).interval or (0.83, 0.83)
    assert low < (MeasuredAccuracy.of_report(narrow).interval or (0, 0))[0] and high > 0.9
    assert MeasuredAccuracy.of_report(found | {metrics.TEST_SAMPLES: 900.0}).interval is None


def test_the_shown_interval_is_the_one_that_was_measured() -> None:
    calibration = contradicting([0, 1, 2] * 8, [0, 1, 2] * 7 + [1, 0, 2], [0.3, 0.3, 0.3])
    assert MeasuredAccuracy.of_calibration(calibration).interval == calibration.interval


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({}, "not measured yet"),
        ({metrics.TEST_SAMPLES: 3.0}, "not measured yet (3 of 8 scenes)"),
        ({metrics.TEST_SAMPLES: 7.0, metrics.PERSONAL_AFTER: 1.0}, "not measured yet (7 of 8 scenes)"),
        (
            {metrics.TEST_SAMPLES: 8.0, metrics.PERSONAL_AFTER: 1.0},
            "100.0 % of 8 scenes (90 % interval 75 to 100 %)",
        ),
    ],
)
def test_below_eight_scenes_nothing_is_measured(found: dict[str, float], words: str) -> None:
    assert MeasuredAccuracy.of_report(found).words == words


def contradicting(
    labels: list[int], calls: list[int], known: list[float], groups: list[int] | None = None
) -> Calibration:
    """The calibration of a served head whose fleet's head calls each sample as given; `known` are the fleet's class shares."""
    z = np.eye(3, dtype=np.float32)[calls]
    extras = {fleet.FLEET: {"weight": 4 * np.eye(3, dtype=np.float32), "bias": np.zeros(3, np.float32)}}
    plan = HeadPlan(fleet=fleet.FLEET, shares=known)
    scenes = np.array(groups or [], np.int64)
    data = heads.training_set(z, np.array(labels), 3, unit_norm=True, plan=plan, extras=extras, groups=scenes)
    return probability_calibration.of_estimate(heads.estimated("logistic", data), data)


def test_labels_that_the_fleets_head_calls_another_class_are_named() -> None:
    even = [1 / 3] * 3
    found = contradicting([0, 0, 0, 1, 1, 1], [2, 2, 0, 1, 1, 2], even)
    assert found.contradicted.tolist() == [[0, 2]]
    line = wording.contradiction(found, NAMES)
    assert "'cat' is 'owl'" in line and "dog" not in line and "\n" not in line
    kept = probability_calibration.from_arrays(found.to_arrays())  # with the stored head
    assert wording.contradiction(kept, NAMES) == line
    assert not wording.contradiction(found, NAMES[:2])  # a class that the release does not name any more


@pytest.mark.parametrize(
    ("labels", "calls", "known"),
    [
        ([0, 0, 1, 1], [2, 2, 1, 1], [1 / 3] * 3),  # too few labels
        ([0] * 4 + [1], [2, 2, 0, 0, 1], [1 / 3] * 3),  # not most of them
        ([0] * 4 + [1], [1, 1, 2, 2, 1], [1 / 3] * 3),  # not one other class
        ([0] * 4 + [1], [2, 2, 2, 2, 1], [0.0, 0.5, 0.5]),  # a class that the fleet does not know
    ],
)
def test_other_labels_do_not_contradict(labels: list[int], calls: list[int], known: list[float]) -> None:
    found = contradicting(labels, calls, known)
    assert not len(found.contradicted) and not wording.contradiction(found, NAMES)


def test_windows_of_one_recording_contradict_as_one_label() -> None:
    labels, calls, even = [0, 0, 0, 1, 1, 1], [2, 2, 2, 1, 1, 1], [1 / 3] * 3
    assert not len(contradicting(labels, calls, even, [0, 0, 0, 1, 1, 1]).contradicted)
    assert contradicting(labels, calls, even, [0, 1, 2, 3, 4, 5]).contradicted.tolist() == [[0, 2]]


def test_a_class_that_is_right_less_often_than_chance_explains_is_named() -> None:
    labels = [0] * 30 + [1] * 30 + [2] * 10
    found = contradicting(labels, labels[:60] + [0, 1] * 5, [0.4, 0.3, 0.3])
    line = wording.weakest_class(found, NAMES)
    recall = found.right[found.labels == 2].mean()
    assert recall < 0.5 and line.startswith(
        f"least often right: 'owl', {100 * recall:.1f} % of 10 scenes (90 % interval"
    )
    assert wording.weakest_class(probability_calibration.from_arrays(found.to_arrays()), NAMES) == line
    assert not wording.weakest_class(found, NAMES[:2])  # the release does not name it any more
    old = {name: array for name, array in found.to_arrays().items() if name != "labels"}
    assert not wording.weakest_class(probability_calibration.from_arrays(old), NAMES)
    few = contradicting(labels[:67], labels[:60] + [0, 1] * 3 + [0], [0.4, 0.3, 0.3])
    assert not wording.weakest_class(few, NAMES), "seven scenes of it"
    for n in range(24, 75, 3):  # the interval of a share of 1 ends at 1, but for the last digit
        assert not wording.weakest_class(
            contradicting(sorted(range(3)) * (n // 3), [0, 1, 2] * (n // 3), [0.4, 0.3, 0.3]), NAMES
        )


def test_pictures_of_one_scene_are_not_called_labels_that_are_missing() -> None:
    """Nine labels, of which three are frames of one scene."""
    found = Calibration(
        1.0,
        np.full(9, 0.5, np.float32),
        np.ones(9, np.bool_),
        NO_CLASSES,
        np.zeros(9, np.float32),
        groups=np.array([0, 0, 0, 1, 2, 3, 4, 5, 6]),
    )
    assert MeasuredAccuracy.of_calibration(found).words == "not measured yet (7 of 8 scenes)"


def test_the_words_of_a_calibration_are_those_of_its_report() -> None:
    """Label page and dashboard say the same."""
    n = 20
    right = np.arange(n) % 4 > 0
    found = Calibration(
        1.0,
        np.full(n, 0.5, np.float32),
        right,
        NO_CLASSES,
        np.zeros(n, np.float32),
        fleet=np.arange(n) % 2 > 0,
    )
    reported = {
        metrics.PERSONAL_AFTER: found.accuracy,
        metrics.TEST_SAMPLES: float(n),
        metrics.TEST_EFFECTIVE: found.independent,
        metrics.FLEET: found.fleet_accuracy or 0.0,
    }
    assert MeasuredAccuracy.of_calibration(found) == MeasuredAccuracy.of_report(reported)
    assert n > LEAST_MEASURED and "fleet's head 50.0 %" in MeasuredAccuracy.of_report(reported).words


def test_before_the_first_report_nothing_is_fitted_on_any_device() -> None:
    for full in (True, False):
        words = DeviceWords.of_report("", 0, None, full=full)
        assert (words.head, words.measured.words) == ("nothing fitted yet", "not measured yet")
