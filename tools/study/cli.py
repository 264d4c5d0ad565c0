"""`make study`: run the study, write the evidence of `edge-fl methods recommend`, and print accuracies and the papers' claims.

python -m tools.study --data DIR                   everything; DIR has the .npz files of the four larger datasets
python -m tools.study --datasets digits            without them
python -m tools.study --methods fedcrc,fedrep      the claims about these methods alone; no evidence is written
python -m tools.study --minutes 5                  for five minutes; finished cells are stored, the next call continues
"""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

import edge_fl
from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl.errors import InputError
from edge_fl.files import atomic
from edge_fl_lab.compare import grid
from edge_fl_lab.recommend import FILE, FINE_TUNED, LOCAL, StudyEvidence, Tier, difference_text
from edge_fl_server.runs.results import commit
from tools.study import findings, images, settings, work


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study, or what is left of it."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=Path(".data"), help="folder of the .npz files [.data]")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder of the stored cells")
    parser.add_argument("--datasets", default=",".join(settings.IMAGES), help="comma-separated")
    parser.add_argument("--methods", default="", help="comma-separated; default: all")
    parser.add_argument("--seeds", type=int, default=len(settings.SEEDS))
    parser.add_argument("--trials", type=int, default=settings.TRIALS)
    parser.add_argument("--minutes", type=float, default=math.inf, help="pause after so many minutes")
    parser.add_argument(
        "--evidence",
        type=Path,
        default=None,
        help=f"file of the evidence [OUT/{FILE.name}]",
    )
    options = parser.parse_args(arguments)
    names, methods = options.datasets.split(","), options.methods.split(",") if options.methods else []
    if unknown := [name for name in names if name not in settings.IMAGES]:
        parser.error(f"unknown dataset {unknown[0]!r}, expected {', '.join(settings.IMAGES)}")
    small = options.out / "images"
    try:
        for label in methods:
            grid.parse_method(label)
        images.reduced(options.data, small, (*names, *(settings.TUNED_ON.get(name, name) for name in names)))
    except InputError as error:
        parser.error(str(error))
    plan = work.Plan(
        small,
        options.out,
        tuple(names),
        methods=tuple(methods) or (*settings.METHODS, *settings.VARIANTS),
        seeds=tuple(range(options.seeds)),
        trials=options.trials,
        until=time.monotonic() + 60 * options.minutes,
    )
    finished: list[work.Run] = []
    try:
        for run in work.study(plan):
            finished.append(run)
    except work.PausedError:
        print(f"paused; finished cells are in {options.out}, and the same command continues")
    if finished:
        _write(plan, finished, options.evidence or options.out / FILE.name)


def _write(plan: work.Plan, finished: Sequence[work.Run], file: Path) -> None:
    """Print the tables, and write the evidence if the references have run."""
    shown = claims(finished)
    if {LOCAL, FINE_TUNED} <= set(plan.methods):
        state = commit(Path(edge_fl.__file__).parent)
        tunings = {name: work.tuned(replace(plan, until=math.inf), name) for name in plan.datasets}
        found = findings.evidence(finished, tunings, f"{state.sha[:7]}{'+' * state.dirty}" if state else "")
        atomic.write(file, msgspec.json.encode(found) + b"\n")
        shown = [accuracies(found, "full"), accuracies(found, "head"), *shown]
    for table in shown:
        print(tables.markdown(table))
    minutes = sum(run.result.seconds for run in finished) / 60
    print(f"{len(finished)} runs of {minutes:.0f} minutes in all, without the trials; files: {plan.folder}")


def accuracies(found: StudyEvidence, tier: Tier) -> Table:
    """Mean accuracy by method and dataset, over partitions and seeds."""
    names = [*dict.fromkeys(setting.dataset for setting in found.settings)]
    rows = []
    for method, table in found.of(tier).items():
        by = [
            [v for s, row in zip(found.settings, table, strict=True) if s.dataset == name for v in row]
            for name in names
        ]
        means = [_mean(values) for values in by]
        rows.append([method, *means, _mean([v for values in by for v in values])])
    headings = ["method", *names, "mean"]
    title = {"full": "Clients that train", "head": "Head-only clients"}[tier] + ", accuracy in per cent"
    return Table(headings, rows, title, (), headings[1:])


def claims(finished: Sequence[work.Run]) -> list[Table]:
    """The verdict on every claim; then its differences by dataset and partition."""
    found = [(str(findings.CLAIMS.index(v.claim) + 1), v) for v in findings.verdicts(finished)]
    verdicts = [
        [
            number,
            verdict.claim.text,
            verdict.words,
            str(verdict.overall.n if verdict.overall else 0),
            difference_text(verdict.overall),
            f"`{verdict.claim.command}`",
        ]
        for number, verdict in found
    ]
    groups = [*dict.fromkeys(name for _, verdict in found for name in verdict.parts)]
    parts = [
        [number, *(difference_text(verdict.parts.get(name)) for name in groups)] for number, verdict in found
    ]
    title = "Claims of the papers; differences in points with 95 % intervals over n federations"
    return [
        Table(["no.", "claim", "verdict", "n", "difference", "command"], verdicts, title),
        Table(["no.", *groups], parts, "The same by dataset and by partition"),
    ]


def _mean(values: Sequence[float | None]) -> str:
    finite = [value for value in values if value is not None]
    diverged = len(values) - len(finite)
    return (f"{np.mean(finite):.1f}" if finite else "-") + f" ({diverged} diverged)" * bool(
        diverged and finite
    )
