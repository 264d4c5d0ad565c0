"""Calibration, answers under a promise and rejection of personal heads on a frozen backbone, measured on unseen PACS pictures.

python -m tools.study.predictions --data .data        the tables in docs/devices.md, "Predictions"

Every domain is one device with 5 or 20 labels per class, fitted and calibrated as `edge-fl device run` does it below `cross_validate_below`
pictures; all other pictures of the domain are unseen. The features are kept in --out.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from edge_fl.config import ModelConfig
from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl.data import datasets
from edge_fl.heads import HeadPlan
from edge_fl.heads.auto import Choice
from edge_fl.modalities import pictures
from edge_fl.models import backbone_input, build_net
from edge_fl.models.backbones import LITE0
from edge_fl_devices.workers.head_fitting import FitData, FitSpec, fit_here

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
LABELS = (5, 20)
TARGETS = (0.8, 0.9, 0.95)
FALSE_ALARM = 0.05
LEFT_OUT = 2
"""Classes that are left out to be unknown."""
BATCH = 32


@dataclass(frozen=True)
class Pictures:
    """Features z [n, d] and labels y [n] of one domain."""

    z: np.ndarray
    y: np.ndarray


class Measured(NamedTuple):
    """Figures of one device; the probability of each prediction, and whether it is right."""

    domain: str
    values: dict[str, float]
    confidence: np.ndarray
    right: np.ndarray


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tools.study.predictions", None, __doc__, formatter_class=formatter
    )
    parser.add_argument("--data", type=Path, default=Path(".data"), help="folder of pacs-*.npz [.data]")
    parser.add_argument("--out", type=Path, default=Path("runs/predictions"), help="folder of the features")
    parser.add_argument("--pictures", type=int, default=1000, help="of each domain, at random [1000]")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--heads", default="cosine,logistic,svm,nearest")
    options = parser.parse_args(arguments)
    domains = {domain: features(domain, options.data, options.out, options.pictures) for domain in DOMAINS}
    heads = options.heads.split(",")
    found = {
        (labels, head): [
            value for seed in range(options.seeds) for value in measured(domains, labels, head, seed)
        ]
        for head in heads
        for labels in LABELS
    }
    rejected = {
        labels: [value for seed in range(options.seeds) for value in rejections(domains, labels, seed)]
        for labels in LABELS
    }
    for table in (calibration_table(found), domain_table(found, heads[0]), rejection_table(rejected)):
        sys.stdout.write(tables.markdown(table) + "\n")


def features(domain: str, data: Path, out: Path, most: int) -> Pictures:
    """Features of a domain's pictures, kept in a file."""
    path = out / f"{domain}-{most}.npz"
    if not path.exists():
        found = datasets.load(f"pacs-{domain}", data)
        samples = found.samples
        rows = np.sort(np.random.default_rng(0).permutation(len(samples))[:most])
        model = ModelConfig(LITE0, train="none")
        input = backbone_input(model)
        assert input
        extractor = build_net(model, input, 2).extractor
        params, z = extractor.init(), []
        with torch.inference_mode():
            for start in range(0, len(rows), BATCH):
                x = pictures.fit(samples.x[rows[start : start + BATCH]], input)
                z.append(extractor.frozen(params, torch.from_numpy(x) / 255).numpy())
        out.mkdir(parents=True, exist_ok=True)
        np.savez(path, z=np.concatenate(z), y=samples.y[rows])
    with np.load(path) as content:
        return Pictures(content["z"], content["y"])


def fitted(data: Pictures, rows: np.ndarray, head: str) -> Choice:
    """Fit and calibrate as a device does on a release without training; "cosine" is its default there."""
    plan = HeadPlan("cosine") if head == "cosine" else HeadPlan()
    kind = "logistic" if head == "cosine" else head
    spec = FitSpec(kind, int(data.y.max()) + 1, False, "", plan=plan, calibrate=True)
    return fit_here(spec, FitData(data.z[rows], data.y[rows]))


