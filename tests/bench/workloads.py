"""The workloads that are measured: federations of made-up images, so that nothing has to be downloaded, in the sizes that papers use.

An image is a pattern of its class under noise: easy enough to be learnt in a few rounds, hard enough that accuracy says something.
"""

from __future__ import annotations

import numpy as np

from edge_fl.config import DataConfig, InputSpec, MethodConfig, ModelConfig, OptimiserConfig, Recipe
from edge_fl.data import partition
from edge_fl.data.samples import Dataset, Samples
from server.training.study import Study

CLASSES = 10
LR = 0.005  # as PFLlib has it; ten times as much lets rounding errors grow beyond what equality allows
BLOCK = 1024  # images made at a time, so that making them needs little memory


def images(samples: int, input: InputSpec, noise: float = 60.0, seed: int = 0) -> Dataset:
    """`samples` images of ten classes, each a fixed smooth pattern under noise."""
    rng = np.random.default_rng(seed)
    coarse = rng.uniform(60, 190, (CLASSES, input.channels, 4, 4)).astype(np.float32)
    rows, columns = np.arange(input.height) * 4 // input.height, np.arange(input.width) * 4 // input.width
    patterns = coarse[:, :, rows][:, :, :, columns]
    y = rng.integers(0, CLASSES, samples)
    x = np.empty((samples, *input.shape), np.uint8)
    for start in range(0, samples, BLOCK):
        part = slice(start, start + BLOCK)
        around = noise * rng.standard_normal(x[part].shape, np.float32)
        x[part] = np.clip(patterns[y[part]] + around, 0, 255)
    return Dataset("made-up", Samples(x, y.astype(np.int64)), tuple(str(label) for label in range(CLASSES)))


def study(
    model: ModelConfig,
    input: InputSpec,
    *,
    clients: int,
    samples: int,
    batch_size: int = 10,
    method: str = "fedavg",
    options: dict[str, bool | int | float | str] | None = None,
    iid: bool = False,
    beta: float = 0.1,
    precision: str = "fp32",
    epochs: int = 1,
) -> Study:
    """A federation with about `samples` training images; a quarter as many are for tests."""
    data = DataConfig(
        clients=clients,
        partition="iid" if iid else "dirichlet",
        beta=beta,
        test_fraction=0.2,
        validation_fraction=0.0,
    )
    config = MethodConfig(method, epochs, batch_size, OptimiserConfig("sgd", LR), dict(options or {}))
    recipe = Recipe(name="bench", rounds=1, model=model, method=config, data=data, precision=precision)  # type: ignore[arg-type]
    dataset = images(round(samples / 0.8), input)
    return Study(recipe, dataset, partition.split_clients(dataset, data, 0))


def work_a(
    method: str = "fedavg",
    *,
    clients: int = 20,
    samples: int = 4492,
    precision: str = "fp32",
    epochs: int = 1,
    model: str = "cnn2",
    **options: bool | int | float | str,
) -> Study:
    """Work A of the performance notes: 20 ragged clients, 4,492 images 3x32x32, two convolutions (878,538 parameters), batch 10."""
    return study(
        ModelConfig(model),
        InputSpec(3, 32, 32),
        clients=clients,
        samples=samples,
        method=method,
        options=options,
        precision=precision,
        epochs=epochs,
    )


def heads(
    hidden: int = 0,
    *,
    clients: int = 100,
    samples: int = 7300,
    method: str = "fedavg",
    epochs: int = 1,
    **options: bool | int | float | str,
) -> Study:
    """Many tiny networks on 28x28 pixels: linear ones, or with one hidden layer."""
    return study(
        ModelConfig("tests.bench.networks:Pixels", {"hidden": hidden}),
        InputSpec(1, 28, 28),
        clients=clients,
        samples=samples,
        beta=1.0,
        method=method,
        options=options,
        epochs=epochs,
    )


def many(clients: int, method: str = "fedavg") -> Study:
    """Work A's network on so many clients with six images each."""
    return study(
        ModelConfig("cnn2"),
        InputSpec(3, 32, 32),
        clients=clients,
        samples=6 * clients,
        method=method,
        iid=True,
    )
