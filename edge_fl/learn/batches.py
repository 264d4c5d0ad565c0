"""One client's training data; all random decisions (order, noise keys, padding masks) follow from seeds.

`Batches` is immutable; `features` returns the same samples as features of a frozen extractor, computed once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from edge_fl.learn import tree
from edge_fl.learn.augment import augmented
from edge_fl.learn.network.part import Part
from edge_fl.learn.pictures import pixels
from edge_fl.learn.random import fold, key_of
from edge_fl.learn.tree import Params
from edge_fl.seeds import generator, seed_for

EVALUATION_BATCH = 64
VIEW = 97  # distinguishes the draws of `augment` from a method's own
SHORTEST_NORM_BATCH = 4  # docs/methods.md G9: two or three samples spoil BatchNorm's statistics


@dataclass(frozen=True)
class Batch:
    """x [B, ...] float32 (pixels in 0..1, or features), y [B] int64; mask [B] is 1 for samples and 0 for padding; None: no padding.

    `rows` [B] are the samples' places among all of the client, for values that were computed once per sample.
    In a vectorised chunk, `active` tells whether this client has a batch at this step (None: all clients have one).
    """

    x: Tensor
    y: Tensor
    rows: Tensor
    stage_key: Callable[[], Tensor]
    step: int
    mask: Tensor | None = None
    active: Tensor | None = None
    vectorised: bool = False

    @property
    def key(self) -> Tensor:
        """Key for all random numbers of this batch."""
        return fold(self.stage_key(), self.step)

    @property
    def real(self) -> Tensor:
        """1 for samples and 0 for padding [B], float32."""
        return torch.ones_like(self.y, dtype=torch.float32) if self.mask is None else self.mask


@dataclass(frozen=True)
class Batches:
    """x [N, ...] are samples or features [N, d]; y int64 [N]; `run`, `round` and `client` seed every draw.

    `stragglers`: the probability that the client runs only some of the epochs in a round. `augment`: the augmentation of training images,
    by name; features are never augmented.
    """

    x: Tensor
    y: Tensor
    classes: int
    batch_size: int = 32
    run: int = 0
    round: int = 0
    client: str = ""
    stragglers: float = 0.0
    augment: str = "none"

    @classmethod
    def of(cls, x: np.ndarray | Tensor, y: np.ndarray | Tensor, **settings: object) -> "Batches":
        """Batches from arrays; keywords are the other fields."""
        return cls(as_tensor(x), as_tensor(y).to(torch.int64), **settings)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.y)

    @property
    def counts(self) -> Tensor:
        """Samples per class [C], float32."""
        return (self.y[:, None] == torch.arange(self.classes, device=self.y.device)).sum(0).to(torch.float32)

    def batches(self, stage: str, epochs: int, *, norm: bool = False) -> Iterator[Batch]:
        """The batches of all epochs of a stage. With `norm` (BatchNorm is trained) a short last batch is merged (docs/methods.md G9)."""
        key = cache(lambda: key_of(self.noise_seed(stage)).to(self.y.device))  # computed at first use
        step = count()
        for rows in self.order(stage, epochs, norm=norm):
            index = torch.from_numpy(np.concatenate(rows)).to(self.y.device)
            sizes = [len(batch) for batch in rows]
            columns = (take(self.x, index), take(self.y, index), index)
            for x, y, places in zip(*(column.split(sizes) for column in columns), strict=True):
                yield self._augmented(Batch(pixels(x), y, places, key, next(step)))

    def _augmented(self, batch: Batch) -> Batch:
        if self.augment == "none" or batch.x.dim() != 4:
            return batch
        return replace(batch, x=augmented(self.augment, batch.x, fold(batch.key, VIEW)))

    def noise_seed(self, stage: str) -> int:
        """The seed of a stage's keys."""
        return seed_for(self.run, f"{stage}.noise", self.round, self.client)

    def order(self, stage: str, epochs: int, *, norm: bool = False) -> Iterator[list[np.ndarray]]:
        """Sample indices of each epoch's batches: every epoch its own permutation from (run, stage, round, client)."""
        if not epochs or (norm and len(self) < 2):
            return
        rng = generator(self.run, f"{stage}.order", self.round, self.client)
        shortest = SHORTEST_NORM_BATCH if norm else 1
        for _ in range(self._epochs_in_time(stage, epochs)):
            yield cut(rng.permutation(len(self)), self.batch_size, shortest)

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` for training in place; channels last on a CPU, where convolutions are fastest that way."""
        if tensor.dim() == 4 and tensor.device.type == "cpu":
            return tensor.detach().clone(memory_format=torch.channels_last)
        return tensor.detach().clone()

    def features(self, part: Part, params: Params) -> "Batches":
        """The same samples as features of a frozen part: x becomes float32 [N, d], computed once, no augmentation."""
        params = tree.map(self.copy, params)  # in the order of channels that is fastest
        return self.mapped(lambda x: part.frozen(params, x))

    def once(self, fn: Callable[[Tensor], Tensor]) -> Callable[[Batch], Tensor]:
        """fn(x) of any batch, without gradient: computed once for all samples, or for every batch if images are augmented."""
        if self.augment != "none" and self.x.dim() == 4:
            return torch.no_grad()(lambda batch: fn(batch.x))
        known = self.mapped(fn).x
        return lambda batch: take(known, batch.rows)

    def sample(self, share: float, stage: str) -> "Batches":
        """A random share of the samples, at least one, drawn per stage."""
        rows = generator(self.run, f"{stage}.sample", self.round, self.client).permutation(len(self))
        index = torch.from_numpy(rows[: max(int(share * len(self)), 1)]).to(self.y.device)
        return replace(self, x=self.x[index], y=self.y[index])

    def with_stragglers(self, probability: float) -> "Batches":
        """The same samples on a client that with `probability` runs only 1 to E epochs (FedProx)."""
        return replace(self, stragglers=probability)

    def in_at_least(self, batches: int, epochs: int, *, norm: bool = False) -> "Batches":
        """The same samples in smaller batches if `epochs` have fewer than `batches`, as far as there are enough samples."""
        if epochs * -(-len(self) // self.batch_size) >= batches:
            return self
        smallest = SHORTEST_NORM_BATCH if norm else 1
        return replace(self, batch_size=min(self.batch_size, max(len(self) // batches, smallest)))

    def _epochs_in_time(self, stage: str, epochs: int) -> int:
        if not (self.stragglers and epochs):
            return epochs
        rng = generator(self.run, f"{stage}.hurry", self.round, self.client)  # renaming changes results
        return int(rng.integers(1, epochs, endpoint=True)) if rng.random() < self.stragglers else epochs

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> "Batches":
        """The same samples with x replaced by fn(pixels), without gradient, in order."""
        return replace(self, x=in_batches(fn, self.x))


def cut(rows: np.ndarray, size: int, shortest: int = 1) -> list[np.ndarray]:
    """Split rows into batches of `size`; a last batch below `shortest` is merged into the previous one."""
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    if len(batches) > 1 and len(batches[-1]) < shortest:
        batches[-2:] = [np.concatenate(batches[-2:])]
    return batches


def take(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]; index_select copies whole rows, thirty times as fast as x[rows] for images, with a vmap rule of the same speed."""
    return _Take.apply(x, rows) if is_functorch_wrapped_tensor(x) else x.index_select(0, rows)


class _Take(torch.autograd.Function):
    """`take` under vmap; torch's own rule copies single values."""

    @staticmethod
    def forward(x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        """Nothing to save: data have no gradient."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, int], x: Tensor, rows: Tensor) -> tuple[Tensor, int]:
        return take_each(x.movedim(in_dims[0], 0), rows.movedim(in_dims[1], 0)), 0


def take_each(x: Tensor, rows: Tensor) -> Tensor:
    """`take` for each of K clients: x [K, N, ...], rows [K, S] -> [K, S, ...]."""
    starts = torch.arange(0, x.shape[0] * x.shape[1], x.shape[1], device=x.device)
    taken = x.flatten(0, 1).index_select(0, (rows + starts[:, None]).flatten())
    return taken.reshape(*rows.shape, *x.shape[2:])


def as_tensor(array: np.ndarray | Tensor) -> Tensor:
    """An array as a tensor with canonical strides: torch selects kernels by strides, which are arbitrary for dimensions of 1."""
    tensor = torch.as_tensor(array).contiguous()
    return tensor.view(-1).view(tensor.shape)


def in_batches(fn: Callable[[Tensor], Tensor], x: Tensor, size: int = EVALUATION_BATCH) -> Tensor:
    """fn over x [N, ...] in batches, without gradient."""
    with torch.no_grad():
        return torch.cat([fn(pixels(chunk)) for chunk in x.split(size)])
