"""Make the cells of `tools.study.day_zero`: draw federations, train their extractors with the product's round loop, compute features.

Four full devices train; twenty head-only devices do not. Each has its own class shares, Dirichlet 0.5. Head-only devices draw from all
images that no full device trains on, each without the others, so that two may have the same image: digits has too few for disjoint devices.
"""

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from edge_fl.data import datasets
from edge_fl.data.partition import Split
from edge_fl.data.samples import Array, Dataset, Indices, Labels
from edge_fl.heads import HeadPlan
from edge_fl.methods import PRETRAINED
from edge_fl.methods.contract.tiers import head_plan
from edge_fl.seeds import generator
from edge_fl_lab.newcomers import features
from edge_fl_lab.research import run
from edge_fl_lab.trained import TrainedRun
from edge_fl_server.training.engines.processes import threads
from tools.study import day_zero_cells, predictions
from tools.study.day_zero_cells import About, Cell

METHODS = ("fedavg", "fedrep", "fedcrc", "repper")
PACS, PARTS = "pacs", "pacs, parts"
"""Rows of the table: a whole domain is a device, or a fifth of one with its own class shares."""
FULL, DEVICES, IN_PARTS, BETA = 4, 20, 5, 0.5
PICTURES = 1500
"""Of each domain of PACS, at random."""


@dataclass(frozen=True)
class Sizes:
    """Training images of a full device, labels and test images of a head-only device; rounds and epochs of the training."""

    full: int
    labels: int
    test: int
    rounds: int = 12
    epochs: int = 2


SIZES = {
    "digits": Sizes(150, 100, 140, epochs=5),
    "fashion-mnist": Sizes(600, 200, 300),
    "cifar10": Sizes(1000, 200, 300),
    PACS: Sizes(0, 150, 200, rounds=0, epochs=0),
}
NETWORK = {"name": "cnn-tiny", "options": {"width": 32}}
OPTIMISER = {"name": "adam", "lr": 0.002}
BATCH = 32


@dataclass(frozen=True)
class Place:
    """A cell that may be made, and the file where it is kept. `domain` is the devices' domain of PACS."""

    dataset: str
    method: str
    seed: int
    domain: str = ""

    def path(self, out: Path) -> Path:
        """Its file."""
        parts = (self.dataset, self.method, self.domain, str(self.seed))
        return out / f"{'-'.join(filter(None, parts))}.npz"

    @property
    def settings(self) -> str:
        """What the cell depends on, besides the data and the code."""
        more = (PICTURES,) if self.domain else (FULL, NETWORK, OPTIMISER, BATCH)
        return repr((SIZES[self.dataset], DEVICES, IN_PARTS, BETA, *more))


def places(names: Sequence[str], methods: Sequence[str], seeds: int) -> Iterator[Place]:
    """The cells of these data sets and methods, in the order in which they are made."""
    for name in names:
        for method in (PRETRAINED,) if name == PACS else METHODS:
            if method in methods:
                for seed in range(seeds):
                    domains = predictions.DOMAINS if name == PACS else ("",)
                    yield from (Place(name, method, seed, domain) for domain in domains)


def made(place: Place, data: Path, out: Path, until: float = float("inf")) -> Cell | None:
    """The stored cell, or make it; None when the time is over."""
    path = place.path(out)
    if path.is_file():
        cell = day_zero_cells.read(path)
        if cell.about.settings == place.settings:
            return cell
    if time.monotonic() > until:
        return None
    with threads(1), threadpool_limits(1):
        cell = frozen(place, data, out) if place.domain else trained(place, data)
    day_zero_cells.write(path, cell)
    return cell


def trained(place: Place, data: Path) -> Cell:
    """Train the full devices' extractor in this process, and compute everyone's features."""
    dataset, sizes = datasets.load(place.dataset, data), SIZES[place.dataset]
    y, classes = dataset.samples.y, len(dataset.classes)
    rng = generator(place.seed, "day_zero", client="full")
    left, full = np.arange(len(y)), []
    for _ in range(FULL):
        full.append(drawn(y, left, shares(classes, rng), sizes.full, rng))
        left = np.setdiff1d(left, full[-1])
    devices = [_device(y, left, classes, sizes, place.seed, f"{device}") for device in range(DEVICES)]
    found = run_of(place, dataset, data, full, left[:FULL])
    head = next((name for name in ("head", "global_head") if name in found.shared), "")

    def z(rows: Indices) -> Array:
        return features(found.method, found.shared, dataset.samples.take(rows), "cpu").numpy()

    about = About(
        place.dataset,
        place.method,
        place.seed,
        (place.dataset,) * DEVICES,
        classes,
        found.method.unit_norm,
        head_plan(found.method, BATCH, collect=False),
        head,
        place.settings,
    )
    weight, bias = (
        found.shared[head][key].numpy() if head else np.empty(0, "f4") for key in ("weight", "bias")
    )
    train, test = ([each[part] for each in devices] for part in (0, 1))
    return cell(about, [z(r) for r in train], [y[r] for r in train], [z(r) for r in test], [y[r] for r in test],
                 [z(r) for r in full], [y[r] for r in full], weight, bias)  # fmt: skip


