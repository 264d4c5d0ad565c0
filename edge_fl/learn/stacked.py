"""Many clients' data as one: what a method sees as `Batches` when the vectorised engine trains a whole chunk of clients at once.

Inside torch.func.vmap each client sees its own rows, padded to the chunk's longest client; `real` [N] and the batches' masks tell
samples from padding, and a batch's `active` whether this client still has one. Order and keys are drawn per client exactly as
`Batches` draws them, so every engine trains on the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from edge_fl.learn.batches import EVALUATION_BATCH, Batch, Batches, pixels
from edge_fl.learn.random import fold
from edge_fl.seeds import seed_for

PADDING = -1  # the label of a row that is no sample


@dataclass(frozen=True)
class Stacked(Batches):
    """One client's view of a chunk: x [N, ...], y [N] with PADDING, its `place` in the chunk; `members` hold what is drawn from seeds."""

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
        orders = [list(member.order(stage, epochs, norm=norm)) for member in self.members]
        keys = [seed_for(self.run, f"{stage}.noise", self.round, member.client) for member in self.members]
        base = torch.tensor(keys, dtype=torch.int64, device=self.y.device)[self.place]
        for step in range(max(map(len, orders))):
            index, mask, active = _padded([order[step] if step < len(order) else None for order in orders])
            rows = torch.from_numpy(index).to(self.y.device)[self.place]
            yield Batch(
                pixels(self.x[rows]),
                self.y[rows],
                fold(base, step),
                None if mask is None else torch.from_numpy(mask).to(self.y.device)[self.place],
                None if active is None else torch.from_numpy(active).to(self.y.device)[self.place],
                vectorised=True,
            )

    def sample(self, share: float, stage: str) -> Batches:
        raise NotImplementedError("a random share of the samples cannot be drawn in a vectorised chunk")

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> Batches:
        parts = [fn(pixels(chunk)) for chunk in self.x.split(EVALUATION_BATCH)]
        return replace(self, x=torch.cat([part.detach() for part in parts]))


def stack(members: Sequence[Batches]) -> tuple[Tensor, Tensor, Tensor]:
    """(x [K, N, ...], y [K, N], real [K, N]) of a chunk; padding is zeros with the label PADDING."""
    longest = max(len(member) for member in members)
    first = members[0]
    x = torch.zeros(len(members), longest, *first.x.shape[1:], dtype=first.x.dtype, device=first.x.device)
    y = torch.full((len(members), longest), PADDING, device=first.y.device)
    for place, member in enumerate(members):
        x[place, : len(member)], y[place, : len(member)] = member.x, member.y
    return x, y, (y != PADDING).to(torch.float32)


def _padded(rows: list[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Indices [K, B], which of them are samples (None: all), and which clients have a batch at all (None: all)."""
    sizes = np.array([0 if row is None else len(row) for row in rows])
    index = np.zeros((len(rows), sizes.max()), np.int64)
    for place, row in enumerate(rows):
        if row is not None:
            index[place, : len(row)] = row
    mask = None if (sizes == sizes.max()).all() else (np.arange(sizes.max()) < sizes[:, None]).astype(np.float32)
    return index, mask, None if sizes.all() else sizes > 0
