"""A run on a real mosquitto whose server, devices and broker are processes of their own, restarted whenever they die.

The processes are forked from one that has imported torch already, so that a restart is quick.
"""

import logging
import math
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from edge_fl.config import CompressionConfig, MethodConfig, ModelConfig, OptimiserConfig
from edge_fl.data.partition import DataConfig
from edge_fl.data.samples import ClientData, Samples
from edge_fl.seeds import generator
from edge_fl.wire import identity
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import Authority
from edge_fl_server.recipes.recipe import CohortConfig, Recipe, ReleaseConfig, ValidationConfig
from edge_fl_server.registry import Database, registered_reports, runs
from edge_fl_server.runs.results import Results
from tests.failures.points import Death, arm

PROCESSES: Any = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "torch",
        "edge_fl_server.orchestrate.run",
        "edge_fl_devices.workers.full",
        "edge_fl_devices.runtime.runner",
        __name__,
    ]
)

DEVICES = ("d1", "d2")
ROUNDS = 3
RUN_S = 400.0
POLL_S = 0.02


def data_of(client: str, samples: int = 20) -> ClientData:
    """Images [N, 1, 4, 4] of a client; the class determines the brightness."""
    rng = generator(7, "test.data", client=client)

    def sample(count: int) -> Samples:
        y = rng.integers(0, 3, count)
        x = (80 * y[:, None, None, None] + rng.integers(0, 60, (count, 1, 4, 4))).astype("uint8")
        return Samples(x, y)

    return ClientData(sample(samples), sample(4), sample(8))


def recipe_of(
    folder: Path, seed: int, method: str, compression: Any = "none", rounds: int = ROUNDS, **cohort: Any
) -> Recipe:
    """Some rounds of a method with personal parts."""
    return Recipe(
        name="scene",
        seed=seed,
        rounds=rounds,
        source="fleet",
        evaluate_every=0,
        data=DataConfig("toy", str(folder), clients=3, beta=5.0),
        model=ModelConfig("cnn-tiny", {"feature_dim": 4, "width": 2}),
        method=MethodConfig(method, 1, 8, OptimiserConfig("sgd", 0.05)),
        cohort=CohortConfig(
            **{"min_devices": 2, "wait_s": 30.0, "deadline_s": 40.0, "quorum": 1.0, **cohort}
        ),
        compression=CompressionConfig(compression),
        validation=ValidationConfig(quarantine_after=0),
        release=ReleaseConfig(every=2, wait_s=5.0),
    )


def serve(endpoint: Endpoint, folder: Path, recipe: Recipe, death: Death | None, database: str) -> None:
    """Run the server: resume the run in `folder`, or start a new one. Exits with the command's status."""
    from edge_fl.errors import EdgeFLError
    from edge_fl_server.orchestrate import run as orchestrator
    from edge_fl_server.orchestrate.serving import FleetAccess

    _log_to(folder / "server.log")
    arm(death, partial((folder / "server.died").touch))
    found = sorted((folder / "runs").glob("*/manifest.json"))
    access = FleetAccess(partial(MqttTransport, endpoint), recipe.broker.fleet, folder / "home", database)
    resume = found[0].parent if found else None
    try:
        orchestrator.run(recipe, folder / "runs", access=access, resume=resume)
    except EdgeFLError as error:
        logging.getLogger("scene").error("server: %s", error)
        sys.exit(error.exit_code)


def live(endpoint: Endpoint, folder: Path, name: str, death: Death | None) -> None:
    """Run a full device until it is killed."""
    import torch

    from edge_fl.wire.messages import Capability
    from edge_fl.wire.topics import Topics
    from edge_fl_devices.agent.state import AgentLimits
    from edge_fl_devices.runtime.device import Device
    from edge_fl_devices.runtime.runner import Runner
    from edge_fl_devices.storage.store import Store
    from edge_fl_devices.workers.full import FullWorker

    _log_to(folder / f"{name}.log")
    torch.set_num_threads(1)
    arm(death, partial((folder / f"{name}.died").touch))
    limits = AgentLimits(settle_s=0.1, resend_s=2.0, retry_s=0.2, return_s=0.2)
    worker = FullWorker(name, Store(folder / name), lambda classes, input: data_of(name), limits=limits)
    runner = Runner(workers=1)
    capability = Capability("full", "test", "3", samples=20)
    runner.add(
        Device(name, Topics("main"), capability, worker, limits=limits), partial(MqttTransport, endpoint)
    )
    runner.run(deadline_s=2 * RUN_S)


def nothing() -> None:
    """End at once."""


def _log_to(log: Path) -> None:
    logging.basicConfig(
        filename=log, level=logging.INFO, force=True, format="%(asctime)s %(name)s %(message)s"
    )
    sys.stderr = log.open("a")  # progress of a run


@dataclass(frozen=True)
class Fault:
    """`victim` is killed, or stopped for `stall_s` seconds, `after_s` seconds after the previous fault."""

    victim: str
    after_s: float
    stall_s: float = 0.0


@dataclass
class Ending:
    """How a run ended: its state in the folder and in the registry, and its results."""

    state: str
    reason: str
    registered: str
    deaths: dict[str, int]
    shared: bytes
    summary: dict[str, Any]
    counted: list[tuple[str, str]]
    rounds: list[int]
    attempts: int


