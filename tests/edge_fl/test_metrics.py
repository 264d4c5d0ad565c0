"""Summaries of one value per client: mean, weighted mean, standard deviation, bottom decile."""

import math

import numpy as np
import pytest

from edge_fl import metrics


def test_accuracy_is_the_share_that_is_right() -> None:
    assert metrics.accuracy(np.array([0, 1, 1, 2]), np.array([0, 1, 2, 2])) == 0.75
    assert math.isnan(metrics.accuracy(np.array([]), np.array([])))


def test_a_summary_of_unequal_clients() -> None:
    found = metrics.summarise([1.0, 0.5, 0.0], [2, 1, 1])
    assert found == metrics.Summary(
        mean=0.5, weighted_mean=0.625, std=pytest.approx(math.sqrt(1 / 6)), bottom_decile=0.0, clients=3
    )


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_the_bottom_decile_is_a_tenth_rounded_up_and_never_empty(clients: int, worst: int) -> None:
    values = list(range(clients))
    assert metrics.summarise(values[::-1]).bottom_decile == np.mean(values[:worst])


def test_clients_without_samples_are_left_out() -> None:
    assert metrics.summarise([0.5, math.nan], [1, 9]) == metrics.Summary(0.5, 0.5, 0.0, 0.5, 1)
    none = metrics.summarise([])
    assert none.clients == 0
    assert math.isnan(none.mean)


def test_without_weights_the_weighted_mean_is_the_mean() -> None:
    assert metrics.summarise([0.0, 1.0]).weighted_mean == 0.5
    assert metrics.summarise([0.0, 1.0], [0, 0]).weighted_mean == 0.5


def test_reports_are_summed_up_per_metric_weighted_by_their_test_samples() -> None:
    reports = [
        {"a": 1.0, "test_samples": 3},
        {"a": 0.0, "b": 0.5, "test_samples": 1, "validation_samples": 7},
    ]
    found = metrics.summarise_reports(reports)
    assert set(found) == {"a", "b"}
    assert (found["a"].mean, found["a"].weighted_mean, found["a"].clients) == (0.5, 0.75, 2)
    assert found["b"].clients == 1


def test_the_best_round_is_the_first_of_the_highest() -> None:
    assert metrics.best_round([0.2, math.nan, 0.8, 0.8]) == 2
    assert metrics.best_round([math.nan]) is None
    assert metrics.best_round([]) is None


def test_the_curve_by_labels_is_read_from_the_names_it_was_written_under() -> None:
    reported = {
        metrics.at_labels(2, "svm"): 0.5,
        metrics.at_labels(10, "svm"): 0.75,
        metrics.candidate("svm"): 0.8,
    }
    assert metrics.by_labels(reported) == {"svm": {2: 0.5, 10: 0.75}}
    assert metrics.by_labels({"labels_x.svm.validation_acc": 1.0, "labels_2.svm.test_acc": 1.0}) == {}
