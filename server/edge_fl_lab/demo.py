"""The demo: a broker, a server and a fleet of simulated devices, each the real command in a process of its own.

Full devices train; head-only devices with a few labelled images each adapt the head that comes with the release. Then a release that is no
good is published, which a gate stops, and at last the broker ends, and a device predicts without it. Meanwhile this process computes
what each device reaches alone, on the same images. It imports torch, as the report does, only when no other process is busy with that.
"""

import json
import os
import shutil
import socket
import sqlite3
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import onnx
from onnx import numpy_helper

from edge_fl import metrics
from edge_fl.console.output import print_status
from edge_fl.console.units import counted
from edge_fl.data import datasets, partition
from edge_fl.data.partition import Split
from edge_fl.data.samples import ClientData, Dataset
from edge_fl.errors import ConfigError, ConnectError
from edge_fl.files import paths
from edge_fl.fleet import simulated
from edge_fl.seeds import generator
from edge_fl_lab import demo_data
from edge_fl_lab.demo_data import DemoFigures
from edge_fl_server import recipes
from edge_fl_server.children import LOOPBACK, CommandProcess, CommandProcesses
from edge_fl_server.orchestrate.ending import HEADINGS
from edge_fl_server.recipes.recipe import Recipe, dump, with_settings
from edge_fl_server.registry import Database, registered_devices, rollouts
from edge_fl_server.registry.database import location
from edge_fl_server.release.repository import Repository
from edge_fl_server.runs import round_metrics
from edge_fl_server.runs.results import Results
from edge_fl_server.runs.round_metrics import RoundMetrics

DEADLINE_S = 900.0
SILENT = ("publish", "predict")
GATED = 3
"""Exit code of a roll-out that a gate ended."""
REASON = 68  # characters of a line of a reason, for a terminal of 80
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # faster for processes that share the cores of one machine
FLEET = "main"
REGISTRY = "registry.sqlite"
IDENTITIES, RELEASES, DEVICES = "identities", "releases", "fleet"
SHUFFLED, IMAGES = "shuffled.onnx", "images.npz"
PREFIX = "files-of-demo-"  # not "demo-", with which the folders of results begin
SPLITS = "split-of-demo"
PLAINTEXT: dict[str, list[str]] = {"broker": ["--insecure"], "fleet": [], "server": []}


@dataclass(frozen=True)
class DemoOptions:
    """The command's options; None: as in the recipe. `settings`: of the recipe, such as "seed=1"."""

    dataset: str = "digits"
    data_dir: Path = Path(".data")
    devices: int = 28
    full: int = 4
    rounds: int | None = None
    settings: tuple[str, ...] = ()
    port: int | None = None
    runs: Path = Path("runs")
    keep: bool = False
    secure: bool = False


@dataclass(frozen=True)
class DemoPlan:
    """What runs: the recipe, and its dataset divided over the devices."""

    recipe: Recipe
    dataset: Dataset
    split: Split

    def data(self) -> dict[str, ClientData]:
        """The images of each device."""
        return {name: self.split.client(self.dataset, name) for name in self.split.clients}

    def histogram(self) -> str:
        """Images per device and class, as text."""
        return partition.described(self.dataset, self.split)


@dataclass(frozen=True)
class DemoResult:
    """The command's output. `histogram`: images per device and class."""

    figures: DemoFigures
    histogram: str
    path: Path
    seconds: float


def run(options: DemoOptions) -> DemoResult:
    """Run the demo. Raises the commands' errors, DataError before anything starts."""
    start_s = time.monotonic()
    options = replace(options, port=options.port or _free_port())
    _require_free(options.port or 0)
    plan = prepare(options)
    recipe = plan.recipe
    heads = f"{options.devices - options.full} head-only with {demo_data.OWN_LABELS} labels each"
    _print_line("demo", f"{counted(options.full, 'device')} train on {plan.dataset.name}, {heads}")
    with _DemoFolder(options) as folder, CommandProcesses(folder.print_line, ONE_THREAD) as children:
        if options.secure:
            _enrol(options, folder)
        broker, server = _start(children, options, plan, folder.path)
        local = demo_data.alone(plan.data(), len(plan.dataset.classes))
        path = Path(children.wait(server, DEADLINE_S).splitlines()[-1])
        _write_shuffled(folder.path, recipe.seed)
        bad = children.start("publish", "--quiet", *commands(options, plan, folder.path)["publish"])
        head_only = [row["device"] for row in Results.open(path).devices() if row["tier"] == "head"]
        final = record_local_only(path, local)
        _show_gate(children, bad, options, folder.path)
        _keep_registry(folder.path, path)
        children.end(broker)
        _print_line("broker", f"stopped: all {options.devices} devices are offline")
        _predict_offline(children, plan, head_only[0], folder.path)
    figures = demo_data.figures(final, head_only)
    return DemoResult(figures, plan.histogram(), path, time.monotonic() - start_s)


