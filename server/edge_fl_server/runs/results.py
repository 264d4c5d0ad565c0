"""A run's results folder: everything a run writes, readable while it goes on, with the state it ended in.

    RUN/config.toml             the recipe, every value written out
    RUN/manifest.json           what it ran on: versions, seed, commit, data hash, source, engine
    RUN/state.json              running, completed, failed, stopped or budget_exhausted (privacy), and the reason
    RUN/round_metrics.jsonl     one JSON object per round (NaN is null), and one for the final personalisation
    RUN/metrics_summary.json    metric name -> mean, weighted_mean, std, bottom_decile, clients; and the source
    RUN/devices.csv             one line per device
    RUN/statistics.json         the sum of class statistics, if there is one: its devices, bytes, pictures
    RUN/report.html             everything in one page, once the run is over
    RUN/checkpoints/, artefacts/, plots/
    RUN/tensorboard/, mlflow/   the rounds for these trackers, if requested (`edge_fl_server.runs.round_metrics`)

A running process holds a lock on the round metrics, so that a run whose process died is not shown as running.
"""

import csv
import fcntl
import os
import platform
import re
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

import msgspec
from msgspec import Struct

import edge_fl
from edge_fl.console.tables import csv_text
from edge_fl.errors import InputError, RunError, StoppedError, nearest
from edge_fl.files import atomic, paths
from edge_fl.metrics import Summary
from edge_fl.signals import stop_of
from edge_fl.untrusted import NOT_JSON
from edge_fl_server.recipes.recipe import Recipe, Source, dump, load
from edge_fl_server.runs import round_metrics
from edge_fl_server.runs.round_metrics import Opener, RoundLine, RoundMetrics, Tracking
from edge_fl_server.training.records import EngineTiming

LIBRARIES = (
    "numpy",
    "scikit-learn",
    "torch",
    "torchvision",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "msgspec",
    "paho-mqtt",
    "safetensors",
)
GIT_DEADLINE_S = 10.0
FOLDERS = ("checkpoints", "artefacts")
Outcome = Literal["completed", "failed", "stopped", "budget_exhausted"]


class Commit(Struct, frozen=True):
    """The commit that was checked out; `dirty` when tracked files differed from it."""

    sha: str
    dirty: bool


class Provenance(Struct, frozen=True):
    """Versions by library ("" when not installed), the machine, and the commit, None when this is no checkout."""

    edge_fl: str
    python: str
    machine: str
    libraries: dict[str, str]
    commit: Commit | None


def provenance() -> Provenance:
    """The provenance of this process. Imports none of the libraries."""
    return Provenance(
        edge_fl.__version__,
        platform.python_version(),
        platform.platform(),
        {name: _version(name) for name in LIBRARIES},
        commit(Path(edge_fl.__file__).parent),
    )


def commit(package: Path) -> Commit | None:
    """The commit a package's folder is checked out from; None outside a checkout, or without git."""
    try:
        # Untracked: an environment inside somebody else's checkout.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        sha = _git(package, "rev-parse", "HEAD").strip()
        return Commit(sha, bool(_git(package, "status", "--porcelain", "--untracked-files=no")))
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", os.fspath(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_DEADLINE_S)
    return done.stdout


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


class RunState(Struct, frozen=True, forbid_unknown_fields=True):
    """State of a run. `reason` is empty while it runs; of a completed run it says what could not be measured."""

    state: Literal["running", "completed", "failed", "stopped", "budget_exhausted"]
    reason: str = ""


class RunSum(Struct, frozen=True):
    """A sum of class statistics on a release: the devices in it, the bytes that each sent, and the pictures that it counts.

    `masked`: the server knows the sum alone. `epsilon` is 0 without noise.
    """

    release: int
    devices: tuple[str, ...]
    bytes_each: int
    masked: bool
    pictures: int
    epsilon: float = 0.0


class RunManifest(Struct, frozen=True):
    """Provenance of the results. `created` is UTC; it names the run and orders lists, nothing else depends on it.

    `engine` is the engine that trained the simulated clients, empty before round 1 and without simulated clients. `engine_timing` says why
    "auto" chose it, with the machine's load at that time.
    """

    run: str
    created: str
    source: Source
    seed: int
    data_hash: str
    provenance: Provenance
    engine: str = ""
    engine_timing: EngineTiming | None = None


class RunInfo(Struct, frozen=True):
    """A run in a list."""

    run: str
    created: str
    method: str
    dataset: str
    source: Source
    state: str
    reason: str


