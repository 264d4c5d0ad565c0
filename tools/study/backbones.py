"""Accuracy of personal heads on pixels, on a small CNN that the devices train, on a frozen backbone, and on one with LoRA.

Every domain of PACS is one device with 1, 5, 20 or all labels per class, tested on 300 other pictures of its domain.

python -m tools.study.backbones --data .data                       the tables in docs/models.md
python -m tools.study.backbones --minutes 5                        pause after that; the same command continues
python -m tools.study.backbones --rows cnn --labels 20 --lr 0.2 --first-seed 100 --seeds 1      a trial of a learning rate

Finished cells are stored in --out. They are run again if their settings changed, not if the code did: remove the folder then.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_fl.config import ModelConfig
from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl.data import datasets
from edge_fl.models.backbones import LITE0
from tools.study.backbone_cells import HEADS, KINDS, LABELS, TRAINING, Cell, Study

TITLES = {
    "pixels": "pixels (16x16)",
    "cnn": "small CNN (32x32) trained by the devices",
    "frozen": "frozen backbone ({0}x{0})",
    "lora": "backbone with LoRA on full devices ({0}x{0})",
    "all": "backbone trained as a whole by full devices ({0}x{0})",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is left of the study, and print its tables."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tools.study.backbones", None, __doc__, formatter_class=formatter
    )
    parser.add_argument("--data", type=Path, default=Path(".data"), help="folder of pacs-*.npz [.data]")
    parser.add_argument("--out", type=Path, default=Path("runs/backbones"), help="folder of the stored cells")
    parser.add_argument("--rows", default="pixels,cnn,frozen,lora", help=f"of {', '.join(HEADS)}")
    parser.add_argument("--labels", default=",".join(LABELS), help="per class")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--lr", type=float, help="instead of the chosen learning rate")
    parser.add_argument("--backbone", default=LITE0, help="a pretrained network of `edge-fl models list`")
    parser.add_argument("--size", type=int, default=224, help="side of the backbone's pictures")
    parser.add_argument("--weights", default="", help="of the backbone: a file, or random")
    parser.add_argument("--minutes", type=float, default=math.inf, help="pause after so many minutes")
    options = parser.parse_args(arguments)
    rows, labels = options.rows.split(","), options.labels.split(",")
    for known, words in ((HEADS, rows), (LABELS, labels)):
        if unknown := [word for word in words if word not in known]:
            parser.error(f"{unknown[0]!r} is unknown, expected {', '.join(known)}")
    options.out.mkdir(parents=True, exist_ok=True)
    backbone = ModelConfig(options.backbone, {"size": options.size}, options.weights)
    study = Study(datasets.load("pacs", options.data), options.out, backbone)
    until = time.monotonic() + 60 * options.minutes
    found: dict[str, dict[str, list[Cell]]] = {row: {each: [] for each in labels} for row in rows}
    for row in rows:
        training = TRAINING.get(row)
        if training and options.lr:
            training = replace(training, lr=options.lr)
        for each in labels:
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                cell = study.cell(row, each, seed, training, until)
                if cell is None:
                    sys.stdout.write(
                        f"paused; finished cells are in {options.out}, and the same command continues\n"
                    )
                    return
                found[row][each].append(cell)
    sys.stdout.write(
        "\n".join(
            tables.markdown(table)
            for table in (accuracies(found, options.size), by_domain(found, options.size))
        )
    )


def accuracies(found: dict[str, dict[str, list[Cell]]], size: int) -> Table:
    """Mean over the domains: mean and standard deviation over seeds, by kind of head."""
    lines = []
    for row, cells in found.items():
        seconds = sum(cell.seconds for each in cells.values() for cell in each)
        for kind in KINDS:
            means = [[cell.mean(kind) for cell in each] for each in cells.values()]
            shown = [f"{np.mean(m):.1f} ± {np.std(m, ddof=min(1, len(m) - 1)):.1f}" for m in means]
            lines.append(
                [
                    TITLES[row].format(size),
                    kind + " (default)" * (kind == HEADS[row]),
                    *shown,
                    f"{seconds:.0f}",
                ]
            )
    headings = ["features", "head", *next(iter(found.values())), "processor s"]
    return Table(headings, lines, "Accuracy in per cent by labels per class", (), headings[2:])


def by_domain(found: dict[str, dict[str, list[Cell]]], size: int) -> Table:
    """Mean over seeds in each domain, with the default head."""
    lines: list[list[str]] = []
    domains: list[str] = []
    for row, cells in found.items():
        for labels, each in cells.items():
            own = [cell.accuracy[HEADS[row]] for cell in each]
            domains = [*own[0]]
            means = [f"{100 * np.mean([accuracy[domain] for accuracy in own]):.1f}" for domain in domains]
            lines.append([TITLES[row].format(size), labels, *means])
    headings = ["features", "labels", *domains]
    return Table(headings, lines, "By domain, with the default head", (), headings[1:])


if __name__ == "__main__":
    main()