def prepare(options: DemoOptions) -> DemoPlan:
    """The recipe "demo" with the options, and the images divided over the devices. Raises ConfigError, DataError."""
    if not 0 < options.full < options.devices:
        raise ConfigError(
            f"{options.full} full devices of {options.devices}: expected at least one, and at least one head-only device"
        )
    recipe = with_settings(recipes.find("demo"), options.settings)
    dataset = datasets.load(options.dataset, options.data_dir)
    split = demo_data.divide(dataset, options.devices, options.full, recipe.seed)
    name = f"{SPLITS}-{dataset.name}-{options.devices}-{options.full}-seed-{recipe.seed}.csv"
    file = (options.runs / name).absolute()
    split.write_csv(file)
    settings = {
        "data.dataset": options.dataset,
        "data.data_dir": options.data_dir.absolute(),
        "data.clients": options.devices,
        "data.split": file,
        "cohort.min_devices": options.full,
        "release.every": 0,
        "release.heads": options.devices - options.full,
        "broker.port": options.port or 0,
        "broker.fleet": FLEET,
    }
    if options.rounds:
        settings["rounds"] = options.rounds
    recipe = with_settings(recipe, [f"{key}={value}" for key, value in settings.items()])
    return DemoPlan(recipe, dataset, split)


def commands(options: DemoOptions, plan: DemoPlan, folder: Path) -> dict[str, list[str]]:
    """The commands by name. They may start in any order, but before the broker the others report a refused connection."""
    recipe, data, port = plan.recipe, plan.recipe.data, plan.recipe.broker.port
    file = folder / "recipe.toml"
    file.write_text(dump(recipe))
    devices = {
        "head_only": options.devices - options.full,
        "full": options.full,
        "heads": "logistic",
        "port": port,
        "dir": folder / DEVICES,
        "dataset": data.dataset,
        "data_dir": data.data_dir,
    }
    settings = [
        part for each in (f"data.split={data.split}", f"seed={recipe.seed}") for part in ("--set", each)
    ]
    trust = _trust(folder / IDENTITIES) if options.secure else PLAINTEXT
    outputs = _options(runs=options.runs, home=folder / RELEASES)
    classes = ",".join(plan.dataset.classes)
    publish = [os.fspath(folder / SHUFFLED), *_options(classes=classes, port=port, home=folder / RELEASES)]
    return {
        "broker": ["broker", "up", *trust["broker"], *_options(port=port, dir=folder / "broker")],
        "fleet": ["fleet", "up", *trust["fleet"], *_options(**devices), *settings],
        "server": ["server", "run", os.fspath(file), *trust["server"], *outputs],
        "publish": ["release", "publish", *publish, *trust["server"]],
    }


def _start(
    children: CommandProcesses, options: DemoOptions, plan: DemoPlan, folder: Path
) -> tuple[CommandProcess, CommandProcess]:
    """Start the broker and, when it accepts connections, the fleet and the server -> broker and server."""
    arguments, port = commands(options, plan, folder), plan.recipe.broker.port
    broker = children.start("broker", *_quiet(options), *arguments["broker"])
    children.wait_listening(broker, port, DEADLINE_S)
    if not options.keep:
        security = "mTLS, a certificate per client" if options.secure else "plaintext, on this machine only"
        _print_line("broker", f"mosquitto on {LOOPBACK}:{port}, {security}")
    children.start("fleet", "--quiet", *arguments["fleet"])
    return broker, children.start("server", *arguments["server"])


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
    settings = _options(count=options.devices, prefix=simulated.PREFIX, identities=folder / IDENTITIES)
    return ["fleet", "enrol", "--baked", *settings]


