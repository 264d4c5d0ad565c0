"""Hours of a recipe's whole comparison, from measured costs of its network and methods; without its dataset, and without torch.

The round loop trains the cohort's samples, and every `evaluate_every` rounds all clients are evaluated. What else a cell does, such as the
final personalisation, is a small part of the papers' comparisons and left out. `edge-fl compare` measures instead, before its first cell.
"""

from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_fl.config import Option
from edge_fl.data.partition import DataConfig
from edge_fl_server.recipes.recipe import Recipe

COSTS = Path(__file__).parent / "costs.json"
"""Written by `python -m tools.bench.costs`."""

REFERENCES = ("local", "fedavg", "fedavg+ft")
"""Methods of every comparison that does not leave them out: for sharing, and for personalisation."""

DATASETS: dict[str, tuple[int, tuple[int, int, int]]] = {
    "digits": (1_797, (1, 8, 8)),
    "mnist": (70_000, (1, 28, 28)),
    "fashion-mnist": (70_000, (1, 28, 28)),
    "emnist": (131_600, (1, 28, 28)),
    "cifar10": (60_000, (3, 32, 32)),
    "cifar100": (60_000, (3, 32, 32)),
    "cinic10": (270_000, (3, 32, 32)),
    "pacs": (9_991, (3, 224, 224)),
    "office-home": (15_588, (3, 224, 224)),
    "officecaltech10": (2_533, (3, 64, 64)),
}
"""Training and test samples together, and their shape. Ten classes of DomainNet have no usual size."""


class NetworkCost(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one core for a sample in FedAvg: to train it once, and to evaluate it."""

    model: str
    shape: tuple[int, int, int]
    batch_size: int
    train: float
    evaluate: float


class MethodCost(Struct, frozen=True, forbid_unknown_fields=True):
    """Costs of a method, those of FedAvg being 1: an epoch, an epoch of the head (`head_epochs`), an evaluation."""

    train: float
    evaluate: float
    head: float = 0.0
    head_epochs: int = 0


class Costs(Struct, frozen=True, forbid_unknown_fields=True):
    """Costs on a core of `machine`."""

    machine: str
    networks: list[NetworkCost]
    methods: dict[str, MethodCost]


@cache
def costs() -> Costs:
    """The measured costs."""
    return msgspec.json.decode(COSTS.read_bytes(), type=Costs)


def of_comparison(recipe: Recipe) -> float | None:
    """Hours on one core of `edge-fl compare --recipe`; None if the size of its dataset or the cost of its network is not known."""
    labels = [*REFERENCES, *(recipe.compare.methods or [recipe.method.name])]
    trained = dict.fromkeys(label.removesuffix("+ft") for label in labels)  # NAME+ft has the rounds of NAME
    seconds = [of_cell(recipe, label.partition(":")[0]) for label in trained]
    known = [each for each in seconds if each is not None]
    return recipe.compare.seeds * sum(known) / 3600 if len(known) == len(seconds) else None


def of_cell(recipe: Recipe, method: str) -> float | None:
    """Seconds on one core of one method with one seed, as `of_comparison`."""
    of_method = costs().methods.get(method.removesuffix("+ft"))
    samples, shape = DATASETS.get(recipe.data.dataset, (0, ()))
    network = (recipe.model.name, shape, recipe.method.batch_size)
    of_network = next(
        (each for each in costs().networks if (each.model, each.shape, each.batch_size) == network), None
    )
    if not (of_method and of_network and samples and recipe.source == "simulated") or recipe.data.split:
        return None
    trained, tested = _samples(recipe.data, samples)
    share = recipe.cohort.mean_participation
    epochs, head_epochs = _epochs(recipe, method, of_method.head_epochs)
    passes = of_method.train * epochs + of_method.head * head_epochs
    train = of_network.train * passes * trained * share
    every = recipe.evaluate_every
    # the cohort evaluates its updates, then all clients the new model
    evaluate = of_network.evaluate * of_method.evaluate * tested * (1 + share) / every if every else 0.0
    return recipe.rounds * (train + evaluate)


def _samples(data: DataConfig, samples: int) -> tuple[float, float]:
    """Training and test samples of the clients that train."""
    in_all = samples * data.fraction * (1 - data.unseen / data.clients)
    tested = in_all * data.test_fraction
    trained = (in_all - tested) * (1 - data.validation_fraction)
    most = data.max_train * (data.clients - data.unseen)
    return min(trained, most) if most else trained, tested


def _epochs(recipe: Recipe, method: str, head_epochs: int) -> tuple[int, int]:
    """Epochs of a method in this recipe's comparison, and those of its head alone."""
    epochs = recipe.method.epochs
    options: dict[str, Option] = dict(recipe.method.options) if method == recipe.method.name else {}
    if change := recipe.methods.get(method):
        epochs = epochs if change.epochs is None else change.epochs
        options |= change.options
    given = options.get("head_epochs", head_epochs)
    return epochs, given if head_epochs and isinstance(given, int) else head_epochs
