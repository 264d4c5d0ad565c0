"""The two runs: a busy fleet whose broker restarts in mid-round, and an idle fleet."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_fl.errors import DeadlineError
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Connected, Event
from edge_fl_server.children import CommandProcess
from edge_fl_server.runs.results import Results
from tools.bench.scale.stage import RecordedChildren, fleet_of, stage, start_broker, wait_until
from tools.bench.scale.watch import COUNTED, FLEET, Watch, mosquitto_of, processor_s, resident_bytes

FEW = 100  # size of the fleet that a large one's memory is compared with
READY_S = 300.0
P95 = 0.95

RECIPE = """
name = "scale"
rounds = {rounds}
source = "fleet"
evaluate_every = 0
data = {{ dataset = "scale", data_dir = "{folder}", clients = {devices}, partition = "iid" }}
model = {{ name = "cnn-tiny", options = {{ width = 4, feature_dim = 16 }} }}
method = {{ name = "fedavg", batch_size = 16 }}
cohort = {{ min_devices = {ready}, quorum = 0.5, wait_s = 300.0, deadline_s = {deadline_s} }}
release = {{ every = 0, heads = {heads}, wait_s = {deadline_s} }}
broker = {{ port = {port} }}
"""
CHAOS = "after_s = 5.0\nuntil_s = {until_s}\n[devices]\nleave = {leave}\n"


class _BrokerListener:
    """Pass the broker's messages to a watch; subscribes again after a restart of the broker."""

    def __init__(self, port: int, watch: Watch) -> None:
        self._watch, self._ready = watch, threading.Event()
        self._transport = MqttTransport(Endpoint("127.0.0.1", port), "scale-bench", None, self._on_event)
        self._ready.set()

    def close(self) -> None:
        self._transport.close()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Connected) and not event.session_present:
            self._ready.wait()  # the connection may be up before the constructor returns
            topics = Topics(FLEET)
            patterns = (topics.round("+"), topics.up("+", "rpt", "+", "+"), topics.tuf("timestamp.json"))
            for topic in (*COUNTED.values(), *patterns):
                self._transport.subscribe(topic)
        self._watch.record(event)


@dataclass(frozen=True)
class _Busy:
    """A busy run: `full` of the devices train, the share `leave` of all leaves for good."""

    devices: int
    full: int
    rounds: int
    leave: float
    deadline_s: float

    def start(
        self, folder: Path, port: int, children: RecordedChildren
    ) -> tuple[CommandProcess, CommandProcess, dict[str, int]]:
        """Start server and fleet -> (server, fleet, memory of each before the first device connects)."""
        recipe, chaos = folder / "recipe.toml", folder / "chaos.toml"
        recipe.write_text(self._recipe(folder, port))
        chaos.write_text(CHAOS.format(leave=self.leave, until_s=self.deadline_s))
        folders = ["--runs", str(folder / "runs"), "--home", str(folder / "home")]
        server = children.start("server", "server", "run", str(recipe), *folders)
        wait_until(lambda: children.has_printed("server", "waiting for"), server, READY_S)
        base = {"server, in rounds": resident_bytes(server.pid)}
        shape = ["--full", str(self.full), "--faults", f"tools.chaos:{chaos}"]
        fleet = children.start("fleet", *fleet_of(folder, port, self.devices), *shape)
        wait_until(lambda: children.has_printed("fleet", "full, on"), fleet, READY_S)
        return server, fleet, {**base, "fleet": resident_bytes(fleet.pid)}

    def _recipe(self, folder: Path, port: int) -> str:
        return RECIPE.format(
            rounds=self.rounds,
            folder=folder,
            devices=self.devices,
            ready=int(0.9 * self.full),
            heads=int(0.85 * (self.devices - self.full)),
            port=port,
            deadline_s=self.deadline_s,
        )


