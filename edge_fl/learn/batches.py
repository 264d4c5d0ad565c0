"""One client's training data with every random decision already made by seeds: order, noise keys, padding masks.

`Batches` is what a method trains on. It is immutable; `features` gives the same samples behind a frozen extractor, computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from edge_fl.learn.network.part import Part
from edge_fl.learn.random import fold, key_of
from edge_fl.learn.tree import Params
from edge_fl.seeds import generator, seed_for

EVALUATION_BATCH = 64
SHORTEST_NORM_BATCH = 4  # METHODS.md G9: BatchNorm on two or three samples ruins the statistics


@dataclass(frozen=True)
class Keys:
    """The keys for the noise of a stage's batches; a stage that draws nothing computes none."""

    start: Callable[[], Tensor]

    @cached_property
    def base(self) -> Tensor:
        """What all of them are made from."""
        return self.start()


@dataclass(frozen=True)
class Batch:
    """x [B, ...] float32 (pixels in 0..1, or features), y [B] int64; mask [B] is 1 for samples and 0 for padding, or None for samples only.

    In a vectorised chunk, `active` says whether this client still has a batch here (None: all clients have).
    """

    x: Tensor
    y: Tensor
    keys: Keys
    step: int
    mask: Tensor | None = None
    active: Tensor | None = None
    vectorised: bool = False

    @property
    def key(self) -> Tensor:
        """For everything random in this batch."""
        return fold(self.keys.base, self.step)

    @property
    def real(self) -> Tensor:
        """1 for samples and 0 for padding [B], float32."""
        return torch.ones_like(self.y, dtype=torch.float32) if self.mask is None else self.mask


@dataclass(frozen=True)
class Batches:
    """x uint8 [N, C, H, W] or float32 features [N, d]; y int64 [N]; `run`, `round` and `client` seed every draw.

    `hurry`: how likely the client has no time for all epochs in a round.
    """

    x: Tensor
    y: Tensor
    classes: int
    batch_size: int = 32
    run: int = 0
    round: int = 0
    client: str = ""
    hurry: float = 0.0

    @classmethod
    def of(cls, x: np.ndarray | Tensor, y: np.ndarray | Tensor, **settings: object) -> Batches:
        """From arrays; keywords are the other fields."""
        return cls(as_tensor(x), as_tensor(y).to(torch.int64), **settings)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.y)

    @property
    def counts(self) -> Tensor:
        """Samples per class [C], float32."""
        return (self.y[:, None] == torch.arange(self.classes, device=self.y.device)).sum(0).to(torch.float32)

    def batches(self, stage: str, epochs: int, *, norm: bool = False) -> Iterator[Batch]:
        """The batches of one stage, epoch after epoch. With `norm` (the trained part holds BatchNorm) short tails are merged (G9)."""
        keys, step = Keys(lambda: key_of(self.noise_seed(stage)).to(self.y.device)), count()
        for rows in self.order(stage, epochs, norm=norm):
            index = torch.from_numpy(np.concatenate(rows)).to(self.y.device)
            sizes = [len(batch) for batch in rows]
            for x, y in zip(take(self.x, index).split(sizes), take(self.y, index).split(sizes), strict=True):
                yield Batch(pixels(x), y, keys, next(step))

    def noise_seed(self, stage: str) -> int:
        """What the keys of a stage begin with."""
        return seed_for(self.run, f"{stage}.noise", self.round, self.client)

    def order(self, stage: str, epochs: int, *, norm: bool = False) -> Iterator[list[np.ndarray]]:
        """Sample indices of each epoch's batches: every epoch its own permutation from (run, stage, round, client)."""
        if not epochs or (norm and len(self) < 2):
            return
        rng = generator(self.run, f"{stage}.order", self.round, self.client)
        shortest = SHORTEST_NORM_BATCH if norm else 1
        for _ in range(self._in_time(stage, epochs)):
            yield cut(rng.permutation(len(self)), self.batch_size, shortest)

    def copy(self, tensor: Tensor) -> Tensor:
        """What training works on in place of `tensor`; on a CPU convolutions are fastest with their channels last."""
        if tensor.dim() == 4 and tensor.device.type == "cpu":
            return tensor.detach().clone(memory_format=torch.channels_last)
        return tensor.detach().clone()

    def features(self, part: Part, params: Params) -> Batches:
        """The same samples as features of a frozen part: x becomes float32 [N, d], computed once, no augmentation."""
        return self.mapped(lambda x: part.frozen(params, x))

    def sample(self, share: float, stage: str) -> Batches:
        """A random share of the samples, at least one, drawn once for the stage."""
        rows = generator(self.run, f"{stage}.sample", self.round, self.client).permutation(len(self))
        index = torch.from_numpy(rows[: max(int(share * len(self)), 1)]).to(self.y.device)
        return replace(self, x=self.x[index], y=self.y[index])

    def hurried(self, hurry: float) -> Batches:
        """The same samples on a client that may not have time for all epochs (FedProx's stragglers)."""
        return replace(self, hurry=hurry)

    def _in_time(self, stage: str, epochs: int) -> int:
        rng = (
            generator(self.run, f"{stage}.hurry", self.round, self.client) if self.hurry and epochs else None
        )
        return int(rng.integers(1, epochs, endpoint=True)) if rng and rng.random() < self.hurry else epochs

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> Batches:
        """The same samples with x replaced by fn(pixels), without gradient, in order."""
        return replace(self, x=in_batches(fn, self.x))


