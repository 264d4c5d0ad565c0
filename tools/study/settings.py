"""What the study runs: datasets, partitions, sizes of federation, and methods.

Every federation has `clients` that train, with about `samples` training images each, and a third as many head-only clients that never
train: their heads are fitted on the exported extractor as a head-only device does it.
"""

from dataclasses import dataclass
from pathlib import Path

from edge_fl.config import MethodConfig, ModelConfig, OptimiserConfig
from edge_fl.data.partition import DataConfig
from edge_fl_lab.compare import grid
from edge_fl_lab.compare.grid import Cell
from edge_fl_lab.compare.tuning import Grid
from edge_fl_lab.recipe_changes import with_method
from edge_fl_server.recipes.recipe import Recipe, with_settings
from tools.study.images import KEPT

IMAGES = {"digits": 1797, "mnist": KEPT, "fashion-mnist": KEPT, "cifar10": KEPT, "pacs": 9_991}
"""Images by dataset, from the easiest to the hardest (`tools.study.images`)."""

MIXED, MILD, STRONG, DOMAIN = "dirichlet:0.1", "dirichlet-clients:0.5", "pathological:2", "domain"
PARTITIONS = {name: (MIXED, MILD, DOMAIN if name == "pacs" else STRONG) for name in IMAGES}
SIZES = ((6, 100), (12, 50), (30, 20))
"""(clients that train, their mean number of training images)."""

TUNED_ON = {"mnist": "fashion-mnist", "pacs": "cifar10"}
"""Datasets that use the values chosen on another one with images of the same size."""

SEEDS = (0, 1, 2)
TUNING_SEED = 100
TRIALS = 3
ROUNDS, EPOCHS, BATCH = 8, 2, 25
TEST = {"digits": 0.25}
TEST_FRACTION, VALIDATION_FRACTION = 0.6, 0.15

REFERENCES = ("local", "fedavg", "fedavg+ft")
PAPERS = ("fedcrc", "fedcrl", "fedrir", "dualfed", "repper")
OTHERS = ("fedrep", "fedper", "fedproto", "ditto", "fedpac", "lp-ft", "fed-rod")
GRIDS: dict[str, Grid] = {"fedcrc": {"tau": ()}}
"""Instead of the methods' own: FedCRC keeps its tau, because the study compares two of them."""

METHODS = (*REFERENCES, *PAPERS, *OTHERS)
VARIANTS = ("fedcrc:tau=0.5",)
"""For a claim of a paper; not recommended."""


@dataclass(frozen=True)
class Setting:
    """One kind of federation."""

    dataset: str
    partition: str
    clients: int
    samples: int

    @property
    def head_only(self) -> int:
        """Number of clients that never train."""
        return max(3, self.clients // 3)

    def recipe(self, data_dir: Path, seed: int) -> Recipe:
        """The recipe of a federation, for FedAvg."""
        test = TEST.get(self.dataset, TEST_FRACTION)
        per_client = self.samples / ((1 - test) * (1 - VALIDATION_FRACTION))
        everyone = self.clients + self.head_only
        data = DataConfig(
            dataset=self.dataset,
            data_dir=str(data_dir),
            clients=everyone,
            test_fraction=test,
            validation_fraction=VALIDATION_FRACTION,
            fraction=min(1.0, round(everyone * per_client / IMAGES[self.dataset], 4)),
            unseen=self.head_only,
        )
        method = MethodConfig("fedavg", EPOCHS, BATCH, OptimiserConfig("sgd", 0.1))
        base = Recipe(
            "study",
            seed=seed,
            rounds=ROUNDS,
            engine="sequential",
            evaluate_every=0,
            data=data,
            model=ModelConfig("cnn-tiny", {"width": 8}),
            method=method,
        )
        return with_settings(base, grid.parse_partition(self.partition))


def settings(datasets: tuple[str, ...] = tuple(IMAGES)) -> list[Setting]:
    """Each dataset with its three partitions, each partition with another size: a Latin square over the datasets."""
    return [
        Setting(name, partition, *SIZES[(row + column) % len(SIZES)])
        for row, name in enumerate(IMAGES)
        if name in datasets
        for column, partition in enumerate(PARTITIONS[name])
    ]


def cell(setting: Setting, data_dir: Path, seed: int, label: str) -> Cell:
    """One run with the usual settings of a method; `label` is its name, with options after ":"."""
    name, options = grid.parse_method(label)
    return Cell(label, with_method(setting.recipe(data_dir, seed), name, options))
