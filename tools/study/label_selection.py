"""Labels saved by labelling informative pictures first, measured with personal heads on a frozen backbone and PACS.

python -m tools.study.label_selection --data .data        the table in docs/teach-a-device.md

Every domain is one device: half of its pictures are unlabelled, the other half measures the head, which is fitted anew after each batch of
labels as `edge-fl device run` fits it. The rule was chosen on art_painting and cartoon with seeds 100 to 119; the table has seeds 0 to 4.
The features are those of `tools.study.predictions`, kept in --out.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl_maker.labelling.immediate import informative, uncertainty
from tools.study.predictions import DOMAINS, Pictures, features, fitted

HEAD = "cosine"

Select = Callable[[np.ndarray, np.ndarray | None, np.ndarray, int, np.random.Generator], np.ndarray]
"""The signature of `informative`."""


def at_random(
    z: np.ndarray, probabilities: object, z_labelled: object, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Any rows."""
    return rng.permutation(len(z))[:count]


def most_uncertain(
    z: np.ndarray,
    probabilities: np.ndarray | None,
    z_labelled: np.ndarray,
    count: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """The rows with the smallest difference of the two highest probabilities; any without a head."""
    if probabilities is None:
        return at_random(z, None, None, count, rng)
    return np.argsort(-uncertainty(probabilities), kind="stable")[:count]


def most_novel(
    z: np.ndarray, probabilities: object, z_labelled: np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
    """The informative rows as without a head."""
    return informative(z, None, z_labelled, count, rng)


RULES: dict[str, Select] = {
    "random": at_random,
    "uncertainty": most_uncertain,
    "novelty": most_novel,
    "both": informative,
}


@dataclass(frozen=True)
class Plan:
    """Labels of a device, and how many are given before its head is fitted again."""

    budget: int = 100
    batch: int = 5

    @property
    def counts(self) -> np.ndarray:
        """Numbers of labels after which the accuracy is measured."""
        return np.arange(self.batch, self.budget + 1, self.batch)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tools.study.label_selection", None, __doc__, formatter_class=formatter
    )
    parser.add_argument("--data", type=Path, default=Path(".data"), help="folder of pacs-*.npz [.data]")
    parser.add_argument("--out", type=Path, default=Path("runs/predictions"), help="folder of the features")
    parser.add_argument("--pictures", type=int, default=1000, help="of each domain, at random [1000]")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--budget", type=int, default=Plan().budget, help="labels of each device [100]")
    parser.add_argument("--batch", type=int, default=Plan().batch, help="labels before each fit [5]")
    options = parser.parse_args(arguments)
    plan = Plan(options.budget, options.batch)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    curves: Curves = {}
    for domain in DOMAINS:
        data = features(domain, options.data, options.out, options.pictures)
        for rule, select in RULES.items():
            curves[domain, rule] = np.stack([learning_curve(data, select, seed, plan) for seed in seeds])
    sys.stdout.write(tables.markdown(table(curves, plan)) + "\n")


def learning_curve(data: Pictures, select: Select, seed: int, plan: Plan) -> np.ndarray:
    """Accuracies on the held-out half after each batch of labels that `select` asks for."""
    rng = np.random.default_rng(seed)
    unlabelled, held_out = np.array_split(rng.permutation(len(data.y)), 2)
    labelled = unlabelled[:0]
    probabilities, accuracies = None, []
    for _ in plan.counts:
        rows = select(data.z[unlabelled], probabilities, data.z[labelled], plan.batch, rng)
        labelled = np.concatenate([labelled, unlabelled[rows]])
        unlabelled = np.delete(unlabelled, rows)
        choice = fitted(data, labelled, HEAD)
        accuracies.append(np.mean(choice.head.logits(data.z[held_out]).argmax(axis=1) == data.y[held_out]))
        probabilities = choice.calibration.probabilities(choice.head.logits(data.z[unlabelled]))
    return np.array(accuracies)


Curves = dict[tuple[str, str], np.ndarray]
"""Accuracies [seeds, batches] by domain and rule."""


def labels_needed(curve: np.ndarray, accuracy: float, plan: Plan) -> str:
    """The number of labels from which a mean curve [batches] reaches an accuracy."""
    reached = np.flatnonzero(curve >= accuracy)
    return str(plan.counts[reached[0]]) if len(reached) else f"more than {plan.budget}"


def table(curves: Curves, plan: Plan) -> Table:
    """Final accuracies, and the labels with which each rule reaches that of random selection; means over seeds."""
    everywhere = {rule: np.mean([curves[domain, rule] for domain in DOMAINS], axis=0) for rule in RULES}
    means = {(domain, rule): curve.mean(axis=0) for (domain, rule), curve in curves.items()}
    means |= {("mean of all", rule): curve.mean(axis=0) for rule, curve in everywhere.items()}
    lines = []
    for domain in dict.fromkeys(domain for domain, _ in means):
        final = means[domain, "random"][-1]
        others = [rule for rule in RULES if rule != "random"]
        lines.append(
            [
                domain,
                *(f"{means[domain, rule][-1]:.3f}" for rule in RULES),
                *(labels_needed(means[domain, rule], final, plan) for rule in others),
            ]
        )
    headings = [
        "domain",
        *(f"{rule}, {plan.budget} labels" for rule in RULES),
        *(f"labels of {rule} for that of random" for rule in RULES if rule != "random"),
    ]
    error = everywhere["random"][:, -1].std(ddof=1) / np.sqrt(len(everywhere["random"]))
    seeds = len(next(iter(curves.values())))
    note = f"{seeds} seeds, a fit after every {plan.batch} labels; standard error of the mean accuracy at random: {error:.3f}"
    return Table(headings, lines, "Accuracy of the selection of labels on held-out pictures", [note])


if __name__ == "__main__":
    main()