def busy(devices: int, full: int, rounds: int, *, leave: float, deadline_s: float) -> Iterator[str]:
    """Rounds of `full` devices while all others fit heads; the broker restarts in the middle of the last round."""
    run = _Busy(devices, full, rounds, leave, deadline_s)
    with stage(devices) as (folder, port, children):
        watch = Watch()
        broker = start_broker(children, folder, port)
        listener = _BrokerListener(port, watch)
        server, fleet, base = run.start(folder, port, children)
        started_s, down_s = time.monotonic(), 0.0
        while server.code is None:
            time.sleep(0.2)
            watch.measure(fleet=fleet.pid, broker=mosquitto_of(broker.pid))
            watch.measure(**{"server, with a release" if watch.released else "server, in rounds": server.pid})
            if not down_s and len(watch.late_s.get(rounds, ())) >= 0.1 * full:
                broker.end()
                ended_s = time.monotonic()
                time.sleep(1.0)
                broker = start_broker(children, folder, port)
                down_s = time.monotonic() - ended_s
            if time.monotonic() - started_s > 2 * READY_S + 2 * rounds * deadline_s:
                raise DeadlineError("the run did not end")
        server.drain()
        if server.code:
            raise server.failure()
        seconds = time.monotonic() - started_s
        listener.close()
        results = Results.open(Path(server.printed.splitlines()[-1]))
        yield f"{devices} devices, {full} of them full: run {results.state().state} in {seconds:.0f} s"
        yield from _rounds(results, watch)
        yield f"broker down for {down_s:.1f} s in mid-round {rounds}; {len(watch.heads)} heads reported"
        yield from _load(watch, seconds)
        for name, empty in base.items():
            more = watch.memory[name] - empty
            yield f"{name}: {more / devices / 1024:.1f} KiB for each device above its {empty / 2**20:.0f} MiB without any"


def _rounds(results: Results, watch: Watch) -> Iterator[str]:
    """Responses of each round, and their delays."""
    for row in results.rounds():
        late = sorted(watch.late_s.get(row.round, {}).values()) or [float("nan")]
        yield (
            f"round {row.round}: {len(row.responded)} of {len(row.selected)} responded in {row.seconds:.1f} s;"
            f" a report comes after {late[len(late) // 2]:.1f} s (median), {late[int(P95 * (len(late) - 1))]:.1f} s (p95)"
        )


def _load(watch: Watch, seconds: float) -> Iterator[str]:
    """Messages through the broker, and peak memory of each process."""
    for name in COUNTED:
        total, most = watch.messages(name)
        yield f"broker {name}: {total} publications, {total / seconds:.0f}/s on average, {most:.0f}/s at most"
    for name, peak in watch.memory.items():
        yield f"{name}: {peak / 2**20:.0f} MiB at most"


def idle(devices: int, hold_s: float) -> Iterator[str]:
    """Connect idle devices for `hold_s` seconds, and compare the memory with that of a small fleet."""
    memory = {}
    for count in (FEW, devices):
        with stage(count) as (folder, port, children):
            watch = Watch()
            broker = start_broker(children, folder, port)
            start_s = time.monotonic()
            fleet = children.start("fleet", *fleet_of(folder, port, count), "--head-only", str(count))
            wait_until(lambda: children.connected() == count, fleet, READY_S)  # noqa: B023
            connect_s, least = time.monotonic() - start_s, count
            time.sleep(2.0)
            used_s = processor_s(fleet.pid)
            until_s = time.monotonic() + hold_s
            while time.monotonic() < until_s:
                time.sleep(0.5)
                least = min(least, children.connected())
                watch.measure(fleet=fleet.pid, broker=mosquitto_of(broker.pid))
            used = (processor_s(fleet.pid) - used_s) / hold_s
            memory[count] = watch.memory
            yield (
                f"{count} idle devices: connected in {connect_s:.1f} s; {least} stayed for {hold_s:.0f} s;"
                f" fleet {watch.memory['fleet'] / 2**20:.0f} MiB, {used:.0%} of a core;"
                f" mosquitto {watch.memory['broker'] / 2**20:.0f} MiB"
            )
    for name in ("fleet", "broker"):
        more = (memory[devices][name] - memory[FEW][name]) / (devices - FEW)
        yield f"{name}: {more / 1024:.1f} KiB for each device more"
