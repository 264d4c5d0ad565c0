"""The fleet's head of simulated clients: as sure of itself as it may be of a client whom it has not seen."""

import numpy as np
import pytest

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
