"""The fleet's head of simulated clients: as sure of itself as it may be of a client whom it has not seen."""

import numpy as np
import pytest

from edge_fl import heads
from edge_fl.heads import promise, training_set
from edge_fl.heads.fleet import FLEET
from edge_fl.heads.plan import HeadPlan
from edge_fl.heads.probability_calibration import of_estimate
from edge_fl.wire import tensors
from edge_fl_server.release import fleet_head

CLASSES, DIM, CLIENTS = 4, 12, 10
CENTRES = 0.5 * np.random.default_rng(0).normal(size=(CLASSES, DIM))


def clients(shift: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Features and labels; each client has its own shift of each class."""
    found = []
    for number in range(CLIENTS):
        rng, y = np.random.default_rng(number), np.arange(120) % CLASSES
        own = CENTRES + shift * rng.normal(size=CENTRES.shape)
        found.append(((own[y] + rng.normal(size=(len(y), DIM))).astype(np.float32), y))
    return found


def log_loss(payload: bytes, factor: float, z: np.ndarray, y: np.ndarray) -> float:
    head = tensors.unpack(payload)[fleet_head.fleet.FLEET]
    logits = factor * (z @ head["weight"].T.astype(float) + head["bias"])
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -float(logits[np.arange(len(y)), y].mean())


def factor_of(extra: fleet_head.FleetExtra) -> float:
    return float(tensors.unpack(extra.payload)[fleet_head.fleet.FLEET]["factor"][0])


def test_it_is_surer_where_clients_are_alike() -> None:
    factors = [factor_of(fleet_head.of_features(clients(shift), CLASSES)) for shift in (0, 4)]
    assert factors[0] == 1 and factors[1] < 1


def test_its_factor_is_right_for_clients_whom_it_has_not_seen() -> None:
    losses = []
    for number in range(CLIENTS):
        others = clients(4)
        z, y = others.pop(number)
        extra = fleet_head.of_features(others, CLASSES)
        losses.append([log_loss(extra.payload, factor, z, y) for factor in (1, 1 / factor_of(extra))])
    right, as_it_was = np.mean(losses, axis=0)
    assert right < 0.85 * as_it_was


def test_one_client_has_nobody_to_compare_it_with() -> None:
    extra = fleet_head.of_features(clients(1)[:1], CLASSES)
    assert factor_of(extra) == 1 and extra.shares == [0.25] * CLASSES


def test_clients_with_few_samples_do_not_make_it_unsure() -> None:
    few, more = ([(z[:n], y[:n]) for z, y in clients(4)] for n in (4, 80))
    assert (
        factor_of(fleet_head.of_features(few, CLASSES))
        == 1
        > factor_of(fleet_head.of_features(more, CLASSES))
    )


def test_classes_that_half_of_the_clients_lack_do_not_make_it_unsure() -> None:
    divided = [(z[y % 2 == number % 2], y[y % 2 == number % 2]) for number, (z, y) in enumerate(clients(0))]
    assert factor_of(fleet_head.of_features(divided, CLASSES)) >= 0.5


def test_features_that_differ_tenfold_in_scale_give_the_same_head() -> None:
    scale = np.logspace(-0.5, 0.5, DIM).astype(np.float32)
    plain, scaled = (
        tensors.unpack(fleet_head.of_features(found, CLASSES).payload)[fleet_head.fleet.FLEET]
        for found in (clients(1), [(z * scale, y) for z, y in clients(1)])
    )
    z = clients(1)[0][0]
    expected = z @ plain["weight"].T + plain["bias"]
    assert (z * scale) @ scaled["weight"].T + scaled["bias"] == pytest.approx(expected, abs=0.05)


def test_devices_are_told_how_wrong_the_fleets_probabilities_are() -> None:
    extra = tensors.unpack(fleet_head.of_features(clients(1), CLASSES).payload)[fleet_head.fleet.FLEET]
    for labels in (False, True):
        found = promise.received(extra, labels)
        assert found is not None and found.sum() > 100
    alone = extra[promise.SURVIVALS][0]  # of the other half's clients, each with classes of its own
    assert (
        promise.histogram(np.full(1, 0.5))[:20].sum() == 1
        and alone[int(np.log(10) * 8) :].sum() > 0.15 * alone.sum()
    )


def test_sets_of_a_client_whom_the_fleet_has_not_seen_keep_their_promise() -> None:
    covered, without = [], []
    for number in range(CLIENTS):
        others = clients(1.5)
        z, y = others.pop(number)
        extra = fleet_head.of_features(others, CLASSES)
        extras = tensors.unpack(extra.payload)
        plan = HeadPlan(fleet=fleet_head.fleet.FLEET, shares=extra.shares)
        for known, shares in (
            (extras, covered),
            ({FLEET: {k: v for k, v in extras[FLEET].items() if k != promise.SURVIVALS}}, without),
        ):
            data = training_set(z[:0], y[:0], CLASSES, False, plan=plan, extras=known, unlabelled=z[:60])
            estimate = heads.estimated("logistic", data)
            sets = of_estimate(estimate, data).promise.sets(estimate.head.logits(z[60:]), 0.9)
            shares.append(sets[np.arange(len(sets)), y[60:]].mean())
    assert np.mean(covered) >= 0.88 > np.mean(without)


def test_one_client_tells_nothing_about_probabilities() -> None:
    extra = tensors.unpack(fleet_head.of_features(clients(1)[:1], CLASSES).payload)[FLEET]
    assert promise.SURVIVALS not in extra
