"""Class statistics of one device's labelled pictures, or of many: counts, sums of features, and one shared second moment.

    u_i = direction(f(x_i)) - centre, scaled to length 1        centre: the mean of the device's class means
    n_c = |{i: y_i = c}|,   s_c = Σ_{y_i = c} u_i,   M = Σ_i q_i q_iᵀ,   q_i = P u_i

They are sums, so the statistics of a fleet are the sum of the devices' vectors (`flat`), whatever the way of adding them. Without its
centre, a device's style (photos, sketches) would be in every class mean. P is a seeded projection to at most 128 dimensions; a vector has
at most 200 KB at 6 bytes per number, and where classes times features are more, the sums are projected, too.

Sources: Z. Guan et al., "Capture Global Feature Statistics for One-Shot Federated Learning" (FedCGS), AAAI 2025, for count, mean and second
moment; K. Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009, for P, whose columns are signed sums of
disjoint groups of features.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import StatisticsError
from edge_fl.heads.head import Array, Features
from edge_fl.heads.linear import direction

MAX_BYTES = 200_000
NUMBER_BYTES = 6
"""Bytes of one number in a secure sum (48-bit fixed point)."""
PROJECTED = 128
LEAST_WIDTH = 16
MOST_PER_CLASS = 32
"""Pictures of a class that one device counts, so that none outweighs the others (docs/class-statistics.md)."""
SEED = b"edge-fl class statistics"
RELEASES = "releases"
"""Name of the array of an extra that lists the releases on which its sums were collected."""
DEVICES = "devices"
"""Name of the array of an extra with the number of devices in each of these sums."""
LEFT_OUT = "left_out"
"""Name of the array [m, 3] of an extra that lists what is not in it: the release of the sum, `left_out_key`, and the class."""
ALL_CLASSES = -1
"""In LEFT_OUT: nothing of this device is in the sum."""
SHORTEST = 1e-9

Doubles = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """Sizes of the statistics of K = `classes` classes: sums [K, width], second moment [projected, projected]."""

    classes: int
    width: int
    projected: int

    @property
    def length(self) -> int:
        """Numbers in `flat`: counts, sums, and the upper triangle of the second moment."""
        return self.classes * (1 + self.width) + _triangle(self.projected)


def shape_of(classes: int, dim: int) -> Shape:
    """The sizes for features of `dim` dimensions, within MAX_BYTES. Raises StatisticsError for too many classes."""
    projected = min(PROJECTED, dim)
    width = (MAX_BYTES // NUMBER_BYTES - _triangle(projected)) // classes - 1
    if width < min(LEAST_WIDTH, dim):
        raise StatisticsError(
            f"{classes} classes: a message of {MAX_BYTES} bytes holds {width} numbers of each, expected {LEAST_WIDTH}"
        )
    return Shape(classes, min(dim, width), projected)


@dataclass(frozen=True, eq=False)
class Statistics:
    """counts float64 [K], sums float64 [K, width], moment float64 [projected, projected]."""

    counts: Doubles
    sums: Doubles
    moment: Doubles

    @property
    def shape(self) -> Shape:
        return Shape(len(self.counts), self.sums.shape[1], len(self.moment))

    @property
    def flat(self) -> Doubles:
        """All numbers as one vector; adding two vectors adds the statistics."""
        upper = self.moment[np.triu_indices(len(self.moment))]
        return np.concatenate([self.counts, self.sums.ravel(), upper])

    def arrays(self) -> dict[str, Array]:
        """float32 arrays by name, for the extra of a release (`from_arrays` is the inverse)."""
        upper = self.moment[np.triu_indices(len(self.moment))]
        named = {"count": self.counts, "sums": self.sums, "moment": upper}
        return {name: array.astype(np.float32) for name, array in named.items()}

    def without(self, own: Statistics) -> Statistics:
        """The same without one device's part of the sum, of as many or fewer classes. Raises StatisticsError for another shape."""
        own = own.grown(max(len(self.counts), len(own.counts)))
        if own.shape != self.shape:
            raise StatisticsError(f"statistics of {own.shape} in a sum of {self.shape}")
        return Statistics(self.counts - own.counts, self.sums - own.sums, self.moment - own.moment)

    def left_out(self, classes: Labels, dim: int) -> Statistics:
        """The same without the pictures of these classes, as if each were at the mean of its class; `dim`: of the features."""
        counted = classes[self.counts[classes] > 0]
        if not len(counted):
            return self
        roots = np.sqrt(self.counts[counted])[:, None]
        q = project(lift(self.sums[counted] / roots, dim), len(self.moment))
        kept = ~np.isin(np.arange(len(self.counts)), counted)
        return Statistics(self.counts * kept, self.sums * kept[:, None], self.moment - q.T @ q)

    def grown(self, classes: int) -> Statistics:
        """The same for a longer list of classes, of whose new ones nothing is known."""
        more = classes - len(self.counts)
        return Statistics(np.pad(self.counts, (0, more)), np.pad(self.sums, ((0, more), (0, 0))), self.moment)


def of(z: Features, y: Labels, classes: int, rows: Labels | None = None) -> Statistics:
    """Statistics of the pictures `rows` (default: all) of a device with features z [n, d] and class ids y [n], centred by all of them.

    Raises StatisticsError for pictures of a single class: without another one nothing is left after centring.
    """
    if len(np.unique(y)) < 2:
        raise StatisticsError(f"pictures of {len(np.unique(y))} class, expected 2 or more classes")
    shape, u = shape_of(classes, z.shape[1]), direction(z)
    centre = class_centre(u, y)
    if rows is not None:
        u, y = u[rows], y[rows]
    centred = u - centre
    centred /= np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
    members = np.eye(classes)[y]
    q = project(centred, shape.projected)
    return Statistics(members.sum(axis=0), members.T @ project(centred, shape.width), q.T @ q)


