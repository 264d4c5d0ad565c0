"""Whether the list of labels to look at (`edge_fl.heads.label_doctor`) holds the wrong ones: PACS, CIFAR-10 and IMU devices.

python -m tools.study.wrong_labels                              a quarter of an hour of one core, once the cells are made
python -m tools.study.wrong_labels --datasets imu --devices 1   one data set, with one device of each kind in each cell

Devices of `tools.study.promise_cells`, balanced ones and ones with class shares of their own. Of their labels, 5 or 20 of each class, a
share is given another class, drawn at random; "pair": half the labels of one class are given as one other class. Then the list is made as
on a device, without knowing what was changed. The labels of all devices of a row are added up: precision is the share of the listed labels
that are wrong, recall the share of the wrong labels that are listed. Wrong labels that the data sets have themselves count as right.

- shown: the list as a device shows it, from the served head, own labels alone and the fleet's head
- own labels, fleet's head: the same rule for the list, from what that one alone predicts without the sample
- clean head: the same from a served head that was fitted on 20 test images of each class with right labels, and the right class shares
- chance: a list as long as the shown one, drawn at random: its precision is the share of wrong labels, its recall its share of all labels
- confusions: what is named where a class is often another one; labels are those of the second class, wrong ones are truly the first
"""

import argparse
import logging
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_fl import heads
from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl.data.grouping import alone
from edge_fl.data.samples import Array
from edge_fl.heads import label_doctor
from tools.study import day_zero_heads, promise_cells
from tools.study.day_zero_cells import Cell

