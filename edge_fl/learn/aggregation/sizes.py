"""Sizes of updates, tensor by tensor: each tensor of a device is compared with the same tensor of the cohort, on its own scale.

What is compared is the deviation of a tensor: of a network's part from what the device received, of anything else (class means,
statistics) from the cohort's median; class means row by row, among the devices that have the class. Two sizes count, the L2 norm of the
deviation and its largest element, each relative to the cohort's upper quartile, which fewer than a quarter of the devices cannot raise.
Above `max_norm` a deviation is reduced to that: its elements are clamped, then it is scaled. Above OUTLIER times `max_norm`, or with NaN,
the device is an outlier.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edge_fl.learn.aggregation.mean import Update, only_owned, with_absent
from edge_fl.learn.tree import Params, Parts

OUTLIER = 6.0
"""Size, in `max_norm`, of an outlier: of the whole change (`edge_fl.learn.aggregation.screening`)."""
TENSOR = 18.0
"""As OUTLIER, for one tensor of a network: single tensors vary more than whole changes."""
MIN_COHORT = 3
"""Smallest number of devices that have a tensor in which its sizes are compared."""
QUARTILE = 0.75
FLOOR = 0.01
"""Smallest scale per element, relative to that of the part: what training does not move has rounding errors only."""
VALUES = 1e-4
"""Smallest scale of a tensor, relative to the root mean square of its values."""
FALL = 0.8
"""A scale falls to no less than this share of the last round's: where most devices have converged, one that still learns is no outlier."""
STATISTIC = 100.0
"""As OUTLIER, for a tensor that is no part of a network: honest statistics of few images have heavy tails."""

Place = tuple[str, str]  # part, tensor
Received = Mapping[str, Parts]  # by device


@dataclass(frozen=True)
class _Compared:
    """A tensor of a cohort, by device: what was sent, what it is compared with, and the L2 norm and largest element of the deviation."""

    place: Place
    sent: Mapping[str, Tensor]
    references: Mapping[str, Tensor]
    norms: Mapping[str, float]
    peaks: Mapping[str, float]

    @property
    def elements(self) -> int:
        return max(next(iter(self.sent.values())).numel(), 1)

    @property
    def per_element(self) -> float:
        """The typical deviation of an element."""
        return _quartile(self.norms) / math.sqrt(self.elements)


@dataclass(frozen=True)
class Oversized:
    """The oversized tensors of a cohort.

    `worst` maps each device that has one to its outlier score, and to relative size and place of that tensor; infinite for NaN. `reduced`
    are the tensors to use instead, by device and place.
    """

    worst: Mapping[str, tuple[float, float, Place]]
    reduced: Mapping[str, Mapping[Place, Tensor]]

    def without(self, update: Update) -> Update:
        """The update with oversized tensors reduced; the same object if there are none."""
        if not (changed := self.reduced.get(update.client)):
            return update
        parts = {p: dict(params) for p, params in _unpacked(update.parts).items()}
        for (part, key), tensor in changed.items():
            parts[part][key] = tensor
        as_sent = {p for p, params in update.parts.items() if _is_class_means(params)}
        packed = {p: only_owned(params) if p in as_sent else params for p, params in parts.items()}
        return replace(update, parts=packed)


class Sizes:
    """Compares the tensors of each round's cohort. `networks`: the names of parts that are networks."""

    def __init__(self, max_norm: float, networks: Collection[str]) -> None:
        self._max_norm, self._networks = max_norm, networks
        self._scales: dict[Place, tuple[float, float]] = {}  # of the last round: norm and largest element

    def compare(self, cohort: Sequence[Update], received: Received) -> Oversized:
        """The oversized tensors of a cohort; `received` are the parts that each device received."""
        parts = {update.client: _unpacked(update.parts) for update in cohort}
        compared = [
            found
            for place in dict.fromkeys(
                (p, k) for sent in parts.values() for p, ps in sent.items() for k in ps
            )
            if (found := _compared(place, parts, received, place[0] in self._networks))
        ]
        typical: dict[str, float] = {}
        for one in compared:
            typical[one.place[0]] = max(typical.get(one.place[0], 0.0), one.per_element)
        worst: dict[str, tuple[float, float, Place]] = {}
        reduced: dict[str, dict[Place, Tensor]] = {}
        for one in compared:
            norm, peak = self._scale(one, typical[one.place[0]], _between_classes(one, parts))
            outlier = self._max_norm * (TENSOR if one.place[0] in self._networks else STATISTIC)
            for client, tensor in one.sent.items():
                size = max(one.norms[client] / norm, one.peaks[client] / peak)
                if size <= self._max_norm:
                    continue
                size = size if math.isfinite(size) else math.inf
                worst[client] = max(
                    worst.get(client, (0.0, 0.0, one.place)), (size / outlier, size, one.place)
                )
                if size < math.inf:
                    most = self._max_norm * norm, self._max_norm * peak
                    reduced.setdefault(client, {})[one.place] = _shortened(
                        tensor, one.references[client], *most
                    )
        return Oversized(worst, reduced)

    def _scale(self, one: _Compared, of_part: float, between: tuple[float, float]) -> tuple[float, float]:
        """The typical norm and largest element of a tensor's deviation."""
        values = next(iter(one.references.values())).double()
        rms = float(values.square().mean().sqrt()) if values.numel() else 0.0
        least, last = max(FLOOR * of_part, VALUES * rms, 1e-12), self._scales.get(one.place, (0.0, 0.0))
        norm = max(_quartile(one.norms), FALL * last[0], least * math.sqrt(one.elements), between[0])
        peak = max(_quartile(one.peaks), FALL * last[1], least, between[1])
        self._scales[one.place] = norm, peak
        return norm, peak