def keys_of(z: Features) -> list[str]:
    """A hash of the features z [n, d] of each picture."""
    return [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in z]


def uncounted(keys: Sequence[str], y: Labels, counted: Mapping[str, int]) -> Labels:
    """The rows of different pictures that are not `counted`, a class by key, up to MOST_PER_CLASS of a class with those that are."""
    full, rows = Counter(counted.values()), dict[str, int]()
    for row in sorted(range(len(keys)), key=lambda row: keys[row]):
        label = int(y[row])
        if keys[row] not in counted and keys[row] not in rows and full[label] < MOST_PER_CLASS:
            rows[keys[row]] = row
            full[label] += 1
    return np.array(sorted(rows.values()), np.int64)


def left_out_key(release: int, device: str) -> int:
    """The device's name in LEFT_OUT: a hash that no other device of the fleet has, and that differs from sum to sum."""
    digest = hashlib.blake2b(f"{release} {device}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def unit(rows: Doubles) -> Doubles:
    """Rows [n, d] scaled to length 1."""
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), SHORTEST))


def class_centre(u: Features | Doubles, y: Labels) -> Doubles:
    """The mean [d] of the class means of u [n, d]: every class weighs the same."""
    means = [u[y == label].mean(axis=0, dtype=np.float64) for label in np.unique(y)]
    centre: Doubles = np.mean(means, axis=0)
    return centre


def from_flat(vector: Doubles, shape: Shape) -> Statistics:
    """Rebuild statistics from `Statistics.flat`. Raises StatisticsError for another length and for numbers that are not finite."""
    if vector.shape != (shape.length,) or not np.isfinite(vector).all():
        raise StatisticsError(
            f"{vector.size} numbers, {np.isfinite(vector).sum()} of them finite, expected {shape.length}"
        )
    counts, sums, upper = np.split(vector, [shape.classes, shape.classes * (1 + shape.width)])
    moment = _symmetric(upper, shape.projected)
    return Statistics(counts.copy(), sums.reshape(shape.classes, shape.width).copy(), moment)


def from_arrays(arrays: Mapping[str, Array]) -> Statistics:
    """Rebuild statistics from `Statistics.arrays`. Raises StatisticsError for arrays of other names, shapes or values."""
    flaw = f"{', '.join(f'{name} {list(array.shape)}' for name, array in arrays.items()) or 'nothing'}"
    if (
        arrays.keys() - {RELEASES, DEVICES, LEFT_OUT} != {"count", "sums", "moment"}
        or arrays["sums"].ndim != 2
    ):
        raise StatisticsError(f"{flaw}, expected count [K], sums [K, w] and moment")
    sums, upper = arrays["sums"], arrays["moment"]
    projected = round(np.sqrt(2 * upper.size + 0.25) - 0.5)
    if upper.shape != (_triangle(projected),) or arrays["count"].shape != sums.shape[:1]:
        raise StatisticsError(f"{flaw}: sizes that do not fit each other")
    vector = np.concatenate([arrays[name].ravel().astype(np.float64) for name in ("count", "sums", "moment")])
    return from_flat(vector, Shape(len(sums), sums.shape[1], projected))


def project(u: Doubles, width: int) -> Doubles:
    """Project u [n, d] to [n, width] with orthonormal columns, signed sums of disjoint groups of features; `width` = d changes nothing."""
    dim = u.shape[1]
    if width >= dim:
        return u
    order, factors = _groups(dim, width)
    padded = np.zeros((len(u), -(-dim // width) * width))
    padded[:, :dim] = (u * factors)[:, order]
    projected: Doubles = padded.reshape(len(u), -1, width).sum(axis=1)
    return projected


def lift(v: Doubles, dim: int) -> Doubles:
    """The transpose of `project`: v [n, width] -> [n, dim]."""
    width = v.shape[1]
    if width >= dim:
        return v
    order, factors = _groups(dim, width)
    lifted = np.empty((len(v), dim))
    lifted[:, order] = np.tile(v, -(-dim // width))[:, :dim]
    lifted *= factors
    return lifted


@lru_cache(maxsize=8)
def _groups(dim: int, width: int) -> tuple[Labels, Doubles]:
    """The order of the features, whose every width-th is in one group, and the factor of each: a sign over the root of its group's size.

    From SHAKE-256, because all devices must project alike; numpy.random would cost an agent 2 MB of memory.
    """
    raw = np.frombuffer(hashlib.shake_256(SEED).digest(16 * dim), "<u8").astype(np.uint64)
    order = np.argsort(raw[:dim], kind="stable")
    sizes = np.bincount(np.arange(dim) % width, minlength=width)
    factors = np.where(raw[dim:] >> np.uint64(63), 1.0, -1.0)
    factors[order] /= np.sqrt(sizes[np.arange(dim) % width])
    return order, factors


def _triangle(size: int) -> int:
    return size * (size + 1) // 2


def _symmetric(upper: Doubles, size: int) -> Doubles:
    matrix = np.zeros((size, size))
    matrix[np.triu_indices(size)] = upper
    return np.asarray(matrix + np.triu(matrix, 1).T)
