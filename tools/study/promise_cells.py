"""The devices of `tools.study.promise` and its relatives: cells (`tools.study.day_zero_cells`) whose devices share images.

- PACS: a domain on the frozen backbone, whose fleet are the other three domains.
- CIFAR-10: an extractor of FedAvg that four full devices trained, whose other images are the devices'.
- IMU: a person of seglearn's watch data on random convolution kernels; the other nine persons are the fleet. Labels come from the first
  half of each recording, tests from the second half, as in `tools.study.imu`.

Two kinds of devices. "Balanced": k labels of each class, and all other images for testing, in which every class counts alike. "Own shares":
class shares drawn from Dirichlet 0.5, for labels and tests alike; k labels per class are k times the number of classes in all. The first
k C labels of a device are those with k per class.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from edge_fl.data import datasets
from edge_fl.data.samples import Array, Indices, Labels
from edge_fl.errors import DataError
from edge_fl.heads import HeadPlan
from edge_fl.methods import PRETRAINED
from edge_fl.methods.contract.tiers import head_plan
from edge_fl.seeds import generator
from edge_fl_lab.newcomers import features
from edge_fl_server.training.engines.processes import threads
from tools.study import day_zero_cells, imu, predictions
from tools.study import day_zero_training as training
from tools.study.day_zero_cells import About, Cell
from tools.study.day_zero_training import Place

PACS, CIFAR, IMU = "pacs", "cifar10", "imu"
BALANCED, SHARES = "balanced", "own shares"
PER_CLASS = (0, 3, 10, 20)
MOST, TESTS, MOST_TESTS = max(PER_CLASS), 100, 400
"""Labels of each class, and test images of each class: with own shares on average, balanced at most."""
PARTS = 12
"""Devices of each kind in a domain of PACS; as many share an extractor of CIFAR-10."""
SEEDS = {PACS: 1, CIFAR: 4, IMU: 5}
EVERYTHING = 10_000


@dataclass(frozen=True, eq=False)
class Shared(Cell):
    """A cell whose devices have rows of the same z and y: `own` and `rest` for each device, one after the other; sizes [D, 2]."""

    own: Array
    rest: Array
    sizes: Array

    def labels(self, device: int) -> Array:
        """Positions of a device's images that are not for testing, in the order in which it gets their labels."""
        return self._part(self.own, device, 0)

    def tests(self, device: int) -> Array:
        """Positions of a device's images for testing."""
        return self._part(self.rest, device, 1)

    def weights(self, device: int) -> Array:
        """Weights of the tests, of sum 1: every class counts alike where the device is balanced."""
        y = self.y[self.tests(device)]
        counts = np.bincount(y)[y] if self.about.rows[device] == BALANCED else np.ones(len(y))
        return np.asarray(1 / counts / (1 / counts).sum())

    def _part(self, rows: Array, device: int, column: int) -> Array:
        ends = np.cumsum(self.sizes[:, column])
        return rows[ends[device] - self.sizes[device, column] : ends[device]]


def cells(names: Sequence[str], data: Path, out: Path) -> Iterator[Shared]:
    """The cells of these data sets, made where they are not kept in `out`."""
    for name in names:
        for place in _places(name):
            path = place.path(out)
            if not path.is_file():
                with threads(1), threadpool_limits(1):
                    day_zero_cells.write(path, _MAKERS[name](place, data, out))
            yield day_zero_cells.read(path, Shared)


def _places(name: str) -> Iterator[Place]:
    method = {PACS: PRETRAINED, CIFAR: "fedavg", IMU: imu.KERNELS}[name]
    domains = {PACS: predictions.DOMAINS, CIFAR: ("",), IMU: [f"person{number}" for number in range(10)]}
    for seed in range(SEEDS[name]):
        yield from (Place(name, method, seed, domain) for domain in domains[name])


