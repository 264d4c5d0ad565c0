"""Class statistics of one device's labelled pictures, or of many: counts, sums of features, one shared second moment, and a centre.

    u_i = direction(f(x_i)) - m, scaled to length 1             m: the mean of the device's class means
    n_c = |{i: y_i = c}|,   s_c = Σ_{y_i = c} u_i,   M = Σ_i q_i q_iᵀ,   q_i = P u_i,   centre = Σ_i m

They are sums, so the statistics of a fleet are the sum of the devices' vectors (`flat`), whatever the way of adding them. Without its
centre, a device's style (photos, sketches) would be in every class mean. centre / Σ n_c is the fleet's mean centre, for devices without
labels. P is a seeded projection to at most 128 dimensions; a vector has at most 200 KB at 6 bytes per number, and where classes times
features are more, the sums are projected, too.

The extra of a release has the statistics as means in half precision (`arrays`): means do not grow with the fleet. Each release rounds them
again, by at most one part in 2,048 of each number.

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
LEAST_PROJECTED = 8
NAMES = 350
"""Numbers of 2 bytes that the names and sizes in an extra, and its description in a manifest, take."""
LEAST_WIDTH = 16
MOST_PER_CLASS = 32
"""Pictures of a class that one device counts, so that none outweighs the others (docs/class-statistics.md)."""
SEED = b"edge-fl class statistics"
ADDED = "added"
"""Name of the array [n] of an extra that lists the sums in it, by `key_of`."""
DEVICES = "devices"
"""Name of the array [1] of an extra with the number of devices in all of these sums; one that is in two of them counts twice."""
LEFT_OUT = "left_out"
"""Name of the array [m, 3] of an extra that lists what is not in it: the keys of the sum and of the device in it, and the class."""
MOST_SUMS, MOST_LEFT_OUT = 1024, 128
"""Lengths of ADDED and LEFT_OUT at most. Of more sums no prior is made; of LEFT_OUT the oldest rows go."""
ALL_CLASSES = -1
"""In LEFT_OUT: nothing of this device is in the sum."""
SURVIVALS = "survivals"
"""Name of the array of an extra with the devices' histograms (`edge_fl.heads.promise`)."""
LISTS = {ADDED, DEVICES, LEFT_OUT, SURVIVALS}
SUMS = ("count", "sums", "moment", "centre")
MEANS = ("count", "means", "mean_moment", "mean_centre")
SHORTEST = 1e-9

Doubles = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """Sizes of statistics of K = `classes` classes and of features of `dim` dimensions: sums [K, width], moment [projected, projected]."""

    classes: int
    width: int
    projected: int
    dim: int

    @property
    def length(self) -> int:
        """Numbers in `flat`: counts, sums, the upper triangle of the second moment, and the centre."""
        return self.classes * (1 + self.width) + _triangle(self.projected) + self.dim


