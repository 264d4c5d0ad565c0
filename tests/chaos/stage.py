"""A run under chaos in one process: real server, real agents, an in-memory broker, and a chaos profile drawn from a seed.

A server restart disconnects the server permanently; another server then resumes the run, as `server run --resume` does.
"""

import math
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edge_fl.config import MethodConfig, ModelConfig, OptimiserConfig
from edge_fl.data.partition import DataConfig
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import EdgeFLError
from edge_fl.seeds import generator
from edge_fl.wire.messages import Capability
from edge_fl.wire.mqtt.loop import MqttLoop
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Transport
from edge_fl_devices.agent.state import AgentLimits
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.install.fetch import FetchLimits
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.full import FullWorker
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import fit_here
from edge_fl_server.orchestrate import run
from edge_fl_server.orchestrate.serving import FleetAccess
from edge_fl_server.recipes.recipe import CohortConfig, Recipe, ReleaseConfig
from edge_fl_server.runs.results import Results
from tools.chaos.faulty_transport import NO_FAULTS, Faults, FaultyTransport
from tools.chaos.injector import FaultInjector
from tools.chaos.profile import Chaos, Devices, Restarts
from tools.memory_broker import InMemoryBroker, InMemoryTransport

TOPICS = Topics("main")
QUICK = AgentLimits(settle_s=0.05, resend_s=0.5, retry_s=0.1, return_s=0.1, grace_s=2.0)
FETCH = FetchLimits(stall_s=0.5, bad_chunk_s=0.1, metadata_s=2.0, quiet_s=0.05)
FULL = ("d1", "d2", "d3", "d4")
HEADS = ("h1", "h2")
LONGEST_S = 240.0  # generous, for a loaded machine; a run takes a few seconds
MAX_SERVERS = 4


def chaos_of(seed: int) -> Chaos:
    """Draw a profile; each kind of fault is on or off."""
    rng = generator(seed, "test.chaos")

    def some(most: float, chance: float = 0.5) -> float:
        return float(rng.uniform(0, most)) if rng.random() < chance else 0.0

    link = Faults(
        drop=some(0.15),
        duplicate=some(0.3),
        reorder=some(0.3),
        corrupt=some(0.1),
        delay_s=some(0.1),
        reorder_s=0.1,
        bytes_per_s=float(rng.choice([0, 0, 20_000, 100_000])),
    )
    devices = Devices(some(0.8), some(0.2), some(0.8), (0.1, 1.0), some(1e9, 0.3))
    broker, server = Restarts(int(rng.integers(0, 3)), 0.2), Restarts(int(rng.integers(0, 2)), 0.2)
    return Chaos(seed, 0.1, 3.0, link, devices, broker, server)


@dataclass
class RunOutcome:
    """Results folder of a run, the errors with which its servers ended, and the injected outages."""

    results: Results
    errors: list[EdgeFLError]
    happened: list[str]
    seconds: float


