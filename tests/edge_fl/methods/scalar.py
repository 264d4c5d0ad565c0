"""Methods on a model of one number w with a given loss, to compare with values worked out by hand."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.optimiser import Optimiser
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import Method
from tests.edge_fl.methods import toy


def method(
    name: str, loss: Callable[[Tensor, Batch], Tensor], optimiser: Optimiser, **options: Any
) -> Method:
    """A method whose plain loss is `loss(w, batch)`, w being all there is in its parts."""
    usual = toy.method(name, toy.flat_net(), optimiser=optimiser, **options)

    @dataclass(frozen=True)
    class Scalar(type(usual)):  # type: ignore[misc]
        def loss(self, parts: Parts, batch: Batch) -> Tensor:
            return loss(parts["extractor"]["w"], batch)

    return Scalar(**{field.name: getattr(usual, field.name) for field in fields(usual)})


def parts(w: float) -> Parts:
    """A whole model of one number."""
    return {"extractor": {"w": torch.tensor(w)}, "head": {}}


def value(parts: Parts, part: str = "extractor") -> float:
    """The number in it."""
    return float(parts[part]["w"])


def batches(number: int) -> Batches:
    """As many batches of one sample, labelled 0, 1, ..."""
    return Batches.of(torch.zeros(number, 1), torch.arange(number), classes=number, batch_size=1)
