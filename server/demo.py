"""The demo: a broker, a server and a fleet of simulated devices, started as anybody would start them, and what came of it.

The three are the real commands in processes of their own. Meanwhile this process computes what the fleet is to be compared with, on the
same split, the same clients and the same test sets: Local, FedAvg+FT, and a head on raw pixels.
"""

from __future__ import annotations

import csv
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace

from edge_fl import config, heads, metrics
from edge_fl.config import MethodConfig, Recipe
from edge_fl.console.output import print_status
from edge_fl.data import datasets
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import ConfigError
from edge_fl.metrics import summarise
from server import recipes
from server.children import Children
from server.orchestrate.execute import simulate
from server.runs import totals
from server.training import study as studies
from server.training.study import Study

DEADLINE_S = 900.0
SAMPLES_PER_DEVICE = 250
# three processes share this machine: one thread each is faster than many that fight
QUIET_THREADS = {"OMP_NUM_THREADS": "1"}

DEVICE_COLUMNS = {name: totals.COLUMNS[name] for name in totals.COLUMNS if name not in ("release", "machine")}
COMPARISON_COLUMNS = {
    "what": "personal test accuracy",
    "clients": "clients",
    "mean": "mean",
    "std": "std",
    "bottom_decile": "bottom decile",
}
IDENTITIES = "identities"
PLAINTEXT: dict[str, list[str]] = {"broker": ["--insecure"], "fleet": [], "server": []}
RIVALS = {"Local": "local", "FedAvg+FT": "fedavg+ft"}
PIXEL_HEAD = "logistic"


@dataclass(frozen=True)
class DemoOptions:
    """What was asked for; None where the recipe decides."""

    dataset: str = "digits"
    data_dir: Path = Path(".data")
    devices: int = 12
    full: int = 4
    rounds: int | None = None
    port: int | None = None
    runs: Path = Path("runs")
    keep: bool = False
    secure: bool = False


@dataclass(frozen=True)
class DemoResult:
    """What the command prints."""

    histogram: str
    devices: Sequence[Mapping[str, object]]
    comparison: Sequence[Mapping[str, object]]
    note: str
    path: Path
    seconds: float


def run(options: DemoOptions) -> DemoResult:
    """Runs it. Raises what the commands raise, DataError before anything is started."""
    begin_s = time.monotonic()
    recipe = recipe_of(options)
    study = studies.prepare(recipe)
    with _folder(options) as folder, Children(_tell, QUIET_THREADS) as children:
        if options.secure:
            _enrol(options, folder)
        for name, arguments in commands(options, recipe, folder).items():
            server = children.start(name, *arguments)
        rivals = baselines(study)
        path = Path(children.wait(server, DEADLINE_S).splitlines()[-1])
    rows = read_devices(path)
    seconds = time.monotonic() - begin_s
    return DemoResult(study.histogram(), rows, compare(rows, rivals), _note(options, recipe), path, seconds)


def recipe_of(options: DemoOptions) -> Recipe:
    """The recipe "demo" with what was asked for; of a large dataset a part, so that it stays a demo. Raises ConfigError, DataError."""
    if not 0 < options.full < options.devices:
        raise ConfigError(
            f"{options.full} full devices of {options.devices}: expected one at least, and a head-only one beside them"
        )
    samples = len(datasets.load(options.dataset, options.data_dir).samples)
    settings = {
        "data.dataset": options.dataset,
        "data.data_dir": options.data_dir.absolute(),
        "data.clients": options.devices,
        "data.fraction": min(1.0, SAMPLES_PER_DEVICE * options.devices / samples),
        "cohort.min_devices": options.full,
        "broker.port": options.port or _free_port(),
    }
    if options.rounds:
        settings |= {"rounds": options.rounds, "release.every": max(options.rounds - 1, 1)}
    return config.with_settings(recipes.find("demo"), [f"{key}={value}" for key, value in settings.items()])


def commands(options: DemoOptions, recipe: Recipe, folder: Path) -> dict[str, list[str]]:
    """The three commands by name; they find one another in whatever order they start."""
    data, port = recipe.data, recipe.broker.port
    file = folder / "recipe.toml"
    file.write_text(config.dump(recipe))
    devices = {
        "head": options.devices - options.full,
        "full": options.full,
        "seed": recipe.seed,
        "port": port,
        "dir": folder / "fleet",
    }
    split = {name: getattr(data, name) for name in ("dataset", "data_dir", "partition", "beta", "fraction")}
    trust = _trust(folder / IDENTITIES) if options.secure else PLAINTEXT
    return {
        "broker": ["broker", "up", *trust["broker"], *_options(port=port, dir=folder / "broker")],
        "fleet": ["fleet", "up", *trust["fleet"], *_options(**devices, **split)],
        "server": [
            "server",
            "run",
            str(file),
            *trust["server"],
            *_options(runs=options.runs, home=folder / "releases"),
        ],
    }