@dataclass
class Stage:
    """One run under the chaos of one seed, with or without head-only devices."""

    folder: Path
    seed: int
    heads: bool = False
    broker: InMemoryBroker = field(default_factory=InMemoryBroker)
    loop: MqttLoop = field(default_factory=MqttLoop)

    def play(self) -> RunOutcome:
        """Play the run until it ends. Raises AssertionError when it does not."""
        connect = partial(InMemoryTransport, self.broker)
        self._connections: list[FaultyTransport] = []
        names = [*FULL, *(HEADS if self.heads else ())]
        handlers = {"broker": self._restart_broker, "server": self._disconnect_server}
        injector = self.injector = FaultInjector(chaos_of(self.seed), names, connect, handlers)
        runner, begun = Runner(workers=2), time.monotonic()
        for name in names:
            runner.add(self._device(name), injector.connect)

        def done() -> bool:
            injector.advance(runner, self._device)
            return False

        fleet = threading.Thread(target=partial(runner.run, LONGEST_S, done, 0.02), daemon=True)
        errors: list[EdgeFLError] = []
        server = threading.Thread(target=self._serve, args=(errors,), daemon=True)
        fleet.start(), server.start()
        try:
            server.join(LONGEST_S)
            assert not server.is_alive(), f"seed {self.seed}: no end after {LONGEST_S} s"
        finally:
            runner.stop()
            fleet.join(30)
            injector.close(), self.loop.close(), self.broker.close()
        assert not fleet.is_alive()
        runs = sorted((self.folder / "runs").iterdir())
        assert len(runs) == 1
        happened = [str(outage) for outage in injector.happened]
        return RunOutcome(Results.open(runs[0]), errors, happened, time.monotonic() - begun)

    def _serve(self, errors: list[EdgeFLError]) -> None:
        """Run a server, and another one after each that was disconnected permanently."""
        recipe, resume = self._recipe(), None
        for _ in range(MAX_SERVERS):
            self._disconnected = False
            access = FleetAccess(self._connect, recipe.broker.fleet, self.folder / "home")
            try:
                run.run(recipe, self.folder / "runs", access=access, takeover=True, resume=resume)
            except EdgeFLError as error:
                errors.append(error)
            resume = next((self.folder / "runs").glob("*"), None)
            if resume and not self._disconnected:  # without a run the server found no broker
                return

    def _connect(self, client_id: str, *arguments: Any, **options: Any) -> Transport:
        make = partial(InMemoryTransport, self.broker)
        if not client_id.startswith("server"):
            return make(client_id, *arguments, **options)
        transport = FaultyTransport(make, NO_FAULTS, 0, self.loop, client_id, *arguments, **options)
        self._connections.append(transport)
        return transport

    def _restart_broker(self, down_s: float) -> None:
        """Cut all connections for a while; with odd seeds the broker loses its database."""
        if self.seed % 2:
            self.broker.forget()
        self.injector.cut_all(down_s)
        for transport in self._connections:
            transport.cut(down_s)

    def _disconnect_server(self, _: float) -> None:
        for transport in self._connections[-1:]:
            self._disconnected = True
            transport.cut(math.inf)

    def _device(self, name: str) -> Device:
        data, store = data_of(name), Store(self.folder / name)
        worker = (
            HeadWorker(
                name,
                store,
                FitSettings("logistic"),
                loader=LocalFeatureLoader(lambda classes, input: data, store.folder),
                fitter=fit_here,
                runtime=runtime,
                check=lambda installed: None,
                limits=QUICK,
                trust=Trust(store.folder / "tuf", trust_on_first_use=True, clock=self.injector.clock(name)),
            )
            if name in HEADS
            else FullWorker(name, store, lambda classes, input: data, limits=QUICK)
        )
        tier = "head" if name in HEADS else "full"
        can = Capability(tier, "test", "3", samples=20, head="logistic")
        return Device(name, TOPICS, can, worker, limits=QUICK, fetching=FETCH)

    def _recipe(self) -> Recipe:
        data = data_of("everybody", 60).train
        np.savez(self.folder / "toy.npz", x=data.x, y=data.y)
        return Recipe(
            name="toy",
            seed=1,
            rounds=2,
            source="fleet",
            evaluate_every=0,
            data=DataConfig("toy", str(self.folder), clients=4, beta=5.0),
            model=ModelConfig("cnn-tiny", {"feature_dim": 4, "width": 2}),
            # FedAvg shares an extractor, whose export takes a second; LG-FedAvg shares only its head.
            method=MethodConfig("fedavg" if self.heads else "lg-fedavg", 1, 8, OptimiserConfig("sgd", 0.05)),
            cohort=CohortConfig(
                min_devices=2, wait_s=5.0, deadline_s=5.0, quorum=0.25, buffer_size=2 * (self.seed % 3 == 2)
            ),
            release=ReleaseConfig(wait_s=3.0),
        )


def data_of(client: str, samples: int = 20) -> ClientData:
    """Images of a client, 4x4, with one brightness per class."""
    rng = generator(7, "test.data", client=client)

    def some(count: int) -> Samples:
        y = rng.integers(0, 3, count)
        x = 80 * y[:, None, None, None] + rng.integers(0, 60, (count, 1, 4, 4))
        return Samples(x.astype("uint8"), y)

    return ClientData(some(samples), some(4), some(8))