def _trust(home: Path) -> dict[str, list[str]]:
    """The options for each command's identity."""
    return {
        "broker": _options(identities=home),
        "fleet": _options(identity=home / "devices"),
        "server": _options(identity=home / "server"),
    }


def _write_shuffled(folder: Path, seed: int) -> None:
    """Write the newest released network with the weights of each layer in another order: a release that is no good."""
    repository, rng = Repository.existing(folder / RELEASES, FLEET), generator(seed, "demo.shuffled")
    model = onnx.load(repository.artefacts / repository.releases()[-1].extractor.sha256)
    for tensor in model.graph.initializer:
        weights = numpy_helper.to_array(tensor)
        if weights.ndim > 1:
            tensor.CopyFrom(
                numpy_helper.from_array(rng.permuted(weights.ravel()).reshape(weights.shape), tensor.name)
            )
    onnx.save(model, folder / SHUFFLED)


def record_local_only(path: Path, local: Mapping[str, float]) -> Mapping[str, Mapping[str, float]]:
    """Add what each device reaches alone to the final line of a run, and rewrite its report -> the line's metrics by device."""
    from edge_fl_lab.report import page  # imports torch

    results = Results.open(path)
    state = results.state()
    final = next(line for line in reversed(round_metrics.lines(path / round_metrics.FILE)) if line.final)
    clients = {
        device: {**report, metrics.LOCAL_ONLY: local[device]} for device, report in final.clients.items()
    }
    with Results.resume(path) as results:
        summaries = metrics.summarise_reports(list(clients.values()))
        results.append_round(RoundMetrics(round=final.round, final=True, metrics=summaries, clients=clients))
        results.finish("completed", state.reason)
    page.write(results)
    return clients


def _show_gate(children: CommandProcesses, bad: CommandProcess, options: DemoOptions, folder: Path) -> None:
    """Wait for the roll-out of the bad release, and print whether a gate stopped it; in a small fleet no loss is certain enough."""
    children.wait(bad, DEADLINE_S, (0, GATED))
    with closing(Database.existing(location("", folder / RELEASES))) as db:
        (newest, *_) = rollouts.listed(db, FLEET)
        if newest.state == "aborted":
            _print_line("gate", f"release {newest.release}, with shuffled weights, is stopped:")
            for line in textwrap.wrap(newest.reason, REASON):
                _print_line("gate", f"  {line}")
        else:
            _print_line("gate", f"release {newest.release}, with shuffled weights: {newest.state}")
        serving = Counter(record.release for record in registered_devices.listed(db, FLEET))
    heads = options.devices - options.full
    for release, devices in sorted(serving.items()):
        if release:
            _print_line("gate", f"{devices} of {counted(heads, 'head-only device')} serve release {release}")


def _predict_offline(children: CommandProcesses, plan: DemoPlan, device: str, folder: Path) -> None:
    """Predict the test images of a device that has no broker, with the command for one device."""
    test = plan.data()[device].test
    demo_data.write_images(folder / IMAGES, test)
    given = [os.fspath(folder / IMAGES), *_options(dir=folder / DEVICES / device, format="json")]
    command = children.start("predict", "--quiet", "device", "predict", *given)
    found = json.loads(children.wait(command, DEADLINE_S))
    names = [str(plan.dataset.classes[label]) for label in test.y]
    right = sum(each["top"][0]["label"] == name for each, name in zip(found, names, strict=True))
    _print_line(device, f"still predicts: {right} of its {len(names)} test images right")


class _DemoFolder:
    """A temporary folder for the broker, the devices and the signing keys, as a context manager.

    It is removed at the end unless it was asked for or a printed line names it: what a person reads must exist.
    """

    def __init__(self, options: DemoOptions) -> None:
        options.runs.mkdir(parents=True, exist_ok=True)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=options.runs)).absolute()
        self._keep = options.keep

    def print_line(self, name: str, line: str) -> None:
        """Print a line of a child, unless the demo says it in its own words."""
        if name in SILENT or line.partition(":")[0] in HEADINGS:
            return
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
    print_status(f"{name:<7} | {line}")