def cut(rows: np.ndarray, size: int, shortest: int = 1) -> list[np.ndarray]:
    """Batches of `size`; a last one below `shortest` joins the one before it."""
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    if len(batches) > 1 and len(batches[-1]) < shortest:
        batches[-2:] = [np.concatenate(batches[-2:])]
    return batches


def take(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], whole rows at a time: for images thirty times as fast as torch's own indexing, and as fast under vmap."""
    return _Take.apply(x, rows) if is_functorch_wrapped_tensor(x) else x.index_select(0, rows)


class _Take(torch.autograd.Function):
    """`take` under vmap, whose own rule for it goes from value to value."""

    @staticmethod
    def forward(x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        """Data have no gradient."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, int], x: Tensor, rows: Tensor) -> tuple[Tensor, int]:
        """x [K, N, ...], rows [K, S] -> [K, S, ...]."""
        x, rows = x.movedim(in_dims[0], 0), rows.movedim(in_dims[1], 0)
        starts = torch.arange(0, x.shape[0] * x.shape[1], x.shape[1], device=x.device)
        taken = x.flatten(0, 1).index_select(0, (rows + starts[:, None]).flatten())
        return taken.unflatten(0, rows.shape), 0


def as_tensor(array: np.ndarray | Tensor) -> Tensor:
    """An array as a tensor with the strides of its shape; torch picks kernels by strides, and a dimension of 1 leaves them open."""
    tensor = torch.as_tensor(array).contiguous()
    return tensor.view(-1).view(tensor.shape)


def pixels(x: Tensor, layout: torch.memory_format = torch.channels_last) -> Tensor:
    """uint8 images as float32 in 0..1; features unchanged. On a CPU channels come last in memory (1.2 to 1.3 times as fast)."""
    if x.dtype != torch.uint8:
        return x
    if x.dim() != 4 or x.device.type != "cpu":
        layout = torch.preserve_format
    return x.to(torch.float32, memory_format=layout).div_(255.0)


def in_batches(fn: Callable[[Tensor], Tensor], x: Tensor, size: int = EVALUATION_BATCH) -> Tensor:
    """fn over x [N, ...] in batches, without gradient."""
    with torch.no_grad():
        return torch.cat([fn(pixels(chunk)) for chunk in x.split(size)])