def labelled(data: Pictures, labels: int, seed: int, classes: Sequence[int]) -> np.ndarray:
    """Rows of `labels` pictures of each class."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(np.flatnonzero(data.y == label))[:labels] for label in classes]
    return rng.permutation(np.concatenate(rows))


def measured(domains: dict[str, Pictures], labels: int, head: str, seed: int) -> Iterator[Measured]:
    """Measure the head of each domain on unseen pictures."""
    for domain, data in domains.items():
        rows = labelled(data, labels, seed, np.unique(data.y))
        unseen = np.setdiff1d(np.arange(len(data.y)), rows)
        choice = fitted(data, rows, head)
        logits = choice.head.logits(data.z[unseen])
        shares, raw = choice.calibration.probabilities(logits), _softmax(logits)
        right = shares.argmax(axis=1) == data.y[unseen]
        values = {
            "accuracy": right.mean(),
            "cross-validated": choice.calibration.accuracy,
            "confidence": shares.max(axis=1).mean(),
            "ECE": error(shares.max(axis=1), right),
            "ECE before": error(raw.max(axis=1), right),
            "false alarms": unknown(choice, data.z[unseen]),
        }
        for target in TARGETS:
            answered = choice.calibration.promise.sets(logits, target).sum(axis=1) == 1
            values[f"precision {target}"] = right[answered].mean() if answered.any() else np.nan
            values[f"coverage {target}"] = answered.mean()
        yield Measured(domain, values, shares.max(axis=1), right)


def rejections(domains: dict[str, Pictures], labels: int, seed: int) -> Iterator[tuple[str, float, float]]:
    """Yield the kind of unknown pictures, the rate of false alarms, and that of detection."""
    for domain, data in domains.items():
        everything = np.unique(data.y)
        for kind in ("another domain", f"{LEFT_OUT} classes left out"):
            known = everything
            if kind != "another domain":
                known = np.sort(np.random.default_rng(seed).permutation(everything)[LEFT_OUT:])
            rows = labelled(data, labels, seed, known)
            choice = fitted(data, rows, "cosine")
            unseen = np.setdiff1d(np.flatnonzero(np.isin(data.y, known)), rows)
            false = unknown(choice, data.z[unseen])
            if kind == "another domain":
                others = [other.z for name, other in domains.items() if name != domain]
            else:
                others = [data.z[~np.isin(data.y, known)]]
            for z in others:
                yield kind, false, unknown(choice, z)


def unknown(choice: Choice, z: np.ndarray) -> float:
    """Share of features z [n, d] that are called unknown."""
    predicted = choice.head.logits(z).argmax(axis=1)
    return float((choice.calibration.percentiles(z, predicted) > 1 - FALSE_ALARM).mean())


def pooled_error(found: Sequence[Measured]) -> float:
    """Expected calibration error over the predictions of all devices."""
    confidence, right = (np.concatenate([each[place] for each in found]) for place in (2, 3))
    return error(confidence, right)


def error(confidence: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    """Expected calibration error with bins of equal width."""
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    return sum(abs(confidence[place == b].sum() - right[place == b].sum()) for b in range(bins)) / len(right)


Found = dict[tuple[int, str], list[Measured]]


def calibration_table(found: Found) -> Table:
    """Means over domains and seeds, by head and labels per class."""
    lines = []
    for (labels, head), values in found.items():
        means = {name: np.nanmean([each.values[name] for each in values]) for name in values[0].values}
        answers = [f"{means[f'precision {t}']:.3f} at {means[f'coverage {t}']:.0%}" for t in TARGETS]
        shown = [f"{means[name]:.3f}" for name in ("accuracy", "confidence", "ECE before", "ECE")]
        shown.append(f"{pooled_error(values):.3f}")
        lines.append([str(labels), head, *shown, *answers])
    headings = [
        "labels",
        "head",
        "accuracy",
        "mean probability",
        "ECE, T = 1",
        "ECE",
        "of all together",
        *(f"precision {t}" for t in TARGETS),
    ]
    some = next(iter(found.values()))
    note = f"{len(some)} devices (domains and seeds) with {np.mean([len(each.right) for each in some]):.0f} unseen pictures each"
    return Table(headings, lines, "Calibration on unseen pictures", [note])


def domain_table(found: Found, head: str) -> Table:
    """Means over seeds in each domain, for one head."""
    lines = []
    for labels in LABELS:
        by_domain: dict[str, list[dict[str, float]]] = defaultdict(list)
        for each in found[labels, head]:
            by_domain[each.domain].append(each.values)
        for domain, values in by_domain.items():
            names = ("accuracy", "ECE", "precision 0.9", "coverage 0.9", "false alarms")
            lines.append(
                [
                    str(labels),
                    domain,
                    *(f"{np.nanmean([each[name] for each in values]):.3f}" for name in names),
                ]
            )
    return Table(
        ["labels", "domain", "accuracy", "ECE", "precision 0.9", "coverage", "false alarms"],
        lines,
        f"By domain, {head} head",
    )


def rejection_table(found: dict[int, list[tuple[str, float, float]]]) -> Table:
    """Means over domains and seeds, by kind of unknown pictures."""
    lines = [
        [
            str(labels),
            kind,
            *(f"{np.mean([each[place] for each in values if each[0] == kind]):.3f}" for place in (1, 2)),
        ]
        for labels, values in found.items()
        for kind in dict.fromkeys(each[0] for each in values)
    ]
    return Table(
        ["labels", "unknown pictures", "false alarms", "detected"],
        lines,
        f"Rejection at a false alarm rate of {FALSE_ALARM}",
    )


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(exponents / exponents.sum(axis=1, keepdims=True))


if __name__ == "__main__":
    main()