LABELS, SHARES, PAIR = (5, 20), ("0", "0.05", "0.1", "pair"), "pair"
SHOWN, OWN, FLEET, CLEAN, CHANCE = "shown", "own labels", "fleet's head", "clean head", "chance"
CONFUSIONS = "confusions"
MOST_CLEAN = 20
DRAWS = 500
Counts = tuple[int, int, int, int]
"""Labels, wrong ones, listed ones, and listed wrong ones."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tools.study.wrong_labels", None, __doc__, formatter_class=formatter
    )
    parser.add_argument("--data", type=Path, default=Path(".data"))
    parser.add_argument("--out", type=Path, default=Path("runs/promise"), help="folder of the stored cells")
    parser.add_argument("--datasets", default="pacs,cifar10,imu")
    parser.add_argument("--devices", type=int, default=5, help="of each kind, of each cell")
    options = parser.parse_args(arguments)
    logging.getLogger("edge_fl").setLevel(logging.ERROR)
    found: dict[tuple[str, ...], list[Counts]] = {}
    for cell in promise_cells.cells(options.datasets.split(","), options.data, options.out):
        for key, counts in of_cell(cell, options.devices):
            found.setdefault(key, []).append(counts)
    sys.stdout.write(tables.markdown(table(found)) + "\n")


def of_cell(cell: Cell, devices: int) -> Iterator[tuple[tuple[str, ...], Counts]]:
    """Yield (data set, labels per class, share of wrong labels, list) with its counts."""
    kinds = np.array(cell.about.rows)
    chosen = [device for kind in np.unique(kinds) for device in np.flatnonzero(kinds == kind)[:devices]]
    for device in sorted(chosen):
        tests = cell.tests(device)
        tests = np.concatenate(
            [tests[cell.y[tests] == label][:MOST_CLEAN] for label in np.unique(cell.y[tests])]
        )
        clean = day_zero_heads.served(cell.z[tests], cell.y[tests], cell)
        for labels in LABELS:
            own = cell.labels(device)[: labels * cell.about.classes]
            own = own[heads.canonical_order(cell.z[own], cell.y[own])]
            for share in SHARES:
                rng = np.random.default_rng([zlib.crc32(cell.z[own].tobytes()), SHARES.index(share)])
                key = cell.about.dataset, str(labels), share
                for name, counts in of_device(cell, own, share, clean, rng):
                    yield (*key, name), counts


def of_device(
    cell: Cell, own: Array, share: str, clean: day_zero_heads.Fitted | None, rng: np.random.Generator
) -> Iterator[tuple[str, Counts]]:
    """Yield each list with its counts."""
    truth = cell.y[own]
    given = injected(truth, cell.about.classes, share, rng)
    order = heads.canonical_order(cell.z[own], given)
    z, y, wrong = cell.z[own][order], given[order], (given != truth)[order]
    plan, extras = day_zero_heads.release(cell)
    data = heads.training_set(z, y, cell.about.classes, cell.about.unit_norm, plan=plan, extras=extras)
    estimate = heads.estimated("logistic", data)
    assert clean is not None and len(estimate.rows) == len(y)
    best = clean.logits(z).astype(np.float64)
    for name, logits in {OWN: estimate.own, FLEET: estimate.fleet, CLEAN: best, SHOWN: None}.items():
        listed = np.empty(0, np.int64)
        if name == SHOWN:
            shown = label_doctor.doubts(estimate, y, alone())
            listed = label_doctor.listed(shown.wrong)
            for found in label_doctor.confusions(y, shown, cell.about.classes):
                second, first = y == found.second, truth[order] == found.first
                named = found.culprits
                hits = int(first[named].sum())
                yield CONFUSIONS, (int(second.sum()), int((second & first).sum()), len(named), hits)
        elif logits is not None:  # a fleet's head that contradicts the labels is none
            one = replace(estimate, own=logits, fleet=None)
            listed = label_doctor.listed(label_doctor.doubts(one, y, alone()).wrong)
        yield name, (len(y), int(wrong.sum()), len(listed), int(wrong[listed].sum()))
    drawn = rng.permutation(len(y))[: len(listed)]  # the shown list is the last one
    yield CHANCE, (len(y), int(wrong.sum()), len(drawn), int(wrong[drawn].sum()))


def injected(y: Array, classes: int, share: str, rng: np.random.Generator) -> Array:
    """Give a share of the labels another class, at least one; or half of those of one class another one."""
    given = y.copy()
    if share == PAIR:
        present = rng.permutation(np.unique(y))
        of, to = present[0], present[1] if len(present) > 1 else (present[0] + 1) % classes
        rows = rng.permutation(np.flatnonzero(y == of))
        given[rows[: -(-len(rows) // 2)]] = to
        return given
    count = round(float(share) * len(y)) or int(float(share) > 0)
    rows = rng.permutation(len(y))[:count]
    given[rows] = (y[rows] + rng.integers(1, classes, count)) % classes
    return given


def table(found: dict[tuple[str, ...], list[Counts]]) -> Table:
    """One line for each data set, number of labels, share of wrong labels and list."""
    headings = [
        "devices of",
        "labels per class",
        "made wrong",
        "list",
        "n",
        "wrong labels",
        "listed",
        "precision",
    ]
    headings += ["recall", "F1"]
    rows = []
    for key, counts in sorted(found.items()):
        of_devices = np.array(counts)
        draws = np.random.default_rng(0).integers(0, len(counts), (DRAWS, len(counts)))
        labels, wrong, listed, _ = of_devices.sum(axis=0)
        ratios = zip(_ratios(of_devices.sum(axis=0)), _ratios(of_devices[draws].sum(axis=1)), strict=True)
        rows.append(
            [*key, str(len(counts)), f"{wrong} of {labels}", str(listed)]
            + [_with_interval(float(value), drawn) for value, drawn in ratios]
        )
    note = f"n: devices, or confusions, whose labels are added up. In brackets 90 % intervals of {DRAWS} bootstrap draws of devices."
    return Table(
        headings, rows, "Labels to look at, among labels of which some are wrong", [note], headings[1:]
    )


def _ratios(counts: Array) -> tuple[Array, Array, Array]:
    """Counts [..., 4] -> precision, recall and F1 [...]; NaN of nothing."""
    _, wrong, listed, hits = np.moveaxis(counts.astype(np.float64), -1, 0)
    with np.errstate(invalid="ignore"):
        return hits / listed, hits / wrong, 2 * hits / (listed + wrong)


def _with_interval(value: float, drawn: Array) -> str:
    if np.isnan(value):
        return "-"
    low, high = np.nanquantile(drawn, [0.05, 0.95])
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