def shape_of(classes: int, dim: int) -> Shape:
    """The sizes for features of `dim` dimensions, within MAX_BYTES.

    An extra adds at most 4 bytes for each class and dimension to a release; of small networks, where the second moment would lose more than
    half, its names and its description come on top.

    Raises StatisticsError for too many classes or dimensions.
    """
    spare = (
        classes * dim - dim - 2 * classes
    )  # numbers of 2 bytes, after the means, the centre and the counts
    spare -= NAMES if spare > 2 * NAMES else 0
    fitting = int((np.sqrt(max(8 * spare + 1, 1)) - 1) / 2)
    projected = min(PROJECTED, dim, max(fitting, LEAST_PROJECTED))
    width = (MAX_BYTES // NUMBER_BYTES - _triangle(projected) - dim) // classes - 1
    if width < min(LEAST_WIDTH, dim):
        raise StatisticsError(
            f"{classes} classes and {dim} features: a message of {MAX_BYTES} bytes holds {max(width, 0)} numbers of each class,"
            f" expected {LEAST_WIDTH}"
        )
    return Shape(classes, min(dim, width), projected, dim)


@dataclass(frozen=True, eq=False)
class Statistics:
    """counts float64 [K], sums float64 [K, width], moment float64 [projected, projected], centre float64 [dim]."""

    counts: Doubles
    sums: Doubles
    moment: Doubles
    centre: Doubles

    @property
    def shape(self) -> Shape:
        return Shape(len(self.counts), self.sums.shape[1], len(self.moment), len(self.centre))

    @property
    def flat(self) -> Doubles:
        """All numbers as one vector; adding two vectors adds the statistics."""
        return np.concatenate([self.counts, self.sums.ravel(), self._upper, self.centre])

    def addends(self) -> dict[str, Array]:
        """float32 arrays by name; adding two adds the statistics (`from_arrays` is the inverse)."""
        named = {"count": self.counts, "sums": self.sums, "moment": self._upper, "centre": self.centre}
        return {name: array.astype(np.float32) for name, array in named.items()}

    def arrays(self) -> dict[str, Array]:
        """Arrays by name for the extra of a release: counts float32, means float16 (`from_arrays` is the inverse, but for rounding)."""
        total = _divisor(self.counts.sum())
        means = {
            "means": self.sums / _divisor(self.counts)[:, None],
            "mean_moment": self._upper / total,
            "mean_centre": self.centre / total,
        }
        most = float(np.finfo(np.float16).max)  # only noise is above it
        half = {name: np.clip(array, -most, most).astype(np.float16) for name, array in means.items()}
        return {"count": self.counts.astype(np.float32), **half}

    def without(self, own: Statistics) -> Statistics:
        """The same without one device's part of the sum, of as many or fewer classes. Raises StatisticsError for another shape."""
        own = own.resized(self.shape)
        return from_flat(self.flat - own.flat, self.shape)

    def left_out(self, classes: Labels) -> Statistics:
        """The same without the pictures of these classes, as if each were at the mean of its class.

        Their scatter stays with the others' pictures, as far as features of length 1 can have it.
        """
        counted = classes[self.counts[classes] > 0]
        if not len(counted):
            return self
        kept = ~np.isin(np.arange(len(self.counts)), counted)
        counts = self.counts * kept
        between = self._between(np.flatnonzero(counts > 0))
        scatter = self.moment - self._between(counted) - between
        most, trace = max(float(counts.sum() - np.trace(between)), 0.0), float(np.trace(scatter))
        moment = between + scatter * min(1.0, most / max(trace, SHORTEST))
        return Statistics(
            counts, self.sums * kept[:, None], moment, self.centre * (counts.sum() / self.counts.sum())
        )

    def _between(self, classes: Labels) -> Doubles:
        """The part of the moment that the means of these classes, which have pictures, make up."""
        roots = np.sqrt(self.counts[classes])[:, None]
        q = project(lift(self.sums[classes] / roots, len(self.centre)), len(self.moment))
        return np.asarray(q.T @ q)

    def grown(self, classes: int) -> Statistics:
        """The same for a longer list of classes, of whose new ones nothing is known."""
        more = classes - len(self.counts)
        counts, sums = np.pad(self.counts, (0, more)), np.pad(self.sums, ((0, more), (0, 0)))
        return Statistics(counts, sums, self.moment, self.centre)

    def resized(self, shape: Shape) -> Statistics:
        """The same in the sizes for a longer list of classes: what is not known of the moment is that of equal variance in all directions.

        Resized parts of a sum give the resized sum. Raises StatisticsError for fewer classes, or other features.
        """
        if shape == self.shape:
            return self
        if shape.dim != self.shape.dim or shape.classes < self.shape.classes:
            raise StatisticsError(f"statistics of {self.shape}, expected {shape}")
        found, dim = self.grown(shape.classes), shape.dim
        wide = project(lift(found.sums, dim), shape.width)
        known = len(self.moment)
        if known == shape.projected:
            return Statistics(found.counts, wide, found.moment, found.centre)
        across = project(lift(np.eye(known), dim), shape.projected)
        rest = (self.counts.sum() - np.trace(self.moment)) / max(dim - known, 1)
        moment = across.T @ self.moment @ across + rest * (np.eye(shape.projected) - across.T @ across)
        return Statistics(found.counts, wide, moment, found.centre)

    @property
    def _upper(self) -> Doubles:
        upper: Doubles = self.moment[np.triu_indices(len(self.moment))]
        return upper


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
    sums = members.T @ project(centred, shape.width)
    return Statistics(members.sum(axis=0), sums, q.T @ q, len(y) * centre)


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


def key_of(id: str) -> int:
    """The key of the sum `id` in ADDED and LEFT_OUT: 31 bits, so that a list of sums stays short."""
    return _hashed(id) >> 33


def left_out_key(id: str, device: str) -> int:
    """The device's key in LEFT_OUT: a hash that no other device of the fleet has, and that differs from sum to sum."""
    return _hashed(f"{id} {device}") >> 1


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
    ends = np.cumsum([shape.classes, shape.classes * shape.width, _triangle(shape.projected)])
    counts, sums, upper, centre = np.split(vector, ends)
    moment = _symmetric(upper, shape.projected)
    return Statistics(counts.copy(), sums.reshape(shape.classes, shape.width).copy(), moment, centre.copy())


def from_arrays(arrays: Mapping[str, Array]) -> Statistics:
    """Rebuild statistics from `Statistics.arrays` or `addends`. Raises StatisticsError for arrays of other names, shapes or values."""
    flaw = f"{', '.join(f'{name} {list(array.shape)}' for name, array in arrays.items()) or 'nothing'}"
    names = next((names for names in (MEANS, SUMS) if arrays.keys() - LISTS == set(names)), None)
    if names is None or arrays[names[1]].ndim != 2:
        raise StatisticsError(f"{flaw}, expected {', '.join(MEANS)}, or {', '.join(SUMS)}")
    counts, sums, upper, centre = (arrays[name].astype(np.float64) for name in names)
    projected = round(np.sqrt(2 * upper.size + 0.25) - 0.5)
    if upper.shape != (_triangle(projected),) or counts.shape != sums.shape[:1] or centre.ndim != 1:
        raise StatisticsError(f"{flaw}: sizes that do not fit each other")
    if names is MEANS:
        total = _divisor(counts.sum())
        sums, upper, centre = sums * _divisor(counts)[:, None], upper * total, centre * total
    vector = np.concatenate([counts, sums.ravel(), upper, centre])
    return from_flat(vector, Shape(len(sums), sums.shape[1], projected, len(centre)))


def project(u: Doubles, width: int) -> Doubles:
    """Project u [n, d] to [n, width] with orthonormal columns, signed sums of disjoint groups of features; `width` = d changes nothing."""
    dim = u.shape[1]
    if width >= dim:
        return u
    order, factors = _groups(dim, width)
    padded = np.zeros((len(u), -(-dim // width) * width))
    padded[:, :dim] = (u * factors)[:, order]
    projected: Doubles = padded.reshape(len(u), padded.shape[1] // width, width).sum(axis=1)
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


def _divisor(counts: Doubles) -> Doubles:
    """What the sums of so many pictures are divided by: 1 where there is none, or only noise."""
    return np.maximum(counts.astype(np.float32).astype(np.float64), 1)


def _hashed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _triangle(size: int) -> int:
    return size * (size + 1) // 2


def _symmetric(upper: Doubles, size: int) -> Doubles:
    matrix = np.zeros((size, size))
    matrix[np.triu_indices(size)] = upper
    return np.asarray(matrix + np.triu(matrix, 1).T)
