"""Fine-tuning, suffix "+FT" of a method's name: after the last round every client fine-tunes the global model on its own data.

Nothing is sent (docs/methods.md G17). C. Jing et al., arXiv:2204.11841, report FedAvg+FT and FedProx+FT.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import isfunction
from typing import Any, Self

from torch import Tensor

from edge_fl.errors import MethodError
from edge_fl.heads.plan import HeadUpdateKind
from edge_fl.learn import tree
from edge_fl.learn.batches import Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import TUNED, HeadTier, Method, hyper


def _asking_inner(tuned: "type[FineTuned]") -> "type[FineTuned]":
    """Decorate the class: a step of `Method` that it does not define is the inner method's."""

    def step(name: str) -> Callable[..., Any]:
        return lambda self, *arguments, **named: getattr(self.inner, name)(*arguments, **named)

    for name, value in vars(Method).items():
        if isfunction(value) and not name.startswith("_") and name not in vars(tuned):
            setattr(tuned, name, step(name))
    return tuned


@dataclass(frozen=True)
@_asking_inner
class FineTuned(Method):
    """A method with shared extractor and head (`inner`), plus fine-tuned personal copies. What this class does not define is `inner`'s."""

    inner: Method = field(kw_only=True)
    ft_epochs: int = hyper(10, "epochs of fine-tuning", low=0, source="RepPer [P]")
    ft_lr: float = hyper(
        0.1, "learning rate of fine-tuning, momentum 0.9", low=0, source="as RepPer's head [D]"
    )
    ft_steps: int = hyper(
        300, "at least so many steps, if any epochs; scope head", low=0, source="as RepPer's head [D]"
    )
    ft_scope: str = hyper("head", "what is tuned", choices=("head", "full"), source="RepPer [P]")

    citation = "fine-tuning as in Jing et al., arXiv:2204.11841"
    family = "global model, then fine-tuned"
    grid = {"ft_lr": (0.01, 0.1)}
    head_tier = HeadTier(
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
        object.__setattr__(self, "title", f"{self.inner.title}+FT")
        for name, kind in Method.__annotations__.items():
            if kind.startswith("ClassVar") and name not in (*vars(FineTuned), "title"):
                object.__setattr__(self, name, getattr(self.inner, name))
        super().__post_init__()
        if self.ft_scope == "full" and type(self.inner).features is not Method.features:
            raise MethodError(
                f"method {self.title}: ft_scope = 'full', expected 'head' (the method computes features in its own way)"
            )

    @property
    def draws(self) -> bool:
        return self.inner.draws

    @property
    def least_steps(self) -> int:
        """`ft_steps`, 0 without epochs."""
        return self.ft_steps if self.ft_epochs else 0

    def at(self, round: int) -> Self:
        return replace(self, inner=self.inner.at(round))

    def head_updates(self) -> Mapping[str, HeadUpdateKind]:
        """None: heads are tuned for their own device."""
        return {}

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

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        return self.inner.predict({**parts, **tree.unprefixed(TUNED, parts)}, x)