@dataclass
class Scene:
    """One run whose server, devices and broker are restarted whenever they die. With `secure` all connections use mutual TLS."""

    program: Program
    folder: Path
    seed: int = 1
    method: str = "lg-fedavg"  # shares a head, and no extractor that would have to be exported
    compression: str = "none"
    server_death: Death | None = None
    device_death: Death | None = None
    broker_dies_at: tuple[str, int] | None = None
    database: str = ""
    cohort: dict[str, Any] = field(default_factory=dict)
    rounds: int = ROUNDS
    secure: bool = False
    faults: tuple[Fault, ...] = ()
    deaths: dict[str, int] = field(default_factory=dict)

    def run(self) -> Ending:
        """Run to the end. Raises TimeoutError after `RUN_S`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data = data_of("everybody", 60).train
        np.savez(self.folder / "toy.npz", x=data.x, y=data.y)
        recipe = recipe_of(self.folder, self.seed, self.method, self.compression, self.rounds, **self.cohort)
        settings = BrokerSettings(self.folder / "mosquitto", port=0)
        broker = Mosquitto(self._secured(settings) if self.secure else settings, self.program)
        broker.start()
        processes: dict[str, BaseProcess] = {}
        faults = deque(self.faults)
        next_fault = time.monotonic() + faults[0].after_s if faults else math.inf
        stopped: list[tuple[float, int]] = []  # (when to continue, process id)
        try:
            for name in DEVICES:
                death = self.device_death if name == DEVICES[self.seed % len(DEVICES)] else None
                death = self._of_broker(broker, death, server=False) if name == DEVICES[0] else death
                processes[name] = self._start(live, self._endpoint(broker, name), self.folder, name, death)
            death = self._of_broker(broker, self.server_death, server=True)
            arguments = (self._endpoint(broker, "server"), self.folder, recipe)
            processes["server"] = self._start(serve, *arguments, death, self.database)
            until = time.monotonic() + RUN_S
            while True:
                if time.monotonic() > until:
                    raise TimeoutError(f"no end after {RUN_S:g} s: {self.deaths}\n{self.log_tails()}")
                if time.monotonic() >= next_fault:
                    fault = faults.popleft()
                    pid = broker.pid if fault.victim == "broker" else processes[fault.victim].pid
                    os.kill(pid or 0, signal.SIGSTOP if fault.stall_s else signal.SIGKILL)
                    if fault.stall_s:
                        self._count(fault.victim)
                        stopped.append((time.monotonic() + fault.stall_s, pid or 0))
                    next_fault = time.monotonic() + faults[0].after_s if faults else math.inf
                for at, pid in [one for one in stopped if time.monotonic() >= one[0]]:
                    stopped.remove((at, pid))
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                if broker.has_ended():
                    self._count("broker")
                    broker.kill()
                    broker.start()
                for name in DEVICES:
                    if not processes[name].is_alive():
                        self._count(name)
                        processes[name] = self._start(
                            live, self._endpoint(broker, name), self.folder, name, None
                        )
                if not (server := processes["server"]).is_alive():
                    if server.exitcode is not None and server.exitcode >= 0:
                        break
                    self._count("server")
                    processes["server"] = self._start(serve, *arguments, None, self.database)
                time.sleep(POLL_S)
        finally:
            for process in processes.values():
                process.kill()
                process.join(10)
            broker.kill()
        return self._ending()

    def _secured(self, settings: BrokerSettings) -> BrokerSettings:
        """The broker's settings with certificates; creates an identity for every client."""
        authority = Authority.make(self.folder / "ca")
        authority.bake({name: self.folder / "ca" / name for name in DEVICES})
        certificates = register_sync.certificates(authority, "127.0.0.1")
        return register_sync.with_register(
            replace(settings, fleet="main", certificates=certificates), authority
        )

    def _endpoint(self, broker: Mosquitto, name: str) -> Endpoint:
        if not self.secure:
            return broker.endpoint
        return identity.read(self.folder / "ca" / name).endpoint("127.0.0.1", broker.settings.port)

    def log_tails(self) -> str:
        """The last lines of each log, for failure messages."""
        logs = [(log, log.read_text().splitlines()[-25:]) for log in sorted(self.folder.glob("*.log"))]
        return "\n".join(f"--- {log.name}\n" + "\n".join(lines) for log, lines in logs)

    def _of_broker(self, broker: Mosquitto, death: Death | None, *, server: bool) -> Death | None:
        """The broker's death, if this process reaches the point for it."""
        from tests.failures.points import SERVER

        if self.broker_dies_at and (self.broker_dies_at[0] in SERVER) == server:
            return Death(*self.broker_dies_at, victim=broker.pid)
        return death

    def _start(self, target: Any, *arguments: Any) -> BaseProcess:
        process: BaseProcess = PROCESSES.Process(target=target, args=arguments, daemon=True)
        process.start()
        return process

    def _count(self, who: str) -> None:
        self.deaths[who] = self.deaths.get(who, 0) + 1

    def _ending(self) -> Ending:
        found = sorted((self.folder / "runs").glob("*/manifest.json"))
        assert len(found) == 1, self.log_tails()
        results = Results.open(found[0].parent)
        state = results.state()
        db = Database.open(self.database or self.folder / "server" / "registry.sqlite")
        record = runs.get(db, results.id)
        counted = [
            (one.device, f"{one.kind} {one.round}") for one in registered_reports.of_run(db, results.id)
        ]
        attempts = len({request.id for request in runs.requests_of(db, results.id)})
        db.close()
        last = sorted(results.checkpoints.glob("*.safetensors"))
        return Ending(
            state.state,
            state.reason,
            record.state if record else "",
            self.deaths,
            last[-1].read_bytes() if last else b"",
            {name: repr(value) for name, value in results.summary().items()},
            counted,
            [one.round for one in results.rounds()],
            attempts,
        )
