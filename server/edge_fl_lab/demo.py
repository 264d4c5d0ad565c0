"""The demo: a broker, a server and a fleet of simulated devices, each the real command in a process of its own.

Meanwhile this process computes baselines on the same split, clients and test sets: Local, FedAvg+FT, and a head on raw pixels.
"""

import os
import shutil
import socket
import sqlite3
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from msgspec.structs import replace

from edge_fl import heads, metrics
from edge_fl.config import MethodConfig
from edge_fl.console import units
from edge_fl.console.output import print_status
from edge_fl.console.tables import Column, Columns
from edge_fl.data import datasets
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import ConfigError, ConnectError
from edge_fl.files import paths
from edge_fl.metrics import summarise
from edge_fl_lab.report import facts, page
from edge_fl_server import recipes
from edge_fl_server.children import LOOPBACK, CommandProcess, CommandProcesses
from edge_fl_server.orchestrate.execution import simulate
from edge_fl_server.recipes.recipe import Recipe, dump, with_settings
from edge_fl_server.registry.database import location
from edge_fl_server.runs import round_metrics
from edge_fl_server.runs.results import Results
from edge_fl_server.runs.round_metrics import RoundMetrics
from edge_fl_server.training import studies
from edge_fl_server.training.studies import Study

DEADLINE_S = 900.0
SAMPLES_PER_DEVICE = 250
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # faster for processes that share the cores of one machine

DEVICE_COLUMNS: Columns = {
    **{name: name for name in ("device", "tier", "head", "samples")},
    "before": Column("before", units.percent),
    "after": Column("after", units.percent),
    "bytes_down": Column("down", units.size),
    "bytes_up": Column("up", units.size),
    "seconds": Column("seconds", "{:.1f}".format, rank=1),
}
STATISTICS = ("clients", "mean", "std", "bottom_decile")
COMPARISON_COLUMNS: Columns = {
    "model": "personal test accuracy",
    "clients": "clients",
    **{name: Column(name.replace("_", " "), units.percent) for name in STATISTICS[1:]},
}
REGISTRY = "registry.sqlite"
IDENTITIES, RELEASES = "identities", "releases"
PREFIX = "files-of-demo-"  # not "demo-", with which the folders of results begin
PLAINTEXT: dict[str, list[str]] = {"broker": ["--insecure"], "fleet": [], "server": []}
BASELINES = {"Local": "local", "FedAvg+FT": "fedavg+ft"}
PIXEL_HEAD = "logistic"


@dataclass(frozen=True)
class DemoOptions:
    """The command's options; None: as in the recipe."""

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
    """The command's output."""

    histogram: str
    devices: Sequence[Mapping[str, object]]
    comparison: Sequence[Mapping[str, object]]
    note: str
    verdict: str
    path: Path
    seconds: float


def run(options: DemoOptions) -> DemoResult:
    """Run the demo. Raises the commands' errors, DataError before anything starts."""
    start_s = time.monotonic()
    recipe = recipe_of(options)
    study = studies.prepare(recipe)
    _require_free(recipe.broker.port)
    with _DemoFolder(options) as folder, CommandProcesses(folder.print_line, ONE_THREAD) as children:
        if options.secure:
            _enrol(options, folder)
        server = _start(children, options, recipe, folder.path)
        accuracies = baselines(study)
        path = Path(children.wait(server, DEADLINE_S).splitlines()[-1])
        _keep_registry(folder.path, path)
    record_local_only(path, accuracies["Local"])
    results = Results.open(path)
    rows = [{name: _number(text) for name, text in row.items()} for row in results.devices()]
    seconds = time.monotonic() - start_s
    note = _note(options, recipe)
    report = page.report(results)
    verdict = f"{report.verdict} {facts.lowest(report.groups)}"
    return DemoResult(study.histogram(), rows, compare(rows, accuracies), note, verdict, path, seconds)