def _enrol(options: DemoOptions, folder: Path) -> None:
    """Ends before the others start, which need what it makes."""
    with Children(_tell, QUIET_THREADS) as children:
        children.wait(children.start("enrol", *enrolment(options, folder)), DEADLINE_S)


def enrolment(options: DemoOptions, folder: Path) -> list[str]:
    """What makes the certificates of broker, server and devices."""
    return [
        "fleet",
        "enrol",
        "--baked",
        *_options(count=options.devices, prefix="sim-", home=folder / IDENTITIES),
    ]


def _trust(home: Path) -> dict[str, list[str]]:
    """The options by which each command finds its identity."""
    return {
        "broker": _options(home=home),
        "fleet": _options(identities=home / "devices"),
        "server": _options(identity=home / "server"),
    }


def baselines(study: Study) -> dict[str, dict[str, float]]:
    """Personal test accuracy by client, for each rival: simulated here, where every client trains."""
    torch.set_num_threads(1)
    ours, found = study.recipe.method, {}
    quick = Study(replace(study.recipe, evaluate_every=0), study.dataset, study.split)
    for title, name in RIVALS.items():
        method = MethodConfig(name, ours.epochs, ours.batch_size, ours.optimiser)
        final = simulate(quick.with_method(method)).final
        found[title] = {client: report[metrics.PERSONAL_AFTER] for client, report in final.items()}
        _tell("here", f"{title} simulated on the same split")
    classes = len(study.dataset.classes)
    found[f"{PIXEL_HEAD} head on raw pixels"] = {
        id: raw_pixels(data, classes) for id, data in study.data().items()
    }
    return found


def raw_pixels(data: ClientData, classes: int) -> float:
    """Test accuracy of a head without any extractor, on a client's flattened 0..1 pixels."""
    head = heads.fit(PIXEL_HEAD, _flat(data.train), data.train.y, classes, unit_norm=False)
    return metrics.accuracy(head.predict(_flat(data.test)), data.test.y)


def read_devices(path: Path) -> list[dict[str, object]]:
    """devices.csv of a run, its numbers as numbers."""
    with (path / "devices.csv").open(newline="") as file:
        return [{name: _number(text) for name, text in row.items()} for row in csv.DictReader(file)]


def compare(
    rows: Sequence[Mapping[str, object]], rivals: Mapping[str, Mapping[str, float]]
) -> list[dict[str, object]]:
    """The fleet beside its rivals: over all clients, and over those whose device is head-only. Device i has client i's data."""
    after = [row["after"] if isinstance(row["after"], float) else float("nan") for row in rows]
    is_head = [row["tier"] == "head" for row in rows]
    lines = []
    for what, values in {
        "this fleet": after,
        **{title: [found[c] for c in sorted(found)] for title, found in rivals.items()},
    }.items():
        for whose, chosen in (
            ("all", values),
            ("head-only", [v for v, head in zip(values, is_head, strict=True) if head]),
        ):
            summary = summarise(chosen)
            numbers = {name: getattr(summary, name) for name in ("clients", "mean", "std", "bottom_decile")}
            lines.append({"what": f"{what}, {whose}", **numbers})
    return lines


@contextmanager
def _folder(options: DemoOptions) -> Iterator[Path]:
    """Where broker, devices and signing keys live for the time of the demo."""
    options.runs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=options.runs)).absolute()
    try:
        yield folder
    finally:
        if options.keep:
            print_status(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _note(options: DemoOptions, recipe: Recipe) -> str:
    return (
        f"{recipe.method.name} trained its extractor on the {options.full} full devices alone, over MQTT;"
        f" the {options.devices - options.full} head-only devices fitted heads on it.\n"
        f"Local and FedAvg+FT are simulated, with all {options.devices} clients training. All are measured on the same test sets."
    )


def _options(**values: object) -> list[str]:
    """["--data-dir", ".data", ...] of data_dir=".data", ..."""
    return [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tell(name: str, line: str) -> None:
    print_status(f"{name:<6} | {line}")


def _flat(samples: Samples):  # type: ignore[no-untyped-def]
    return samples.x.reshape(len(samples), -1).astype("float32") / 255


def _number(text: str) -> object:
    if not text:
        return None
    try:
        return float(text) if "." in text or "e" in text else int(text)
    except ValueError:
        return text
