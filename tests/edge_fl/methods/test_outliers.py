"""An outlier in any element of any shared part of any method does not reach the aggregate: what is aggregated is screened."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from edge_fl.data.samples import ClientData, Samples
from edge_fl.learn.aggregation.mean import Update, with_absent
from edge_fl.learn.tree import Parts
from edge_fl.methods import names
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.client import Client
from tests.edge_fl.methods import toy

MAX_NORM = 3.0
LIAR = "c1"
VALUES = (1e4, -1e4, 1e30, math.nan)
Place = tuple[str, str]


@cache
def cohort(name: str) -> tuple[Parts, list[Update]]:
    """Six clients with forty pictures each: the parts before a round, and its updates."""
    method, shared = toy.method(name), steps.start(toy.method(name))
    digits = load_digits()
    whole = Samples(
        np.rint(digits.images * 15.9375).astype(np.uint8)[:, None], digits.target.astype(np.int64)
    )
    updates = []
    for number in range(6):
        samples = whole.take(np.arange(40 * number, 40 * (number + 1)))
        client = Client(f"c{number}", ClientData(samples, samples, samples), toy.CLASSES, 10, 3)
        down, own = steps.broadcast(method, shared, client.id), steps.start_own(method, client.id)
        data = client.batches(1)
        if name == "class-statistics":  # sends its sums in the final personalisation
            up, _ = steps.personalise(method, down, own, data)
        else:
            up, _ = toy.train(method, down, own, data)
        updates.append(Update(client.id, len(data), method.unpack(down, up)))
    return shared, updates


def planted(update: Update, place: Place, element: int, value: float) -> Update:
    part, key = place
    tensor = update.parts[part][key].clone(memory_format=torch.contiguous_format)
    flat = tensor.view(-1)
    flat[element] = (
        value if tensor.is_floating_point() else int(min(abs(value), 1e9)) if value == value else 10**9
    )
    return replace(update, parts={**update.parts, part: {**update.parts[part], key: tensor}})


def unpacked(update: Update) -> Parts:
    return {
        part: with_absent(params) if params.keys() == {"mean", "count"} else params
        for part, params in update.parts.items()
    }


def places(name: str, elements: int) -> Iterator[tuple[Place, int, float]]:
    """Elements of every tensor that the client sends: up to `elements` of each, among them the first and the last."""
    _, updates = cohort(name)
    rng = np.random.default_rng(0)
    sent = next(update for update in updates if update.client == LIAR)
    for part, params in sent.parts.items():
        for key, tensor in params.items():
            count = max(tensor.numel(), 1)
            drawn = {0, count - 1, *rng.integers(0, count, elements).tolist()}
            for number, element in enumerate(sorted(drawn)[:elements]):
                value = VALUES[number % len(VALUES)]
                if tensor.is_floating_point() or abs(value) == 1e4:
                    yield (part, key), element, value


def check(name: str, elements: int) -> None:
    shared, updates = cohort(name)
    method = toy.method(name)
    honest = [unpacked(update) for update in updates if update.client != LIAR]
    for place, element, value in places(name, elements):
        sent = [planted(u, place, element, value) if u.client == LIAR else u for u in updates]
        screen = steps.screen(method, MAX_NORM)
        kept = {update.client: update for update in screen.round(sent, shared)}
        assert kept.keys() >= {f"c{n}" for n in range(6)} - {LIAR}, (place, element, value, screen.dropped)
        if LIAR not in kept:
            assert LIAR in screen.dropped
            continue
        part, key = place
        found = unpacked(kept[LIAR])[part][key]
        assert torch.isfinite(found.double()).all(), (place, element, value)
        assert float(found.double().abs().max()) <= bound(honest, part, key), (place, element, value)


def bound(honest: list[Parts], part: str, key: str) -> float:
    """Four times what any correct client sent in this tensor."""
    tensors: list[Tensor] = [parts[part][key].double() for parts in honest if key in parts.get(part, {})]
    return 4 * max(float(tensor.abs().max()) for tensor in tensors if tensor.numel()) + 1e-3


@pytest.mark.parametrize("name", [name for name in names() if name != "local"])
def test_an_outlier_in_any_tensor_is_reduced_or_its_client_is_dropped(name: str) -> None:
    check(name, 3)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in names() if name != "local"])
def test_an_outlier_in_many_elements_of_every_tensor(name: str) -> None:
    check(name, 200)
