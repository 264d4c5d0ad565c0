"""What the prior from other devices' class statistics is worth, by labels per class of the device and of the others, on PACS.

python -m tools.study.class_statistics --data .data        the tables in docs/class-statistics.md

Every domain is one device. Its own best head, of several kinds, is compared with the served head: the fleet's head of the three other
devices' class statistics, adapted to its labels, on the same unseen pictures of its domain. The features are kept in --out.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge_fl import heads, metrics
from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl.heads import HeadPlan
from edge_fl.heads.class_statistics import sums
from edge_fl.heads.class_statistics.prior import PRIOR
from edge_fl.heads.head import Extras
from edge_fl.seeds import generator
from tools.study.predictions import DOMAINS, Pictures, features

TEST = 300
LABELS = (1, 5, 20)
OTHERS = ("same", "5", "20", "all")
"""Labels per class of the other devices; "all": all pictures that are not for testing."""
SERVED = "served"
"""The head with the prior."""
PLANS = {"cosine": HeadPlan("cosine"), "ridge": HeadPlan("ridge"), SERVED: HeadPlan("cosine", fleet=PRIOR)}
KINDS = ("cosine", "ridge", "logistic", "svm", "nearest")


class Cell(NamedTuple):
    """A column of the table: labels per class of the device and of the other devices."""

    labels: int
    others: str


@dataclass(frozen=True)
class Found:
    """Accuracies in per cent [seeds, domains] of each kind of own head, and of the head with the prior."""

    own: Mapping[str, np.ndarray]
    prior: np.ndarray

    @property
    def best(self) -> str:
        """The kind with the highest mean accuracy."""
        return max(self.own, key=lambda kind: float(self.own[kind].mean()))

    @property
    def gains(self) -> np.ndarray:
        """Points [seeds, domains] over the own best head."""
        return self.prior - self.own[self.best]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tools.study.class_statistics", None, __doc__, formatter_class=formatter
    )
    parser.add_argument("--data", type=Path, default=Path(".data"), help="folder of pacs-*.npz [.data]")
    parser.add_argument("--out", type=Path, default=Path("runs/predictions"), help="folder of the features")
    parser.add_argument("--pictures", type=int, default=1000, help="of each domain, at random [1000]")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    domains = {domain: features(domain, options.data, options.out, options.pictures) for domain in DOMAINS}
    cells = dict.fromkeys(Cell(k, str(k) if o == "same" else o) for k in LABELS for o in OTHERS)
    found = {cell: measured(domains, cell, options.seeds) for cell in cells}
    for table in (accuracy_table(found), domain_table(found)):
        sys.stdout.write(tables.markdown(table) + "\n")


def measured(domains: Mapping[str, Pictures], cell: Cell, seeds: int, kinds: Sequence[str] = KINDS) -> Found:
    """Measure each domain's device in each seed."""
    own = {kind: np.zeros((seeds, len(domains))) for kind in kinds}
    with_prior = np.zeros((seeds, len(domains)))
    for seed in range(seeds):
        for place, (domain, data) in enumerate(domains.items()):
            rows, test = split(domain, data, str(cell.labels), seed)
            others = {name: other for name, other in domains.items() if name != domain}
            vectors = [
                statistics(other, split(name, other, cell.others, seed)[0]) for name, other in others.items()
            ]
            extras = {PRIOR: from_sum(np.sum(vectors, axis=0), data).arrays()}
            for kind in kinds:
                own[kind][seed, place] = accuracy(kind, data, rows, test, {})
            with_prior[seed, place] = accuracy(SERVED, data, rows, test, extras)
    return Found(own, with_prior)


def split(domain: str, data: Pictures, labels: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows with labels and rows for testing; the latter are the same for any number of labels."""
    rows = generator(seed, "class statistics", client=domain).permutation(len(data.y))
    test, rest = rows[: min(TEST, len(rows) // 3)], rows[min(TEST, len(rows) // 3) :]
    most = None if labels == "all" else int(labels)
    return np.concatenate([rest[data.y[rest] == label][:most] for label in np.unique(data.y)]), test


def statistics(data: Pictures, rows: np.ndarray) -> np.ndarray:
    """What the device with these labelled pictures adds to the sum."""
    z, y = data.z[rows], data.y[rows]
    counted = sums.uncounted(sums.keys_of(z), y, {})
    return sums.of(z, y, int(data.y.max()) + 1, counted).flat


def from_sum(vector: np.ndarray, data: Pictures) -> sums.Statistics:
    """The statistics of the fleet."""
    shape = sums.shape_of(int(data.y.max()) + 1, data.z.shape[1])
    return sums.from_flat(vector, shape)


def accuracy(kind: str, data: Pictures, rows: np.ndarray, test: np.ndarray, extras: Extras) -> float:
    """Accuracy in per cent on the pictures for testing, of a head as a device fits it."""
    plan = PLANS.get(kind, HeadPlan())
    fitted = "logistic" if kind in PLANS else kind
    z, y, classes = data.z[rows], data.y[rows], int(data.y.max()) + 1
    head = heads.fit(fitted, z, y, classes, unit_norm=False, plan=plan, extras=extras)
    return 100 * metrics.accuracy(head.predict(data.z[test]), data.y[test])


def accuracy_table(found: Mapping[Cell, Found]) -> Table:
    """Means over domains, mean ± standard deviation over seeds."""
    lines = []
    for cell, each in found.items():
        own = [_spread(each.own[kind]) for kind in each.own]
        worst = each.gains.mean(axis=1).min()
        shown = [f"{each.gains.mean():+.1f}", f"{worst:+.1f}", f"{each.gains.min():+.1f}"]
        lines.append([str(cell.labels), cell.others, *own, _spread(each.prior), *shown])
    some = next(iter(found.values()))
    headings = ["labels", "of the others", *some.own, "with the prior"]
    more = ["points over the own best", "worst seed", "worst device and seed"]
    note = f"{some.prior.shape[0]} seeds, {some.prior.shape[1]} devices"
    return Table([*headings, *more], lines, "Accuracy by labels per class, %", [note])


def domain_table(found: Mapping[Cell, Found]) -> Table:
    """Points over the own best head in each domain, means over seeds."""
    lines = [
        [str(cell.labels), cell.others, *(f"{gain:+.1f}" for gain in each.gains.mean(axis=0))]
        for cell, each in found.items()
    ]
    return Table(["labels", "of the others", *DOMAINS], lines, "Points over the own best head, by domain")


def _spread(values: np.ndarray) -> str:
    """Mean over all, and standard deviation over seeds of their means over domains."""
    return f"{values.mean():.1f} ± {values.mean(axis=1).std():.1f}"


if __name__ == "__main__":
    main()
