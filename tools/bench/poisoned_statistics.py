"""What devices that lie about their class statistics cost the others, before and after the protections of docs/class-statistics.md.

python -m tools.bench.poisoned_statistics              a table in Markdown: digits, 20 devices, features of a CNN that is not trained

An attacker of 20 devices lies about class 8, or about all classes. Before: the sum is checked against its own counts alone, and every
class of the prior is used. After: bounds, the comparison of plain vectors, and each device's choice by class. The accuracy is that of the
heads that the honest devices serve, on 50 unseen pictures of each class; without a prior these are cosine heads of the own labels.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from edge_fl import heads
from edge_fl.config import ModelConfig
from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl.data import datasets
from edge_fl.errors import StatisticsError
from edge_fl.heads import HeadPlan
from edge_fl.heads.class_statistics import bounds, prior, sums
from edge_fl.heads.class_statistics.bounds import Senders
from edge_fl.heads.class_statistics.prior import PRIOR
from edge_fl.heads.class_statistics.sums import MOST_PER_CLASS, Statistics
from edge_fl.inputs import InputSpec
from edge_fl.models import build_net

DEVICES, CLASSES, UNSEEN, ATTACKED = 20, 10, 50, 8
CLAIMED = 5000


@dataclass(frozen=True)
class Device:
    """Features and labels for fitting."""

    z: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Attack:
    """`attackers` devices send `count` pictures of the class ATTACKED, or of all, `towards` the "opposite" or the "next" class."""

    name: str
    count: int
    towards: str
    every: bool = False
    attackers: int = 1
    masked: bool = True


SHARE = (
    MOST_PER_CLASS * DEVICES - 3 * DEVICES
)  # within the bound of the sum, with what the others leave of it
ATTACKS = (
    Attack("counts of 5,000, opposite direction, masked", CLAIMED, "opposite"),
    Attack("counts of 5,000, opposite direction, plain", CLAIMED, "opposite", masked=False),
    Attack("all that the bound of a masked sum leaves, opposite direction", SHARE, "opposite"),
    Attack("the same, direction of class 9", SHARE, "next"),
    Attack("32 pictures, opposite direction, plain", MOST_PER_CLASS, "opposite", masked=False),
    Attack("32 pictures, direction of class 9, plain", MOST_PER_CLASS, "next", masked=False),
    Attack("the same from 2 devices", MOST_PER_CLASS, "next", attackers=2, masked=False),
    Attack("all classes permuted, 32 pictures, 2 devices, plain", MOST_PER_CLASS, "next", True, 2, False),
    Attack("all classes permuted, all that a masked sum leaves", SHARE, "next", True),
)


@dataclass(frozen=True)
class Measured:
    """Mean accuracy of the honest devices in per cent: over all classes, and of the class ATTACKED."""

    every: float
    attacked: float

    def __str__(self) -> str:
        return f"{self.every:.1f} / {self.attacked:.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tools.bench.poisoned_statistics", None, __doc__, formatter_class=formatter
    )
    parser.add_argument("--data", type=Path, default=Path(".data"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--labels", default="1,3", help="labels per class and device [1,3]")
    options = parser.parse_args(arguments)
    z, y = features(options.data)
    labels = [int(number) for number in options.labels.split(",")]
    sys.stdout.write(tables.markdown(table(z, y, labels, range(options.seeds))) + "\n")


def features(data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of the digits."""
    samples = datasets.load("digits", data).samples
    torch.manual_seed(0)
    extractor = build_net(ModelConfig(), InputSpec(samples.x.shape[1:]), CLASSES).extractor
    with torch.inference_mode():
        x = torch.from_numpy(np.asarray(samples.x, np.float32) / 255)
        return extractor.frozen(extractor.init(), x).numpy(), np.asarray(samples.y)


def table(z: np.ndarray, y: np.ndarray, labels: Sequence[int], seeds: Sequence[int]) -> Table:
    """One row for each attack and number of labels: means over the seeds."""
    rows = []
    for count in labels:
        fleets = [split(z, y, count, seed) for seed in seeds]
        none = mean([accuracy(devices, range(DEVICES), unseen, None) for devices, unseen in fleets])
        honest = mean([measured(devices, unseen, None, True)[0] for devices, unseen in fleets])
        rows.append(
            [
                str(count),
                "none",
                str(mean([measured(d, u, None, False)[0] for d, u in fleets])),
                str(honest),
                "",
                str(none),
            ]
        )
        for attack in ATTACKS:
            before = mean([measured(devices, unseen, attack, False)[0] for devices, unseen in fleets])
            after = [measured(devices, unseen, attack, True) for devices, unseen in fleets]
            rows.append(
                [
                    str(count),
                    attack.name,
                    str(before),
                    str(mean([found for found, _ in after])),
                    after[0][1],
                    str(none),
                ]
            )
    headings = ["labels", "attack", "before", "after", "what stops it", "without a prior"]
    title = f"Accuracy, % / of class {ATTACKED}, %: honest devices of {DEVICES}, {len(seeds)} seeds"
    return Table(headings, rows, title)