def recipe_of(options: DemoOptions) -> Recipe:
    """Apply the options to the recipe "demo"; of a large dataset only a part is used. Raises ConfigError, DataError."""
    if not 0 < options.full < options.devices:
        raise ConfigError(
            f"{options.full} full devices of {options.devices}: expected at least one, and at least one head-only device"
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
    return with_settings(recipes.find("demo"), [f"{key}={value}" for key, value in settings.items()])


def commands(options: DemoOptions, recipe: Recipe, folder: Path) -> dict[str, list[str]]:
    """The three commands by name. They may start in any order, but before the broker the others report a refused connection."""
    data, port = recipe.data, recipe.broker.port
    file = folder / "recipe.toml"
    file.write_text(dump(recipe))
    devices = {
        "head_only": options.devices - options.full,
        "full": options.full,
        "port": port,
        "dir": folder / "fleet",
        "dataset": data.dataset,
        "data_dir": data.data_dir,
    }
    split = {f"data.{name}": getattr(data, name) for name in ("partition", "beta", "fraction")} | {
        "seed": recipe.seed
    }
    settings = [part for key, value in split.items() for part in ("--set", f"{key}={value}")]
    trust = _trust(folder / IDENTITIES) if options.secure else PLAINTEXT
    outputs = _options(runs=options.runs, home=folder / RELEASES)
    return {
        "broker": ["broker", "up", *trust["broker"], *_options(port=port, dir=folder / "broker")],
        "fleet": ["fleet", "up", *trust["fleet"], *_options(**devices), *settings],
        "server": ["server", "run", os.fspath(file), *trust["server"], *outputs],
    }


def _start(children: CommandProcesses, options: DemoOptions, recipe: Recipe, folder: Path) -> CommandProcess:
    """Start the broker and, when it accepts connections, the fleet and the server; return the server."""
    arguments, port = commands(options, recipe, folder), recipe.broker.port
    broker = children.start("broker", *_quiet(options), *arguments["broker"])
    children.wait_listening(broker, port, DEADLINE_S)
    if not options.keep:
        security = "mTLS, a certificate per client" if options.secure else "plaintext, loopback only"
        _print_line("broker", f"mosquitto accepts connections on {LOOPBACK}:{port} ({security})")
    children.start("fleet", *arguments["fleet"])
    return children.start("server", *arguments["server"])


def _enrol(options: DemoOptions, folder: "_DemoFolder") -> None:
    """Must finish before the commands start: they use the certificates."""
    with CommandProcesses(folder.print_line, ONE_THREAD) as children:
        command = [*_quiet(options), *enrolment(options, folder.path)]
        children.wait(children.start("enrol", *command), DEADLINE_S)
    if not options.keep:
        _print_line("enrol", f"certificates for the broker, the server and {options.devices} devices")


def _quiet(options: DemoOptions) -> list[str]:
    """Option of the broker and of the enrolment, whose status lines name files that are kept only on request."""
    return [] if options.keep else ["--quiet"]


def enrolment(options: DemoOptions, folder: Path) -> list[str]:
    """The command that creates the certificates of broker, server and devices."""
    settings = _options(count=options.devices, prefix="sim-", identities=folder / IDENTITIES)
    return ["fleet", "enrol", "--baked", *settings]


def _trust(home: Path) -> dict[str, list[str]]:
    """The options for each command's identity."""
    return {
        "broker": _options(identities=home),
        "fleet": _options(identity=home / "devices"),
        "server": _options(identity=home / "server"),
    }


def baselines(study: Study) -> dict[str, dict[str, float]]:
    """Personal test accuracy by client for each baseline; simulated, with every client training."""
    torch.set_num_threads(1)
    config, accuracies = study.recipe.method, {}
    quick = Study(replace(study.recipe, evaluate_every=0), study.dataset, study.split)
    for title, name in BASELINES.items():
        method = MethodConfig(name, config.epochs, config.batch_size, config.optimiser)
        final = simulate(quick.with_method(method)).final
        accuracies[title] = {client: report[metrics.PERSONAL_AFTER] for client, report in final.items()}
        _print_line("demo", f"{title} simulated on the same split")
    classes = len(study.dataset.classes)
    accuracies[f"{PIXEL_HEAD} head on raw pixels"] = {
        client: raw_pixels(data, classes) for client, data in study.data().items()
    }
    return accuracies


def raw_pixels(data: ClientData, classes: int) -> float:
    """Test accuracy of a head on a client's flattened pixels in 0..1, without an extractor."""
    head = heads.fit(PIXEL_HEAD, _flat(data.train), data.train.y, classes, unit_norm=False)
    return metrics.accuracy(head.predict(_flat(data.test)), data.test.y)


def record_local_only(path: Path, local: Mapping[str, float]) -> None:
    """Add the accuracy of Local to the final line of a run, and rewrite its report. Device i has client i's data."""
    results = Results.open(path)
    state = results.state()
    devices = [row["device"] for row in results.devices()]
    final = next(line for line in reversed(round_metrics.lines(path / round_metrics.FILE)) if line.final)
    of_device = dict(zip(devices, (local[client] for client in sorted(local)), strict=True))
    clients = {
        device: {**report, metrics.LOCAL_ONLY: of_device[device]} for device, report in final.clients.items()
    }
    with Results.resume(path) as results:
        summaries = metrics.summarise_reports(list(clients.values()))
        results.append_round(RoundMetrics(round=final.round, final=True, metrics=summaries, clients=clients))
        results.finish("completed", state.reason)
    page.write(results)


def compare(
    rows: Sequence[Mapping[str, object]], baselines: Mapping[str, Mapping[str, float]]
) -> list[dict[str, object]]:
    """Compare the fleet with the baselines, over all clients and over head-only ones. Device i has client i's data."""
    is_head = [row["tier"] == "head" for row in rows]
    after = [row["after"] if isinstance(row["after"], float) else float("nan") for row in rows]
    accuracies = {"this fleet": after}
    accuracies |= {
        title: [values[client] for client in sorted(values)] for title, values in baselines.items()
    }
    lines: list[dict[str, object]] = []
    for title, values in accuracies.items():
        head_only = [value for value, head in zip(values, is_head, strict=True) if head]
        for group, chosen in (("all", values), ("head-only", head_only)):
            summary = summarise(chosen)
            statistics = {name: getattr(summary, name) for name in STATISTICS}
            lines.append({"model": f"{title}, {group}", **statistics})
    return lines


class _DemoFolder:
    """A temporary folder for the broker, the devices and the signing keys, as a context manager.

    It is removed at the end unless it was asked for or a printed line names it: what a person reads must exist.
    """

    def __init__(self, options: DemoOptions) -> None:
        options.runs.mkdir(parents=True, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=options.runs)).absolute()
        self._keep = options.keep

    def print_line(self, name: str, line: str) -> None:
        """Print a line of a child."""
        self._keep |= os.fspath(self.path) in line
        _print_line(name, line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._keep:
            print_status(f"kept: {paths.text(self.path)}")
        else:
            shutil.rmtree(self.path, ignore_errors=True)


def _keep_registry(folder: Path, path: Path) -> None:
    """Copy the registry to the folder of the results, where the dashboard can show it."""
    with (
        closing(sqlite3.connect(location("", folder / RELEASES))) as registry,
        closing(sqlite3.connect(path / REGISTRY)) as copy,
    ):
        registry.backup(copy)


def _note(options: DemoOptions, recipe: Recipe) -> str:
    return (
        f"{recipe.method.name} trained its extractor on the {options.full} full devices alone, over MQTT;"
        f" the {options.devices - options.full} head-only devices fitted heads on it.\n"
        f"Local and FedAvg+FT are simulated, with all {options.devices} clients training. All use the same test sets."
    )


def _options(**values: object) -> list[str]:
    """Format options: data_dir=".data" -> ["--data-dir", ".data"]."""
    return [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _require_free(port: int) -> None:
    """Raise ConnectError if the port is taken: its owner would be mistaken for the demo's broker."""
    try:
        with socket.create_server((LOOPBACK, port)):
            pass
    except OSError as error:
        raise ConnectError(
            f"port {port} on {LOOPBACK}: {error.strerror}; expected a free port (choose with --port)",
            "no broker was started",
        ) from error


def _print_line(name: str, line: str) -> None:
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