class Results:
    """One run's folder. `create` and `resume` open it for writing and hold its lock until `close`; `open` is read-only.

    As a context manager it finishes the run when the block ends: completed, stopped by the keyboard, or failed with the error as reason.
    """

    def __init__(self, path: Path, rounds: BinaryIO | None = None) -> None:
        self.path = path
        self._rounds = rounds
        self._tracking = Tracking({}, path)

    @classmethod
    def create(cls, root: Path, recipe: Recipe, *, data_hash: str = "") -> "Results":
        """Create a folder below `root` with its recipe and manifest. Raises InputError if that fails."""
        created = datetime.now(UTC)
        name = run_id(recipe.name, created)
        path = root / name
        manifest = RunManifest(
            name,
            created.isoformat(timespec="seconds"),
            recipe.source,
            recipe.seed,
            data_hash,
            provenance(),
        )
        try:
            for folder in FOLDERS:
                (path / folder).mkdir(parents=True)
            atomic.write(path / "config.toml", dump(recipe))
            atomic.write(path / "manifest.json", _json(manifest))
        except OSError as error:
            raise InputError(
                f"{paths.text(path)}: cannot be created ({error.strerror}); expected a writable folder for results"
            ) from error
        return cls.resume(path)

    @classmethod
    def open(cls, path: Path) -> "Results":
        """Open a run's folder for reading. Raises InputError, which names the existing runs."""
        if not (path / "manifest.json").is_file():
            there = [run.run for run in list_runs(path.parent)]
            raise InputError(f"{paths.text(path)}: not a run's folder{nearest(path.name, there)}")
        return cls(path)

    @classmethod
    def resume(cls, path: Path, *, after: int | None = None) -> "Results":
        """Open a run's folder to continue it after round `after`; later rounds are dropped, because they are repeated.

        Raises InputError if it does not exist or another process writes to it.
        """
        results = cls.open(path)
        try:
            rounds = (path / round_metrics.FILE).open("ab", buffering=0)
        except OSError as error:
            raise InputError(f"{paths.text(path)}: cannot be written to ({error.strerror})") from error
        try:
            fcntl.flock(rounds, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            rounds.close()
            raise InputError(f"{paths.text(path)}: another process writes to this run") from error
        if rounds.tell() and not (path / round_metrics.FILE).read_bytes().endswith(b"\n"):
            rounds.write(b"\n")  # ends a line cut short by a crash; readers skip it
        if after is not None:
            lines = (path / round_metrics.FILE).read_bytes().splitlines(keepends=True)
            rounds.truncate(0)
            rounds.write(b"".join(line for line in lines if _is_kept(line, after)))
        results._rounds = rounds
        results._write("state.json", _json(RunState("running")))
        return results

    @property
    def id(self) -> str:
        """The run's id: the folder's name."""
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def artefacts(self) -> Path:
        return self.path / "artefacts"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    def track(self, openers: Mapping[str, Opener], *, after: int | None = None) -> None:
        """Pass every further line of the round metrics to these trackers too; `after` as in `resume`. Raises RunError."""
        self._tracking = Tracking(openers, self.path, after)

    def append_round(self, record: RoundMetrics) -> None:
        """Append one line to the round metrics and pass it to the trackers. Raises RunError if it cannot be written."""
        if self._rounds is None:
            raise RunError(f"{paths.text(self.path)}: opened to read; use Results.resume to write")
        with _reporting(self.path):
            self._rounds.write(round_metrics.encode(record))
        self._tracking.note(record)

    def record_engine(self, engine: str, engine_timing: EngineTiming | None = None) -> None:
        """Enter the engine that trains the simulated clients, and why "auto" chose it, into the manifest. Raises RunError."""
        manifest = self.manifest()
        if (engine, engine_timing) != (manifest.engine, manifest.engine_timing):
            new = msgspec.structs.replace(manifest, engine=engine, engine_timing=engine_timing)
            self._write("manifest.json", _json(new))

    def write_summary(self, source: Source, summaries: Mapping[str, Summary]) -> None:
        """Replace metrics_summary.json. Raises RunError if it cannot be written."""
        self._write("metrics_summary.json", _json({"source": source, **summaries}))

    def write_devices(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Replace devices.csv; its columns are the rows' keys in order of first appearance."""
        self._write("devices.csv", csv_text(rows))

    def devices(self) -> list[dict[str, str]]:
        """The lines of devices.csv, by column; empty before it is written."""
        path = self.path / "devices.csv"
        with _reading(path):
            return [*csv.DictReader(path.read_text().splitlines())] if path.is_file() else []

    def write_sum(self, record: RunSum) -> None:
        """Write statistics.json."""
        self._write("statistics.json", _json(record))

    def sum(self) -> RunSum | None:
        """The sum of class statistics; None without one. Raises InputError."""
        path = self.path / "statistics.json"
        return _decoded(path, RunSum) if path.is_file() else None

    def finish(self, state: Outcome, reason: str = "") -> None:
        """Write how the run ended and release the lock."""
        self._write("state.json", _json(RunState(state, reason)))
        self.close()

    def close(self) -> None:
        """Release the lock; an unfinished run then counts as stopped."""
        self._tracking.close()
        if self._rounds is not None:
            self._rounds.close()
            self._rounds = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rounds is None:
            return
        if error is None:
            self.finish("completed")
        elif isinstance(error, KeyboardInterrupt):
            self.finish("stopped", stop_of(error).words)
        elif isinstance(error, StoppedError):
            self.finish("stopped", str(error))
        else:
            self.finish("failed", str(error) or type(error).__name__)

    def recipe(self) -> Recipe:
        """The run's recipe. Raises ConfigError."""
        return load(self.path / "config.toml")

    def manifest(self) -> RunManifest:
        """The run's manifest. Raises InputError."""
        return _decoded(self.path / "manifest.json", RunManifest)

    def state(self) -> RunState:
        """The run's state. A run recorded as running without a process that holds its lock was stopped. Raises InputError."""
        state = _decoded(self.path / "state.json", RunState)
        if state.state == "running" and self._rounds is None and not _is_held(self.path / round_metrics.FILE):
            return RunState("stopped", "its process ended unexpectedly")
        return state

    def rounds(self) -> list[RoundLine]:
        """The rounds so far, in order, without the final personalisation."""
        return [line for line in round_metrics.lines(self.path / round_metrics.FILE) if not line.final]

    @property
    def reached(self) -> int:
        """The last completed round; 0 for none."""
        return max((line.round for line in self.rounds()), default=0)

    def summary(self) -> dict[str, Summary]:
        """The metrics of metrics_summary.json; empty before it is written. Raises InputError."""
        path = self.path / "metrics_summary.json"
        if not path.is_file():
            return {}
        found = _decoded(path, dict[str, str | dict[str, int | float | None]])
        with _reading(path):
            return {
                name: msgspec.convert(round_metrics.with_nan(values), Summary)
                for name, values in found.items()
                if isinstance(values, dict)
            }

    def _write(self, name: str, content: bytes | str) -> None:
        with _reporting(self.path):
            atomic.write(self.path / name, content)


def folder_of(run: str, runs: Path) -> Path:
    """The folder of a run that is given by its name in `runs`, or by its folder."""
    return Path(run) if Path(run).is_dir() or Path(run).name != run else runs / run


def list_runs(root: Path) -> list[RunInfo]:
    """The runs below `root`, newest first. Other folders and damaged runs are skipped."""
    runs = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        try:
            results = Results(path)
            manifest, state, recipe = results.manifest(), results.state(), results.recipe()
        except InputError:
            continue
        names = (recipe.method.name, data_name(recipe))
        runs.append(
            RunInfo(manifest.run, manifest.created, *names, manifest.source, state.state, state.reason)
        )
    return sorted(runs, key=lambda run: (run.created, run.run), reverse=True)


def data_name(recipe: Recipe) -> str:
    """The name of a run's dataset in lists; without one, that the data are on devices."""
    return recipe.data.dataset or "data of devices"


def run_id(name: str, created: datetime) -> str:
    """A new id of at most 32 of a-z, 0-9 and '-': the start of `name`, the time to the second, and two random bytes."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower())[:13].strip("-") or "run"
    return f"{slug}-{created:%y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _is_kept(text: bytes, after: int) -> bool:
    """Whether a line of the round metrics stays when a run resumes after round `after`."""
    line = round_metrics.decode(text, 0)
    return line is not None and line.round <= after and not line.final


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def _decoded(path: Path, kind: Any) -> Any:
    with _reading(path):
        return msgspec.json.decode(path.read_bytes(), type=kind)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, *NOT_JSON) as error:
        raise InputError(
            f"{paths.text(path)}: cannot be read ({error}); expected a file written by a run"
        ) from error


def _is_held(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{paths.text(path)}: results cannot be written ({error.strerror}); the run ends here"
        ) from error
