"""Workloads: federations of synthetic images in the sizes that papers use.

An image is its class's pattern with noise: easy enough to learn in a few rounds, hard enough for accuracies to differ.
"""

from collections.abc import Mapping

import msgspec
import numpy as np

from edge_fl.config import MethodConfig, ModelConfig, OptimiserConfig, Option
from edge_fl.data import partition
from edge_fl.data.partition import DataConfig
from edge_fl.data.samples import Dataset, Samples
from edge_fl.inputs import InputSpec
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.training.studies import Study

CLASSES = 10
LR = 0.005  # as in PFLlib; at ten times this rate rounding errors exceed the tolerance
BATCH_SIZE = 10
BLOCK = 1024  # images generated at a time, to bound memory


def images(samples: int, input: InputSpec, noise: float = 60.0, seed: int = 0) -> Dataset:
    """Generate `samples` images of ten classes, each a fixed smooth pattern with noise."""
    rng = np.random.default_rng(seed)
    coarse = rng.uniform(60, 190, (CLASSES, input.channels, 4, 4)).astype(np.float32)
    rows, columns = np.arange(input.height) * 4 // input.height, np.arange(input.width) * 4 // input.width
    patterns = coarse[:, :, rows][:, :, :, columns]
    y = rng.integers(0, CLASSES, samples)
    x = np.empty((samples, *input.shape), np.uint8)
    for start in range(0, samples, BLOCK):
        part = slice(start, start + BLOCK)
        noise_of_part = noise * rng.standard_normal(x[part].shape, np.float32)
        x[part] = np.clip(patterns[y[part]] + noise_of_part, 0, 255)
    return Dataset("synthetic", Samples(x, y.astype(np.int64)), tuple(str(label) for label in range(CLASSES)))


def study(
    model: ModelConfig,
    input: InputSpec,
    samples: int,
    data: DataConfig,
    method: MethodConfig,
    precision: str = "fp32",
) -> Study:
    """A federation with about `samples` training images, and a quarter as many test images."""
    data = msgspec.structs.replace(data, test_fraction=0.2, validation_fraction=0.0)
    recipe = Recipe(
        name="bench",
        rounds=1,
        evaluate_every=0,  # training only, as the plain loop
        model=model,
        method=method,
        data=data,
        precision=precision,  # type: ignore[arg-type]
    )
    dataset = images(round(samples / 0.8), input)
    return Study(recipe, dataset, partition.split_clients(dataset, data, 0))


def method_config(name: str, epochs: int = 1, options: Mapping[str, Option] = {}) -> MethodConfig:
    """A method with the workloads' batch size and optimiser."""
    return MethodConfig(name, epochs, BATCH_SIZE, OptimiserConfig("sgd", LR), dict(options))


def work_a(
    method: str = "fedavg",
    *,
    clients: int = 20,
    samples: int = 4492,
    precision: str = "fp32",
    epochs: int = 1,
    model: str = "cnn2",
    **options: Option,
) -> Study:
    """Work A of docs/performance.md: 20 clients of different sizes, 4,492 images 3x32x32, two convolutions (878,538 parameters)."""
    data = DataConfig(clients=clients, partition="dirichlet", beta=0.1)
    config = method_config(method, epochs, options)
    return study(ModelConfig(model), InputSpec((3, 32, 32)), samples, data, config, precision)


def heads(
    hidden: int = 0,
    *,
    clients: int = 100,
    samples: int = 7300,
    method: str = "fedavg",
    epochs: int = 1,
    **options: Option,
) -> Study:
    """Many tiny networks on 28x28 pixels: linear, or with one hidden layer."""
    model = ModelConfig("tools.bench.networks:Pixels", {"hidden": hidden})
    data = DataConfig(clients=clients, partition="dirichlet", beta=1.0)
    return study(model, InputSpec((1, 28, 28)), samples, data, method_config(method, epochs, options))


def many(clients: int, method: str = "fedavg", model: str = "cnn2") -> Study:
    """Work A's network, or another `model`, on `clients` clients with six images each."""
    data = DataConfig(clients=clients, partition="iid", beta=0.1)
    return study(ModelConfig(model), InputSpec((3, 32, 32)), 6 * clients, data, method_config(method))
