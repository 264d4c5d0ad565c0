"""Fine-tuning, suffix "+FT" of a method's name (docs/methods.md G17): after the last round every client fine-tunes the global model on its
own data. Nothing is sent. C. Jing et al., arXiv:2204.11841, report FedAvg+FT and FedProx+FT.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from torch import Tensor

from edge_fl.errors import MethodError
from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.batches import Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.hyper import hyper
from edge_fl.methods.contract.method import TUNED, HeadTier, Method

DECLARED = (
    "title",
    "parts",
    "batch_norm",
    "uniform",
    "exports",
    "unit_norm",
    "has_global",
    "trains_everyone",
    "vectorises",
    "sends",
    "receives",
    "measures",
)


@dataclass(frozen=True)
class FineTuned(Method):
    """A method with shared extractor and head (`inner`), plus fine-tuned personal copies."""

    inner: Method = field(kw_only=True)
    ft_epochs: int = hyper(10, "epochs of fine-tuning", low=0, source="RepPer [P]")
    ft_lr: float = hyper(
        0.1, "learning rate of fine-tuning, momentum 0.9", low=0, source="as RepPer's head [D]"
    )
    ft_steps: int = hyper(
        300, "at least so many steps, if any epochs; scope head", low=0, source="as RepPer's head [D]"
    )
    ft_scope: str = hyper("head", "what is tuned", choices=("head", "full"), source="RepPer [P]")

    title: ClassVar = "+FT"
    citation: ClassVar = "fine-tuning as in Jing et al., arXiv:2204.11841"
    family: ClassVar = "global model, then fine-tuned"
    grid: ClassVar = {"ft_lr": (0.01, 0.1)}
    parts: ClassVar = {}
    head_tier: ClassVar = HeadTier(
        "native",
        "head, which is the fine-tuning itself",
        extras=("head",),
        way="tuned",
        numbers={
            "epochs": "ft_epochs",
            "lr": "ft_lr",
            "momentum": 0.9,
            "weight_decay": 0.0,
            "min_steps": "least_steps",
        },
    )

    def __post_init__(self) -> None:
        for name in DECLARED:
            value = getattr(self.inner, name)
            object.__setattr__(self, name, f"{value}+FT" if name == "title" else value)
        super().__post_init__()
        if self.ft_scope == "full" and type(self.inner).features is not Method.features:
            raise MethodError(
                f"method {self.title}: ft_scope = 'full', expected 'head' (the method computes features in its own way)"
            )

    @property
    def least_steps(self) -> int:
        """`ft_steps`, 0 without epochs."""
        return self.ft_steps if self.ft_epochs else 0

    def at(self, round: int) -> Self:
        return replace(self, inner=self.inner.at(round))

    def init_shared(self) -> Parts:
        return self.inner.init_shared()

    def init_own(self, client: str) -> Parts:
        return self.inner.init_own(client)

    def broadcast(self, shared: Parts, client: str) -> Parts:
        return self.inner.broadcast(shared, client)

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        return self.inner.local_update(down, own, data)

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        return self.inner.aggregate(shared, updates)

    def before_training(self, down: Parts, own: Parts) -> Parts:
        return self.inner.before_training(down, own)

    def after_training(self, down: Parts, up: Parts) -> Parts:
        return self.inner.after_training(down, up)

    def pack(self, up: Parts) -> Parts:
        return self.inner.pack(up)

    def unpack(self, down: Parts, sent: Parts) -> Parts:
        return self.inner.unpack(down, sent)

    def averages(self) -> bool:
        return self.inner.averages()

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        optimiser = Sgd(self.ft_lr, momentum=0.9)
        if self.ft_scope == "full":
            both = {"extractor": down["extractor"], "head": down["head"]}
            tuned = fit(self.loss, both, data, stage="ft", epochs=self.ft_epochs, optimiser=optimiser)
            return {}, {**own, **tree.prefixed(TUNED, tuned)}
        z = data.mapped(lambda x: self.inner.features(down, x))
        per_epoch = -(-len(z) // z.batch_size)
        epochs = max(self.ft_epochs, -(-self.least_steps // per_epoch))
        head = fit(self.head_loss, down["head"], z, stage="ft", epochs=epochs, optimiser=optimiser)
        return {}, {**own, TUNED + "head": head}

    def finalise(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        return self.inner.finalise(shared, updates)

    def features(self, parts: Parts, x: Tensor) -> Tensor:
        return self.inner.features(parts, x)

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        return self.inner.predict({**parts, **tree.unprefixed(TUNED, parts)}, x)

    def measure(self, parts: Parts, data: Batches) -> dict[str, Tensor]:
        return self.inner.measure(parts, data)

    def predict_global(self, shared: Parts, x: Tensor) -> Tensor | None:
        return self.inner.predict_global(shared, x)
