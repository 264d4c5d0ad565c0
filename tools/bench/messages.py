"""B3: round-trip time of a small message through the broker that `edge-fl broker up` runs."""

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
from tools.bench.figures import Figure

TOPICS = Topics("bench")
MESSAGES, WARM = 200, 10
DEADLINE_S = 120.0


@contextmanager
def broker() -> Iterator[Endpoint]:
    """Run `edge-fl broker up --insecure` on a free port. Raises ConnectError if it does not answer."""
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
    """B3: a small message and its reply, QoS 1 both ways."""
    replies: queue.Queue[Event] = queue.Queue()
    seconds: list[float] = []
    with (
        broker() as at,
        _client(at, "requester", replies.put) as requester,
        _client(at, "responder", _nothing) as responder,
    ):
        there, back = TOPICS.up("d1", "req"), TOPICS.down("d1", "assignment")
        with _client(at, "echo", lambda event: _echo(event, responder, back)) as echo:
            echo.subscribe(there)
            requester.subscribe(back)
            for turn in range(turns * messages):
                start = time.perf_counter()
                requester.publish(Packet(there, b"{}"))
                while not isinstance(replies.get(timeout=DEADLINE_S), Packet):
                    pass
                if turn >= WARM:
                    seconds.append(time.perf_counter() - start)
    p99 = statistics.quantiles(seconds, n=100)[98]
    notes: dict[str, float | str] = {"ms at the 99th percentile": 1000 * p99, "messages": len(seconds)}
    value = 1000 * statistics.median(seconds)
    return Figure("B3", "round trip, median", 0.6, " ms", at_most=True, value=value, notes=notes)


def wait_for(at: Endpoint, process: subprocess.Popen[bytes]) -> None:
    """Wait until the broker of a process accepts connections. Raises ConnectError if it ends or takes too long."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConnectError(
                f"{at}: `edge-fl broker up` ended with exit code {process.returncode} (is mosquitto installed?)",
                consequence="nothing was measured",
            )
        try:
            socket.create_connection((at.host, at.port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise ConnectError(
        f"{at}: no broker answers after {DEADLINE_S:.0f} s", consequence="nothing was measured"
    )


@contextmanager
def _client(at: Endpoint, name: str, deliver: Callable[[Event], object]) -> Iterator[MqttTransport]:
    transport = MqttTransport(at, name, None, lambda event: (deliver(event), None)[1], clean_start=True)
    transport.wait_connected(DEADLINE_S)
    try:
        yield transport
    finally:
        transport.close()


def _echo(event: Event, responder: MqttTransport, topic: str) -> None:
    if isinstance(event, Packet):
        responder.publish(Packet(topic, event.payload))


def _nothing(event: Event) -> None:
    """For clients that only publish."""