def _compared(
    place: Place, parts: Mapping[str, Parts], received: Received, network: bool
) -> _Compared | None:
    sent = _of_one_shape(place, parts)
    if len(sent) < MIN_COHORT:
        return None
    references = _references(place, sent, received, parts, network)
    return _Compared(place, sent, references, *_deviations(sent, references))


def _is_class_means(params: Params) -> bool:
    return params.keys() == {"mean", "count"} and params["count"].dim() == 1


def _unpacked(parts: Parts) -> Parts:
    return {
        name: with_absent(params) if _is_class_means(params) else params for name, params in parts.items()
    }


def _of_one_shape(place: Place, parts: Mapping[str, Parts]) -> dict[str, Tensor]:
    """The tensor of each device that sent it in the most frequent shape."""
    found = {
        client: sent[place[0]][place[1]]
        for client, sent in parts.items()
        if place[1] in sent.get(place[0], {})
    }
    shapes = [tensor.shape for tensor in found.values()]
    usual = max(dict.fromkeys(shapes), key=shapes.count)
    return {client: tensor for client, tensor in found.items() if tensor.shape == usual}


def _references(
    place: Place, tensors: Mapping[str, Tensor], received: Received, parts: Mapping[str, Parts], network: bool
) -> dict[str, Tensor]:
    """What each device's tensor is compared with."""
    part, key = place
    if network:
        own = {client: received[client].get(part, {}).get(key) for client in tensors}
        if all(own[client] is not None and own[client].shape == t.shape for client, t in tensors.items()):  # type: ignore[union-attr]
            return own  # type: ignore[return-value]
    if all(_is_class_means(parts[client][part]) for client in tensors):
        if key == "count":
            return {client: torch.zeros_like(tensor) for client, tensor in tensors.items()}
        return _class_references(tensors, {client: parts[client][part]["count"] for client in tensors})
    stacked = torch.nan_to_num(torch.stack([tensor.double() for tensor in tensors.values()]))
    return dict.fromkeys(tensors, stacked.median(0).values)


def _class_references(means: Mapping[str, Tensor], counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The median mean [C, d] of each class over the devices that have it; of all class means where fewer than MIN_COHORT have it.

    A class that a device does not have is compared with itself.
    """
    stacked = torch.stack([means[client].double() for client in means])
    owned = torch.stack([counts[client] > 0 for client in means])
    known = torch.where(owned[..., None], stacked, torch.nan)
    of_class = known.nanmedian(0).values
    of_all = known.flatten(0, 1).nanmedian(0).values
    shared = (owned.sum(0) >= MIN_COHORT)[:, None]
    middle = torch.where(shared, of_class, of_all).nan_to_num()
    return {
        client: torch.where(own[:, None], middle, means[client].double())
        for client, own in zip(means, owned, strict=True)
    }


def _between_classes(one: _Compared, parts: Mapping[str, Parts]) -> tuple[float, float]:
    """How far class means are from each other: the norm over all classes, and the largest element; 0 for other tensors."""
    part, key = one.place
    if key != "mean" or not all(_is_class_means(parts[client][part]) for client in one.sent):
        return 0.0, 0.0
    rows = torch.cat([one.sent[client][parts[client][part]["count"] > 0].double() for client in one.sent])
    apart = (rows - rows.nanmedian(0).values).nan_to_num(posinf=0.0, neginf=0.0)
    if not len(rows):
        return 0.0, 0.0
    classes = next(iter(one.sent.values())).shape[0]
    return (
        float(apart.norm(dim=1).median()) * math.sqrt(classes),
        float(apart.abs().amax(1).median()),
    )


def _deviations(
    tensors: Mapping[str, Tensor], references: Mapping[str, Tensor]
) -> tuple[dict[str, float], dict[str, float]]:
    """L2 norms and largest elements of the deviations."""
    norms, peaks = {}, {}
    for client, tensor in tensors.items():
        deviation = (tensor.double() - references[client].double()).flatten()
        norms[client] = float(deviation.norm())
        peaks[client] = float(deviation.abs().max()) if deviation.numel() else 0.0
    return norms, peaks


def _quartile(values: Mapping[str, float]) -> float:
    finite = sorted(value for value in values.values() if math.isfinite(value))
    return finite[int(QUARTILE * (len(finite) - 1))] if finite else 0.0


def _shortened(tensor: Tensor, reference: Tensor, norm: float, peak: float) -> Tensor:
    reference = reference.double()
    deviation = (tensor.double() - reference).clamp(-peak, peak)
    deviation = deviation * min(norm / max(float(deviation.norm()), 1e-300), 1.0)
    value = reference + deviation
    return (value if tensor.is_floating_point() else value.round()).to(tensor.dtype)
