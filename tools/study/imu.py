"""Exercises by a watch: 10 persons, 7 exercises, both arms, 6 channels at 50 Hz, from the user's own copy of seglearn's watch data.

python -m tools.study.imu convert watch_dataset.npy --out DIR    DIR/csv/personNN/CLASS/{left,right}.csv and DIR/data/watch.npz
python -m tools.study.imu run --data DIR/data                    accuracies of a tenth person whom the fleet of nine has never seen
python -m tools.study.imu run --data DIR/data --methods fedavg --persons 3 --rounds 20
python -m tools.study.imu fleet --data DIR/data                  the same over mosquitto, with devices that have CSV files

Nine persons are clients of a simulation, which trains the method and makes its fleet's head; for `random-kernels` nothing is trained, and
the class statistics of the nine ("statistics") make another head, as a fleet of devices does. The tenth has k labels of each exercise, a
clip of 4 s each. Two tests: `later` takes labels from the first half of each recording and tests windows of the second half; a window
across the middle is in neither. `other arm` takes labels from one arm and tests all windows of the other one.

`fleet` does the same with `random-kernels` and `later` over a broker: a server releases what the nine made, three devices have 0, 1 and 10
clips of each exercise in folders of CSV files, and `edge-fl device predict` predicts the test's clips.

The file `seglearn/data/watch_dataset.npy` is in seglearn's wheel (BSD; D. Burns et al., arXiv:1802.01489). It is a pickled array, of which
only numbers and lists are read: any other object in it is an error, and its sha256 is checked first.
"""

import argparse
import codecs
import csv
import hashlib
import io
import logging
import pickle  # noqa: TID251 - restricted to what makes arrays
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from subprocess import DEVNULL, Popen, check_output
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from edge_fl import heads, metrics
from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl.data import datasets
from edge_fl.data.partition import Split
from edge_fl.data.samples import Array, Dataset, Indices
from edge_fl.errors import DataError
from edge_fl.files import npz
from edge_fl.heads import HeadPlan
from edge_fl.heads.class_statistics import sums
from edge_fl.heads.class_statistics.prior import PRIOR
from edge_fl.heads.fleet import FLEET
from edge_fl.heads.head import Extras
from edge_fl.heads.plan import PLAIN
from edge_fl.inputs import InputSpec
from edge_fl.learn.tree import to_arrays
from edge_fl.methods.contract.tiers import head_plan
from edge_fl.wire import tensors
from edge_fl_lab.newcomers import features
from edge_fl_lab.research import run
from edge_fl_lab.trained import TrainedRun
from edge_fl_server.release import fleet_head

SHA256 = "eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537"
RATE, WINDOW, HOP = 50.0, 200, 100
NAMES, UNITS = ("ax", "ay", "az", "gx", "gy", "gz"), ("g", "g", "g", "rad/s", "rad/s", "rad/s")
SIDES = ("left", "right")
KERNELS = "random-kernels"
LABELS, TESTS = (0, 1, 3, 10), ("later", "other arm")


class Recording(NamedTuple):
    """One exercise of one person with the watch on one arm: values float32 [T, 6]."""

    person: str
    exercise: str
    side: str
    values: Array


