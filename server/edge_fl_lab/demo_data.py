"""The demo's images: who has which, what a device reaches alone with them, and the figures at the end.

Head-only devices have OWN_LABELS labelled images each, full devices six times as many images; the classes of each device are uneven.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_fl import heads, metrics, modalities
from edge_fl.console import units
from edge_fl.console.tables import Column, Columns
from edge_fl.data.partition import Split, dirichlet_clients
from edge_fl.data.samples import ClientData, Dataset, Indices, Samples
from edge_fl.errors import ConfigError, RunError
from edge_fl.fleet import simulated
from edge_fl.seeds import generator
from edge_fl_server.runs.summaries import Paired, paired

OWN_LABELS = 10
"""Labelled images of a head-only device, in all."""
MOST_IMAGES = 37
"""Images of a head-only device; those without a label are its test set."""
LEAST_IMAGES = OWN_LABELS + 5
FULL_SHARES = 6
"""Images of a full device, as a multiple of those of a head-only one."""
BETA = 0.2
"""Concentration of the Dirichlet distribution from which the classes of a device are drawn."""
TEST, VALIDATION = 0.25, 0.1
"""Shares of a full device's images, the second of those that are left."""
ALONE = "logistic"

COLUMNS: Columns = {
    "model": "personal test accuracy of head-only devices",
    "n": "n",
    "mean": Column("mean", units.percent),
    "bottom_decile": Column("bottom decile", units.percent),
}
MODELS = {
    metrics.FLEET: "without own labels: the fleet's head",
    metrics.PERSONAL_AFTER: f"with {OWN_LABELS} own labels: the personal head",
    metrics.LOCAL_ONLY: f"alone: the same {OWN_LABELS} labels, no fleet",
}


@dataclass(frozen=True)
class DemoFigures:
    """Accuracies (0..1) of `n` head-only devices by metric, and the gain of the personal head over training alone."""

    rows: list[dict[str, object]]
    gain: Paired
    images: float

    def sentence(self) -> str:
        """What the devices gain, with interval and n."""
        means = {row["model"]: units.percent(float(str(row["mean"]))) for row in self.rows}
        without, labelled, alone = (means[name] for name in MODELS.values())
        n = f"n = {units.counted(self.gain.n, 'device')} with {self.images:.0f} test images each"
        mean, low, high = units.difference(self.gain.mean, self.gain.low, self.gain.high)
        interval = f"95 % CI {low} to {high}, paired, {n}" if self.gain.n > 1 else f"{n}, so no interval"
        return (
            f"Without own labels {without}, with {OWN_LABELS} labels {labelled}, alone {alone}:"
            f" the fleet gains a device {mean} points ({interval})."
        )


def divide(dataset: Dataset, devices: int, full: int, seed: int) -> Split:
    """Divide images over simulated devices, of which `full` train. Raises ConfigError if there are too few."""
    names, training = simulated.names(devices), simulated.full_devices(devices, full, seed)
    shares, samples = devices - full + FULL_SHARES * full, len(dataset.samples)
    size = min(MOST_IMAGES, samples // shares)
    if size < LEAST_IMAGES:
        raise ConfigError(
            f"{dataset.name}: {samples:,} images for {full} full and {devices - full} head-only devices,"
            f" expected {LEAST_IMAGES * shares:,} or more"
        )
    kept = generator(seed, "demo.images").permutation(samples)[: size * shares]
    parts = iter(kept[rows] for rows in dirichlet_clients(dataset.samples.y[kept], shares, BETA, seed))
    sets = []
    for number, name in enumerate(names):
        owned = np.concatenate([next(parts) for _ in range(FULL_SHARES if number in training else 1)])
        owned = generator(seed, "demo.sets", client=name).permutation(owned)
        sets.append(_of_full(owned) if number in training else _of_head(owned))
    train, validation, test = zip(*sets, strict=True)
    return Split(samples, tuple(names), train, validation, test)


def _of_full(owned: Indices) -> tuple[Indices, Indices, Indices]:
    tests = round(TEST * len(owned))
    ends = [tests, tests + round(VALIDATION * (len(owned) - tests))]
    test, validation, train = np.split(owned, ends)
    return np.sort(train), np.sort(validation), np.sort(test)


def _of_head(owned: Indices) -> tuple[Indices, Indices, Indices]:
    return np.sort(owned[:OWN_LABELS]), owned[:0], np.sort(owned[OWN_LABELS:])


def alone(data: Mapping[str, ClientData], classes: int) -> dict[str, float]:
    """Test accuracy of each device's logistic regression on the pixels (0..1) of its own labelled images."""
    found = {}
    for name, of_device in data.items():
        train, test = of_device.train, of_device.test
        head = heads.fit(ALONE, _flat(train), train.y, classes, unit_norm=False)
        found[name] = metrics.accuracy(head.predict(_flat(test)), test.y)
    return found


def figures(final: Mapping[str, Mapping[str, float]], head_only: list[str]) -> DemoFigures:
    """The table and the gain, over the head-only devices that measured all three models. Raises RunError if none did."""
    measured = {name: final[name] for name in head_only if final.get(name, {}).keys() >= MODELS.keys()}
    gain = paired(
        *(
            {name: of[metric] for name, of in measured.items()}
            for metric in (metrics.LOCAL_ONLY, metrics.PERSONAL_AFTER)
        )
    )
    if gain is None:
        raise RunError("no head-only device measured its personal head, the fleet's head and training alone")
    rows: list[dict[str, object]] = []
    for metric, model in MODELS.items():
        found = metrics.summarise([of[metric] for of in measured.values()])
        rows.append(
            {"model": model, "n": found.clients, "mean": found.mean, "bottom_decile": found.bottom_decile}
        )
    images = [of[metrics.TEST_SAMPLES] for of in measured.values() if metrics.TEST_SAMPLES in of]
    return DemoFigures(rows, gain, float(np.mean(images)))


def write_images(path: Path, data: Samples) -> None:
    """Write images to an .npz that `edge-fl device predict` reads."""
    np.savez(path, x=data.x, y=data.y)


def _flat(samples: Samples):  # type: ignore[no-untyped-def]
    return modalities.scaled(samples.x).reshape(len(samples), -1)
