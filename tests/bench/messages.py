"""B3: how long a small message and its answer take through the broker as `edge-fl broker up` runs it."""

from __future__ import annotations

import queue
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from edge_fl.errors import ConnectError
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Event, Packet
from tests.bench.figures import Figure

TOPICS = Topics("bench")
MESSAGES, WARM = 200, 10
DEADLINE_S = 120.0


@contextmanager
def broker() -> Iterator[Endpoint]:
    """`edge-fl broker up --insecure` on a free port. Raises ConnectError when it does not answer."""
    with TemporaryDirectory(prefix="edge-fl-bench-") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        at = Endpoint("127.0.0.1", free.getsockname()[1])
        free.close()
        settings = ["--insecure", "--port", str(at.port), "--dir", folder, "--fleet", "bench"]
        command = [sys.executable, "-m", "edge_fl", "broker", "up", *settings]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
            try:
                wait_for(at, process)
                yield at
            finally:
                process.terminate()


def round_trip(turns: int, messages: int = MESSAGES) -> Figure:
    """B3: a small message with an answer to it, QoS 1 both ways."""
    answers: queue.Queue[Event] = queue.Queue()
    taken: list[float] = []
    with (
        broker() as at,
        _client(at, "asker", answers.put) as asker,
        _client(at, "answerer", _nothing) as other,
    ):
        there, back = TOPICS.request("d1"), TOPICS.assignment("d1")
        with _client(at, "echo", lambda event: _echo(event, other, back)) as echo:
            echo.subscribe(there)
            asker.subscribe(back)
            for turn in range(turns * messages):
                began = time.perf_counter()
                asker.publish(Packet(there, b"{}"))
                while not isinstance(answers.get(timeout=DEADLINE_S), Packet):
                    pass
                if turn >= WARM:
                    taken.append(time.perf_counter() - began)
    p99 = statistics.quantiles(taken, n=100)[98]
    notes: dict[str, float | str] = {"ms at the 99th percentile": 1000 * p99, "messages": len(taken)}
    value = 1000 * statistics.median(taken)
    return Figure("B3", "there and back, median", 0.6, " ms", at_most=True, value=value, notes=notes)


def wait_for(at: Endpoint, process: subprocess.Popen[bytes]) -> None:
    """Until the broker that a process runs answers. Raises ConnectError when it ended instead, or takes too long."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConnectError(
                f"{at}: `edge-fl broker up` ended with exit code {process.returncode} (is mosquitto installed?); nothing was measured"
            )
        try:
            socket.create_connection((at.host, at.port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise ConnectError(f"{at}: no broker answers after {DEADLINE_S:.0f} s; nothing was measured")


@contextmanager
def _client(at: Endpoint, name: str, deliver: Callable[[Event], object]) -> Iterator[MqttTransport]:
    transport = MqttTransport(at, name, None, lambda event: (deliver(event), None)[1], clean_start=True)
    transport.wait_connected(DEADLINE_S)
    try:
        yield transport
    finally:
        transport.close()


def _echo(event: Event, answerer: MqttTransport, topic: str) -> None:
    if isinstance(event, Packet):
        answerer.publish(Packet(topic, event.payload))


def _nothing(event: Event) -> None:
    """For whoever only sends."""