class _Restricted(pickle.Unpickler):
    """Makes arrays and nothing else."""

    MAKERS = {  # noqa: RUF012 - of names in the file
        ("numpy.core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if made := self.MAKERS.get((module, name)):
            return made
        raise DataError(
            f"watch data: an object {module}.{name} in it, expected arrays only; nothing was read"
        )


def recordings(path: Path) -> list[Recording]:
    """Read the file, ordered by person, exercise and arm. Raises DataError for any other file."""
    content = path.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise DataError(f"{path}: sha256 {found[:8]}..., expected {SHA256[:8]}... of seglearn 1.2.5")
    file = io.BytesIO(content)
    np.lib.format.read_magic(file)
    np.lib.format.read_array_header_1_0(file)
    data = _Restricted(file).load().item()
    rows = zip(data["subject"], data["y"], data["side"], data["X"], strict=True)
    names = data["y_labels"]
    return sorted(
        (
            Recording(f"person{int(who):02d}", names[int(y)], SIDES[int(side)], x.astype(np.float32))
            for who, y, side, x in rows
        ),
        key=lambda each: each[:3],
    )


def windows(found: Sequence[Recording]) -> dict[str, Array]:
    """Cut the recordings into windows of 4 s, one every 2 s: the arrays of a dataset file."""
    classes = sorted({each.exercise for each in found})
    starts = [range(0, len(each.values) - WINDOW + 1, HOP) for each in found]
    counts = [len(each) for each in starts]
    x = [
        each.values[start : start + WINDOW].T
        for each, begins in zip(found, starts, strict=True)
        for start in begins
    ]
    y = [classes.index(each.exercise) for each in found]
    values = np.stack(x)
    return {
        "x": values,
        "y": np.repeat(np.array(y, np.int64), counts),
        "groups": np.repeat(["/".join(each[:3]) for each in found], counts),
        "domains": np.repeat([each.person for each in found], counts),
        "classes": np.array(classes),
        "input": np.array(msgspec.json.encode(input_of(values)).decode()),
    }


def input_of(x: Array) -> InputSpec:
    """What windows x [n, 6, T] are, with their means and standard deviations."""
    mean, std = (tuple(of(x, axis=(0, 2), dtype=np.float64).tolist()) for of in (np.mean, np.std))
    return InputSpec((6, WINDOW), mean, std, "CT", "float32", rate=RATE, hop=HOP, names=NAMES, units=UNITS)


def convert(path: Path, out: Path) -> None:
    """Write the CSV files and the dataset."""
    found = recordings(path)
    for each in found:
        folder = out / "csv" / each.person / each.exercise
        folder.mkdir(parents=True, exist_ok=True)
        lines = [",".join(("time", *NAMES))]
        lines += [
            ",".join([f"{number / RATE:.2f}", *(f"{value:.6g}" for value in row)])
            for number, row in enumerate(each.values)
        ]
        (folder / f"{each.side}.csv").write_text("\n".join([*lines, ""]))
    (out / "data").mkdir(parents=True, exist_ok=True)
    npz.write(out / "data" / "watch.npz", windows(found))


def halves(dataset: Dataset, person: int, seed: int, test: str) -> tuple[Indices, Indices]:
    """Rows of a person for labels, and rows for testing."""
    samples = dataset.samples
    assert dataset.domains is not None
    rows = np.flatnonzero(dataset.domains == person)
    recordings = np.unique(samples.groups[rows])  # of an exercise: left, right
    if test == "other arm":
        left = np.isin(samples.groups[rows], recordings[::2])
        return rows[left == (seed % 2 == 0)], rows[left == (seed % 2 == 1)]
    each = [rows[samples.groups[rows] == name] for name in recordings]
    own = [part[: (len(part) - 1) // 2] for part in each]
    return np.concatenate(own), np.concatenate([part[(len(part) + 2) // 2 :] for part in each])


def starts(dataset: Dataset, person: int, seed: int, test: str) -> tuple[dict[int, Indices], Indices]:
    """Rows with k labels of each exercise, by k, and rows for testing."""
    rng, y = np.random.default_rng([seed, person]), dataset.samples.y
    own, rest = halves(dataset, person, seed, test)
    drawn = [rng.permutation(own[y[own] == label])[: max(LABELS)] for label in range(7)]
    return {k: np.concatenate([each[:k] for each in drawn]) for k in LABELS}, rest


def trained(name: str, dataset: Dataset, person: int, seed: int, rounds: int) -> TrainedRun:
    """A method trained by the other nine in a simulation; with `KERNELS` there is nothing to train."""
    assert dataset.domains is not None
    nine = np.flatnonzero(dataset.domains != person)  # no value of the tenth, standardisation included
    others = [np.flatnonzero(dataset.domains[nine] == who) for who in range(10) if who != person]
    names, none = tuple(f"c{number}" for number in range(9)), (np.empty(0, np.int64),) * 9
    split = Split(
        len(nine), names, tuple(each[:-1] for each in others), none, tuple(each[-1:] for each in others)
    )
    kernels = name == KERNELS
    settings = {"model": {"name": KERNELS, "options": {"seed": seed}} if kernels else {"name": "cnn1d"}}
    settings |= {"method.epochs": 2, "method.optimiser": {"name": "adam", "lr": 0.001}}
    settings |= {"evaluate_every": 0, "device": "cpu"}
    x, y = dataset.samples.x[nine], dataset.samples.y[nine]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return run("fedrep" if kernels else name, x, y, clients=split, input=input_of(x),
                   rounds=1 if kernels else rounds, seed=seed, engine="sequential",
                   settings=settings).trained  # fmt: skip


def heads_of(
    found: TrainedRun, dataset: Dataset, person: int, name: str
) -> tuple[Array, dict[str, tuple[HeadPlan, Extras]]]:
    """Features of all windows as a device computes them, and by name the plans and extras of a release."""
    z, y, domains = (
        features(found.method, found.shared, dataset.samples, "cpu").numpy(),
        dataset.samples.y,
        dataset.domains,
    )
    each = [
        (z[rows], y[rows]) for rows in (np.flatnonzero(domains == who) for who in range(10) if who != person)
    ]
    plan, extras = head_plan(found.method, 32, collect=False), {}
    for part in () if name == KERNELS else ("head", "global_head"):
        if found.shared.get(part):
            extras, plan = {part: to_arrays({part: found.shared[part]})[part]}, replace(plan, fleet=part)
    extra = fleet_head.of_features(each, 7, plan, extras)
    releases = {
        "simulated": (replace(PLAIN, fleet=FLEET, shares=extra.shares), tensors.unpack(extra.payload))
    }
    parts = [sums.of(u, c, 7, sums.uncounted(sums.keys_of(u), c, {})) for u, c in each]
    prior = sums.from_flat(np.sum([one.flat for one in parts], axis=0), parts[0].shape)
    releases["statistics"] = HeadPlan("cosine", fleet=PRIOR), {PRIOR: prior.arrays()}
    return z, {"own": (HeadPlan("cosine"), {}), **releases}


def cells(
    names: Sequence[str], data: Path, seeds: int, persons: int, rounds: int
) -> Iterator[tuple[str, str, int, str, float]]:
    """Network or method, head, labels of each exercise, test, and accuracy in per cent, of each person and seed."""
    dataset = datasets.load("watch", data)
    for name, seed, person in product(names, range(seeds), range(persons)):
        found = trained(name, dataset, person, seed, rounds)
        z, releases = heads_of(found, dataset, person, name)
        y = dataset.samples.y
        for test, (kind, (plan, extras)) in product(TESTS, releases.items()):
            labelled, tests = starts(dataset, person, seed, test)
            for k, rows in labelled.items():
                if kind == "own" and not k:
                    continue
                head = heads.fit("logistic", z[rows], y[rows], 7, unit_norm=found.method.unit_norm, plan=plan,
                                 extras=extras)  # fmt: skip
                predicted = head.logits(z[tests]).argmax(axis=1)
                yield name, kind, k, test, 100 * metrics.accuracy(predicted, y[tests])


RECIPE = """
source = "simulated"
rounds = 1
[data]
dataset = "nine"
data_dir = "{data}"
clients = 9
partition = "domain"
test_fraction = 0.01
validation_fraction = 0.0
[model]
name = "random-kernels"
options = {{ seed = {seed} }}
[method]
name = "fedrep"
[release]
heads = 2
"""


def over_a_broker(
    data: Path, folder: Path, seed: int, person: int, port: int
) -> Iterator[tuple[str, str, int, str, float]]:
    """The cells of `KERNELS` and `later` of one person, predicted by devices with CSV files."""
    dataset = datasets.load("watch", data)
    names, x, y = [str(each) for each in dataset.classes], dataset.samples.x, dataset.samples.y
    labelled, tests = starts(dataset, person, seed, "later")
    nine = np.flatnonzero(dataset.domains != person)
    arrays = npz.read(data / "watch.npz")
    # without groups: else each of the nine would keep a whole recording for tests, which nothing here asks for
    of_rows = {key: arrays[key][nine] for key in ("x", "y", "domains")}
    input = {"input": np.array(msgspec.json.encode(input_of(of_rows["x"])).decode())}
    npz.write(folder / "nine.npz", {"classes": arrays["classes"], **of_rows, **input})
    for name, rows in {**{f"k{k}": labelled[k] for k in (0, 1, 10)}, "tests": tests}.items():
        (folder / name).mkdir()
        for row in rows:
            clip = folder / name / names[y[row]] / f"{row}.csv"
            clip.parent.mkdir(exist_ok=True)
            np.savetxt(clip, x[row].T, "%.6g", ",", header=",".join(NAMES), comments="")
    (folder / "recipe.toml").write_text(RECIPE.format(data=folder, seed=seed))

    def edge_fl(*words: str) -> list[str]:
        return [sys.executable, "-m", "edge_fl", *words]

    broker = edge_fl("broker", "up", "--insecure", "--port", str(port))
    agents = [
        edge_fl("device", "run", "--id", f"k{k}", "--dir", f"device{k}", "--data", f"k{k}", "--tier", "head",
                "--port", str(port)) for k in (0, 1, 10)
    ]  # fmt: skip
    with ExitStack() as running:
        for command in (broker, *agents):
            process = running.enter_context(Popen(command, cwd=folder, stdout=DEVNULL, stderr=DEVNULL))
            running.callback(process.terminate)
        server = edge_fl("server", "run", "recipe.toml", "--port", str(port))
        check_output(server, cwd=folder, stderr=DEVNULL)
    for k in (0, 1, 10):
        asked = edge_fl("device", "predict", "tests", "--dir", f"device{k}", "--format", "csv")
        lines = csv.DictReader(check_output(asked, cwd=folder, stderr=DEVNULL, text=True).splitlines())
        right = [
            Path(line["name"]).parent.name == line["label_1"] for line in lines
        ]  # also where it says "unknown"
        assert len(right) == len(tests)
        yield KERNELS, "over a broker", k, "later", 100 * float(np.mean(right))


def table(found: Iterable[tuple[str, str, int, str, float]]) -> Table:
    """Means and standard errors over persons and seeds."""
    values: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    for name, kind, k, test, accuracy in found:
        values.setdefault((name, kind, test), {each: [] for each in LABELS})[k].append(accuracy)
    rows = [
        [*key, str(len(by[1])), *(f"{np.mean(v):.1f}" if v else "-" for v in by.values())]
        for key, by in values.items()
    ]
    headings = ["network or method", "head", "test", "n", *map(str, LABELS)]
    notes = [
        "n persons times seeds; columns: labels of each exercise. The tested windows are the same for each of them."
    ]
    return Table(headings, rows, "Accuracy, %", notes, headings[3:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a part."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.study.imu", None, __doc__, formatter_class=formatter)
    parts = parser.add_subparsers(required=True, dest="part")
    part = parts.add_parser("convert")
    part.add_argument("file", type=Path)
    part.add_argument("--out", type=Path, default=Path("imu"))
    part = parts.add_parser("run")
    part.add_argument("--data", type=Path, default=Path("imu/data"), help="folder of watch.npz")
    part.add_argument(
        "--methods", default=KERNELS, help=f"comma-separated: {KERNELS}, or methods that train cnn1d"
    )
    part.add_argument("--seeds", type=int, default=3)
    part.add_argument("--persons", type=int, default=10)
    part.add_argument("--rounds", type=int, default=20)
    part = parts.add_parser("fleet")
    part.add_argument("--data", type=Path, default=Path("imu/data"), help="folder of watch.npz")
    part.add_argument("--seeds", type=int, default=1)
    part.add_argument("--persons", type=int, default=10)
    part.add_argument("--port", type=int, default=18830)
    options = parser.parse_args(arguments)
    if options.part == "fleet":
        found = []
        for seed, person in product(range(options.seeds), range(options.persons)):
            with tempfile.TemporaryDirectory() as folder:
                found += over_a_broker(options.data.absolute(), Path(folder), seed, person, options.port)
        sys.stdout.write(tables.markdown(table(found)) + "\n")
        return
    if options.part == "convert":
        convert(options.file, options.out)
        return
    with threadpool_limits(1):
        found = cells(
            options.methods.split(","), options.data, options.seeds, options.persons, options.rounds
        )
        sys.stdout.write(tables.markdown(table(found)) + "\n")


if __name__ == "__main__":
    logging.getLogger("edge_fl_server").setLevel(logging.ERROR)
    main()