def split(z: np.ndarray, y: np.ndarray, labels: int, seed: int) -> tuple[list[Device], Device]:
    """Devices with so many labels of each class, and unseen pictures."""
    order = np.random.default_rng(seed).permutation(len(y))
    by_class = [order[y[order] == label] for label in range(CLASSES)]
    unseen = np.concatenate([rows[:UNSEEN] for rows in by_class])
    places = [UNSEEN + labels * place for place in range(DEVICES)]
    rows = [np.concatenate([rows[at : at + labels] for rows in by_class]) for at in places]
    return [Device(z[some], y[some]) for some in rows], Device(z[unseen], y[unseen])


def measured(
    devices: Sequence[Device], unseen: Device, attack: Attack | None, after: bool
) -> tuple[Measured, str]:
    """The accuracy under an attack with or without the protections, and which of them stops it."""
    each = [sums.of(one.z, one.y, CLASSES) for one in devices]
    attackers = attack.attackers if attack else 0
    if attack:
        total = _sum(each)
        each[:attackers] = [poisoned(total, one, attack) for one in each[:attackers]]
    used: dict[int, Statistics] | None = dict(enumerate(each))
    stopped = "each device's choice by class" if attack else ""
    if after:
        used, by = protected(each, masked=attack is not None and attack.masked)
        stopped = by or stopped
    honest = range(attackers, len(devices))
    if after:
        return accuracy(devices, honest, unseen, used), stopped
    with mock.patch.object(prior, "trusted_classes", _all_known):
        return accuracy(devices, honest, unseen, used), stopped


def protected(each: Sequence[Statistics], *, masked: bool) -> tuple[dict[int, Statistics] | None, str]:
    """What the server uses of each device's statistics, None for no sum, and which check left something out."""
    dim = each[0].shape.width
    if masked:
        try:
            bounds.require_possible(_sum(each), Senders(len(each)), dim)
        except StatisticsError:
            return None, "bounds: no sum, the earlier prior stays"
        return dict(enumerate(each)), ""
    possible = {place: one for place, one in enumerate(each) if _possible(one, dim)}
    far = bounds.far_classes(list(possible.values()))
    used = {place: one.left_out(some) for (place, one), some in zip(possible.items(), far, strict=True)}
    if len(possible) < len(each):
        return used, "bounds: the device is rejected by name"
    return used, "comparison by class" if len(far[0]) else ""


def poisoned(total: Statistics, own: Statistics, attack: Attack) -> Statistics:
    """An attacker's statistics: those of `count` equal features of length 1 instead of the pictures of a class."""
    found = own
    for label in range(CLASSES) if attack.every else [ATTACKED]:
        mean = -total.sums[label] if attack.towards == "opposite" else total.sums[(label + 1) % CLASSES]
        u, one = mean / np.linalg.norm(mean), np.eye(CLASSES)[label]
        found = found.left_out(np.array([label]))
        q = sums.project(u[None], len(found.moment))
        # a little shorter than the counts, for what is left of the own pictures
        length = attack.count - own.counts[label]
        found = Statistics(
            found.counts + attack.count * one,
            found.sums + length * one[:, None] * u,
            found.moment + length * q.T @ q,
            own.centre * (found.counts.sum() + attack.count) / max(own.counts.sum(), 1),
        )
    return found


def accuracy(
    devices: Sequence[Device], honest: Sequence[int], unseen: Device, used: dict[int, Statistics] | None
) -> Measured:
    """The accuracy of the honest devices' heads with a prior of the others; without one where `used` is None."""
    total = _sum(list(used.values())) if used is not None else None
    right = []
    for place in honest:
        one, extras = devices[place], {}
        if total is not None and used is not None:
            extras = {PRIOR: (total.without(used[place]) if place in used else total).arrays()}
        plan = HeadPlan("cosine", fleet=PRIOR if extras else "")
        head = heads.fit("cosine", one.z, one.y, CLASSES, unit_norm=False, plan=plan, extras=extras)
        right.append(head.predict(unseen.z) == unseen.y)
    found = 100 * np.mean(right, axis=0)
    return Measured(float(found.mean()), float(found[unseen.y == ATTACKED].mean()))


def mean(found: Sequence[Measured]) -> Measured:
    return Measured(
        *(
            float(np.mean(values))
            for values in zip(*((one.every, one.attacked) for one in found), strict=True)
        )
    )


def _sum(each: Sequence[Statistics]) -> Statistics:
    return sums.from_flat(np.sum([one.flat for one in each], axis=0), each[0].shape)


def _possible(one: Statistics, dim: int) -> bool:
    try:
        bounds.require_possible(one, Senders(1), dim)
    except StatisticsError:
        return False
    return True


def _all_known(
    statistics: Statistics, classes: np.ndarray, own: np.ndarray, pictures: np.ndarray
) -> np.ndarray:
    """Instead of `prior.trusted_classes`: every class that the prior knows."""
    return np.asarray(statistics.counts[classes] > prior.LEAST_COUNT)


if __name__ == "__main__":
    main()
