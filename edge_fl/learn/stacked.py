"""`Batches` for the vectorised engine, which trains a chunk of clients at once.

Inside torch.func.vmap each client has its own rows, padded to the longest client of the chunk; `real` [N] and the batches' masks separate
samples from padding, and `active` tells whether a client has a batch at a step. Order and keys are drawn per client as in `Batches`, so
every engine trains on the same batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from edge_fl.learn.batches import EVALUATION_BATCH, Batch, Batches, take, take_each
from edge_fl.learn.network import stacks
from edge_fl.learn.pictures import pixels

PADDING = -1  # label of padded rows
MAPPED_BYTES = 1 << 24
"""Of the images of all clients that `mapped` passes at a time, unless that is below EVALUATION_BATCH of each."""


@dataclass(frozen=True)
class Stacked(Batches):
    """One client's view of a chunk: x [N, ...], y [N] with PADDING, its `place` in the chunk; `members` are all clients' batches."""

    members: tuple[Batches, ...] = ()
    place: Tensor | None = None
    real: Tensor | None = None

    def __len__(self) -> int:
        raise TypeError("the number of samples differs by client in a vectorised chunk; use `samples`")

    @property
    def samples(self) -> Tensor:
        assert self.real is not None
        return self.real.sum()

    def batches(self, stage: str, epochs: int, *, norm: bool = False) -> Iterator[Batch]:
        key = cache(lambda: self._mine(np.array([member.noise_seed(stage) for member in self.members])))
        for start, plan in self._plans(stage, epochs, norm):
            index = self._mine(plan.index)
            masks = [None] * len(plan.widths) if all(plan.full) else self._mine(plan.mask).split(plan.widths)
            actives = [None] * len(plan.widths) if all(plan.all_on) else self._mine(plan.active).unbind()
            columns = zip(
                take(self.x, index).split(plan.widths),
                take(self.y, index).split(plan.widths),
                index.split(plan.widths),
                masks,
                actives,
                strict=True,
            )
            for step, (x, y, rows, mask, active) in enumerate(columns):
                mask = None if plan.full[step] else mask
                active = None if plan.all_on[step] else active
                batch = Batch(self._pixels(x), y, rows, key, start + step, mask, active, vectorised=True)
                yield self._augmented(batch)

    def stacks(self, stage: str, epochs: int, x: Tensor, y: Tensor) -> Iterator[stacks.Batch]:
        """The batches of all clients, outside vmap: x [K, N, ...] and y [K, N] are their data. Images are not augmented."""
        for _, plan in self._plans(stage, epochs):
            index, mask, active = (
                torch.from_numpy(table).to(y.device) for table in (plan.index, plan.mask, plan.active)
            )
            columns = zip(
                take_each(x, index).split(plan.widths, 1),
                take_each(y, index).split(plan.widths, 1),
                strict=True,
            )
            masks = mask.split(plan.widths, 1)
            for step, (x_now, y_now) in enumerate(columns):
                full, all_on = plan.full[step], plan.all_on[step]
                yield (
                    self._pixels(x_now),
                    y_now,
                    None if full else masks[step],
                    None if all_on else active[:, step],
                )

    def _plans(self, stage: str, epochs: int, norm: bool = False) -> "Iterator[tuple[int, StackPlan]]":
        """The steps of an epoch at a time, with the number of the first."""
        orders = [
            list(chain.from_iterable(member.order(stage, epochs, norm=norm))) for member in self.members
        ]
        steps = max(map(len, orders))
        block = max(-(-steps // max(epochs, 1)), 1)
        for start in range(0, steps, block):
            yield start, _plan([order[start : start + block] for order in orders])

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def _pixels(self, x: Tensor) -> Tensor:
        return pixels(x, torch.preserve_format)  # vmap does not support channels last

    def _mine(self, table: np.ndarray) -> Tensor:
        """The row of this client in a table [K, ...]."""
        return torch.from_numpy(table).to(self.y.device)[self.place]

    def sample(self, share: float, stage: str) -> Batches:
        raise NotImplementedError("a random share of the samples cannot be drawn in a vectorised chunk")

    def with_stragglers(self, probability: float) -> Batches:
        return replace(self, members=tuple(member.with_stragglers(probability) for member in self.members))

    def in_at_least(self, batches: int, epochs: int, *, norm: bool = False) -> Batches:
        members = tuple(member.in_at_least(batches, epochs, norm=norm) for member in self.members)
        return replace(self, members=members)

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> Batches:
        each = len(self.members) * self.x[0].numel() * torch.float32.itemsize
        rows = max(EVALUATION_BATCH, MAPPED_BYTES // each)  # small images in one piece, without a copy
        parts = [fn(self._pixels(piece)).detach() for piece in self.x.split(rows)]
        return replace(self, x=torch.cat(parts) if len(parts) > 1 else parts[0])


def stack(members: Sequence[Batches]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack a chunk -> (x [K, N, ...], y [K, N], real [K, N]); padding is zeros with the label PADDING."""
    x = pad_sequence([member.x for member in members], batch_first=True)
    y = pad_sequence([member.y for member in members], batch_first=True, padding_value=PADDING)
    return x, y, (y != PADDING).to(torch.float32)


@dataclass(frozen=True)
class StackPlan:
    """The batches of K clients in S steps: `widths` [S] rows per step, `index` and `mask` [K, sum of widths], `active` [K, S].

    `full` [S]: the step has no padding; `all_on` [S]: every client has a batch.
    """

    widths: list[int]
    index: np.ndarray
    mask: np.ndarray
    active: np.ndarray
    full: list[bool]
    all_on: list[bool]


def _plan(rows: Sequence[Sequence[np.ndarray]]) -> StackPlan:
    """Align the clients' batches; each step is as wide as its largest batch."""
    steps = max(map(len, rows))
    sizes = np.zeros((len(rows), steps), np.int64)
    for place, batches in enumerate(rows):
        sizes[place, : len(batches)] = [len(batch) for batch in batches]
    widths = sizes.max(0)
    within = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)  # place in its step
    mask = within < np.repeat(sizes, widths, axis=1)
    index = np.zeros(mask.shape, np.int64)
    index[mask] = np.concatenate([batch for batches in rows for batch in batches])
    full = [bool((column == width).all()) for column, width in zip(sizes.T, widths, strict=True)]
    return StackPlan(
        widths.tolist(),
        index,
        mask.astype(np.float32),
        sizes > 0,
        full,
        [bool(column.all()) for column in sizes.T],
    )