def frozen(place: Place, data: Path, out: Path) -> Cell:
    """The devices of one domain of PACS on the frozen backbone; the other domains are the full devices."""
    every = {
        name: predictions.features(name, data, out / "features", PICTURES) for name in predictions.DOMAINS
    }
    own = every[place.domain]
    others = [found for name, found in every.items() if name != place.domain]
    classes = 1 + max(int(found.y.max()) for found in every.values())
    sizes, seed, everything = SIZES[PACS], place.seed, np.arange(len(own.y))
    whole = generator(seed, "day_zero", client=place.domain).permutation(everything)
    devices = [_cut(whole[: sizes.labels + sizes.test], sizes)]
    devices += [
        _device(own.y, everything, classes, sizes, seed, f"{place.domain} {part}") for part in range(IN_PARTS)
    ]
    rows = (PACS, *(PARTS,) * IN_PARTS)
    about = About(PACS, place.method, seed, rows, classes, False, HeadPlan("cosine"), settings=place.settings)
    train, test = ([each[part] for each in devices] for part in (0, 1))
    return cell(about, [own.z[r] for r in train], [own.y[r] for r in train], [own.z[r] for r in test],
                 [own.y[r] for r in test], [o.z for o in others], [o.y for o in others])  # fmt: skip


def shares(classes: int, rng: np.random.Generator) -> Array:
    """A device's class shares."""
    return rng.dirichlet([BETA] * classes)


def drawn(y: Labels, pool: Indices, shares: Array, count: int, rng: np.random.Generator) -> Indices:
    """Rows of `pool`, without repetition and in random order; of a class that is used up, fewer."""
    counts = rng.multinomial(count, shares)
    of_class = [rng.permutation(pool[y[pool] == label])[:number] for label, number in enumerate(counts)]
    return rng.permutation(np.concatenate(of_class))


def _device(
    y: Labels, pool: Indices, classes: int, sizes: Sizes, seed: int, client: str
) -> tuple[Indices, Indices]:
    """A head-only device's rows with labels, and its rows for testing."""
    rng = generator(seed, "day_zero", client=client)
    return _cut(drawn(y, pool, shares(classes, rng), sizes.labels + sizes.test, rng), sizes)


def _cut(rows: Indices, sizes: Sizes) -> tuple[Indices, Indices]:
    """Both have the same class shares; at least a third is for testing."""
    labels = min(sizes.labels, 2 * len(rows) // 3)
    return rows[:labels], rows[labels:]


def run_of(place: Place, dataset: Dataset, data: Path, full: Sequence[Indices], tests: Indices) -> TrainedRun:
    """Train with all full devices in every round. The run tests one image of each, which is not used."""
    sizes, none = SIZES[place.dataset], (np.empty(0, np.int64),) * FULL
    names = tuple(f"full{number}" for number in range(FULL))
    tested = tuple(tests[number : number + 1] for number in range(FULL))
    split = Split(len(dataset.samples), names, tuple(np.sort(rows) for rows in full), none, tested)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class that no full device drew
        return run(
            place.method,
            place.dataset,
            clients=split,
            rounds=sizes.rounds,
            seed=place.seed,
            engine="sequential",
            settings={
                "model": NETWORK,
                "method.epochs": sizes.epochs,
                "method.batch_size": BATCH,
                "method.optimiser": OPTIMISER,
                "data.data_dir": str(data),
                "evaluate_every": 0,
                "device": "cpu",
            },
        ).trained


def cell(
    about: About,
    z: Sequence[Array],
    y: Sequence[Array],
    test_z: Sequence[Array],
    test_y: Sequence[Array],
    fleet_z: Sequence[Array],
    fleet_y: Sequence[Array],
    weight: Array | None = None,
    bias: Array | None = None,
) -> Cell:
    """A cell of devices: lists have an array for each, first of its labels, then of its tests; `fleet` of each full device."""
    empty = np.empty(0, np.float32)
    sizes, tests = [len(each) for each in y], [len(each) for each in test_y]
    numbers = np.arange(len(y))
    return Cell(
        about,
        np.concatenate([*z, *test_z]).astype(np.float32),
        np.concatenate([*y, *test_y]).astype(np.int64),
        np.concatenate([np.repeat(numbers, sizes), np.repeat(numbers, tests)]),
        np.repeat([False, True], [sum(sizes), sum(tests)]),
        np.concatenate(fleet_z).astype(np.float32),
        np.concatenate(fleet_y).astype(np.int64),
        np.repeat(np.arange(len(fleet_y)), [len(each) for each in fleet_y]),
        np.stack([np.bincount(each, minlength=about.classes) for each in fleet_y]),
        empty if weight is None else weight,
        empty if bias is None else bias,
    )
