"""A whole run in one process: the real server, real agents of both tiers, a broker, and a recorder of all packets."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_fl.config import MethodConfig, ModelConfig, OptimiserConfig
from edge_fl.data.partition import DataConfig
from edge_fl.data.samples import ClientData, Samples
from edge_fl.seeds import generator
from edge_fl.wire.messages import Capability
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.agent.state import AgentLimits
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.full import FullWorker
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import fit_here
from edge_fl_lab.report import page
from edge_fl_server.mqtt.connector import ServerConnect
from edge_fl_server.orchestrate import run as orchestrator
from edge_fl_server.orchestrate.serving import FleetAccess
from edge_fl_server.recipes.recipe import CohortConfig, Recipe, ReleaseConfig
from edge_fl_server.runs.results import Results
from tools.memory_broker import InMemoryBroker, InMemoryTransport

QUICK = AgentLimits(settle_s=0.05, resend_s=2.0, retry_s=0.1, return_s=0.1)
TOPICS = Topics("main")
FROM_SERVER = ("assignment", "cmd", "ack")


def data_of(client: str, samples: int = 20) -> ClientData:
    """4x4 images of a client: each class has its brightness."""
    rng = generator(7, "test.data", client=client)

    def some(count: int) -> Samples:
        y = rng.integers(0, 3, count)
        return Samples(
            (80 * y[:, None, None, None] + rng.integers(0, 60, (count, 1, 4, 4))).astype("uint8"), y
        )

    return ClientData(some(samples), some(4), some(8))


@dataclass
class Site:
    """A broker; `packets`: all messages of devices as (topic, payload), `families`: the kinds of topics used."""

    connect: Any
    folder: Path
    packets: list[tuple[str, bytes]] = field(default_factory=list)
    families: set[str] = field(default_factory=set)
    devices: dict[str, Device] = field(default_factory=dict)
    data: Callable[[str], ClientData] = data_of
    fit: FitSettings = field(default_factory=partial(FitSettings, ""))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the messages of devices, and the kinds of topics used by all clients."""

        def record(event: object) -> None:
            if isinstance(event, Packet) and event.payload:
                self.families.add((address := TOPICS.parse(event.topic)).kind)
                if address.device and address.kind not in FROM_SERVER:
                    self.packets.append((event.topic, event.payload))

        sniffer: ServerConnect = self.connect
        transport = sniffer("sniffer", None, record)
        transport.wait_connected(60)
        transport.subscribe(f"{TOPICS.root}/#")
        yield
        transport.close()

    @contextmanager
    def fleet(
        self,
        full: tuple[str, ...],
        heads: dict[str, str],
        *,
        other: Mapping[str, type[FullWorker]] = {},
        **options: Any,
    ) -> Iterator[None]:
        """Agents alive: full devices, some with another worker, and head-only ones with their kind of head."""
        runner = Runner(workers=2)
        for name in (*full, *heads):
            data = partial(self.data, name)
            store = Store(self.folder / name)
            worker = (
                HeadWorker(
                    name,
                    store,
                    replace(self.fit, kind=heads[name]),
                    loader=LocalFeatureLoader(lambda c, i, d=data: d(), store.folder),
                    fitter=fit_here,
                    runtime=runtime,
                    check=lambda installed: None,
                    limits=QUICK,
                    **options,
                )
                if name in heads
                else other.get(name, FullWorker)(name, store, lambda c, i, d=data: d(), limits=QUICK)  # type: ignore[misc]
            )
            can = Capability(
                "head" if name in heads else "full", "test", "3", samples=20, head=heads.get(name, "")
            )
            self.devices[name] = Device(name, TOPICS, can, worker, limits=QUICK)
            runner.add(self.devices[name], self.connect)
        thread = threading.Thread(target=partial(runner.run, deadline_s=1000), daemon=True)
        thread.start()
        try:
            yield
        finally:
            runner.stop()
            thread.join(90)
            assert not thread.is_alive()

    def run(
        self, method: str, rounds: int = 3, *, edit: Callable[[Recipe], Recipe] = lambda r: r, **options: Any
    ) -> Results:
        """One run of the server to its end."""
        data = data_of("everybody", 60).train
        np.savez(self.folder / "toy.npz", x=data.x, y=data.y)
        recipe = Recipe(
            name="toy",
            seed=1,
            rounds=rounds,
            source="fleet",
            evaluate_every=0,
            data=DataConfig("toy", str(self.folder), clients=3, beta=5.0),
            model=ModelConfig("cnn-tiny", {"feature_dim": 4, "width": 2}),
            method=MethodConfig(method, 1, 8, OptimiserConfig("sgd", 0.05), options),
            cohort=CohortConfig(min_devices=2, wait_s=60.0, deadline_s=90.0),
            release=ReleaseConfig(every=1, wait_s=60.0, heads=0),
        )
        access = FleetAccess(self.connect, "main", self.folder / "home")
        results, outcome = orchestrator.run(edit(recipe), self.folder / "runs", access=access)
        page.write(results)
        if outcome.exhausted:
            raise outcome.exhausted
        return Results.open(results.path)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closed at the end of the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """With an in-memory broker."""
    broker = InMemoryBroker()
    site = Site(partial(InMemoryTransport, broker), tmp_path)
    with ExitStack() as stack:
        stack.enter_context(site.listening())
        yield site
    broker.close()


@pytest.fixture
def real_site(mosquitto_program: Program, tmp_path: Path) -> Iterator[Site]:
    """With its own mosquitto."""
    with Mosquitto(BrokerSettings(tmp_path / "mosquitto", port=0), mosquitto_program) as broker:
        site = Site(partial(MqttTransport, broker.endpoint), tmp_path)
        with site.listening():
            yield site