def balanced(y: Labels, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """Rows with labels, class after class in each round, and rows for testing."""
    of_class = [rng.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
    return in_rounds(of_class, rng), np.concatenate([rows[MOST : MOST + MOST_TESTS] for rows in of_class])


def in_rounds(of_class: Sequence[Indices], rng: np.random.Generator) -> Indices:
    """One row of each class, in random order, then the next ones, at most MOST of each."""
    rounds = [[rows[place] for rows in of_class if place < len(rows)] for place in range(MOST)]
    return np.concatenate([rng.permutation(rows) for rows in rounds if rows])


def own_shares(y: Labels, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """Rows with labels and rows for testing, both with the device's own class shares."""
    classes = int(y.max()) + 1
    count = (MOST + TESTS) * classes
    rows = training.drawn(y, np.arange(len(y)), training.shares(classes, rng), count, rng)
    return rows[: MOST * classes], rows[MOST * classes :]


def _devices(y: Labels, seed: int, domain: str) -> tuple[tuple[str, ...], list[Indices], list[Indices]]:
    """The names of the rows of the table, and for each device its rows with labels and for testing."""
    names, train, test = [], [], []
    for kind, of in ((BALANCED, balanced), (SHARES, own_shares)):
        for part in range(PARTS):
            own, rest = of(y, generator(seed, "promise", client=f"{domain} {kind} {part}"))
            names.append(kind)
            train.append(own)
            test.append(rest)
    return tuple(names), train, test


def _pacs(place: Place, data: Path, out: Path) -> Shared:
    found = {
        name: predictions.features(name, data, out / "features", EVERYTHING) for name in predictions.DOMAINS
    }
    own, others = found[place.domain], [each for name, each in found.items() if name != place.domain]
    names, train, test = _devices(own.y, place.seed, place.domain)
    about = About(PACS, PRETRAINED, place.seed, names, int(own.y.max()) + 1, False, HeadPlan("cosine"))
    return _cell(about, own.z, own.y, train, test, [o.z for o in others], [o.y for o in others])


def _cifar(place: Place, data: Path, out: Path) -> Shared:
    del out
    dataset, sizes = datasets.load(CIFAR, data), training.SIZES[CIFAR]
    y, classes = dataset.samples.y, len(dataset.classes)
    rng = generator(place.seed, "promise", client="full")
    left, full = np.arange(len(y)), list[Array]()
    for _ in range(training.FULL):
        full.append(training.drawn(y, left, training.shares(classes, rng), sizes.full, rng))
        left = np.setdiff1d(left, full[-1])
    left = np.sort(rng.permutation(left)[:EVERYTHING])
    found = training.run_of(place, dataset, data, full, left[: training.FULL])

    def z(rows: Indices) -> Array:
        return features(found.method, found.shared, dataset.samples.take(rows), "cpu").numpy()

    names, train, test = _devices(y[left], place.seed, "")
    all_z, all_y = z(left), y[left]
    plan = head_plan(found.method, training.BATCH, collect=False)
    about = About(CIFAR, place.method, place.seed, names, classes, found.method.unit_norm, plan, "head")
    weight, bias = (found.shared["head"][key].numpy() for key in ("weight", "bias"))
    shared = [z(rows) for rows in full], [y[rows] for rows in full], weight, bias
    return _cell(about, all_z, all_y, train, test, *shared)


def _imu(place: Place, data: Path, out: Path) -> Shared:
    del out
    dataset, person = datasets.load("watch", data), int(place.domain.removeprefix("person"))
    if dataset.domains is None:
        raise DataError(
            f"{data}/watch.npz: no persons in it, expected the file of `python -m tools.study.imu convert`"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = imu.trained(imu.KERNELS, dataset, person, place.seed, 1)
    z, y = features(found.method, found.shared, dataset.samples, "cpu").numpy(), dataset.samples.y
    own, tests = imu.halves(dataset, person, place.seed, "later")
    rng = np.random.default_rng([place.seed, person])
    labelled = in_rounds([rng.permutation(own[y[own] == label]) for label in range(7)], rng)
    others = [np.flatnonzero(dataset.domains == who) for who in range(10) if who != person]
    plan = replace(head_plan(found.method, 32, collect=False), fleet="", start="")
    about = About(IMU, place.method, place.seed, (BALANCED,), 7, found.method.unit_norm, plan)
    fleet_z, fleet_y = [z[rows] for rows in others], [y[rows] for rows in others]
    return _cell(about, z, y, [labelled], [tests], fleet_z, fleet_y)


def _cell(
    about: About,
    z: Array,
    y: Labels,
    train: Sequence[Indices],
    test: Sequence[Indices],
    fleet_z: Sequence[Array],
    fleet_y: Sequence[Array],
    weight: Array | None = None,
    bias: Array | None = None,
) -> Shared:
    sizes = np.array([[len(own), len(rest)] for own, rest in zip(train, test, strict=True)])
    nothing = [z[:0]] * len(train), [y[:0]] * len(train)
    whole = training.cell(about, *nothing, *nothing, fleet_z, fleet_y, weight, bias)
    parts = {field.name: getattr(whole, field.name) for field in fields(Cell)} | {"z": z, "y": y}
    return Shared(**parts, own=np.concatenate(train), rest=np.concatenate(test), sizes=sizes)


_MAKERS = {PACS: _pacs, CIFAR: _cifar, IMU: _imu}
