"""Live values of series, audio and tables: an MQTT topic, a microphone, or a Python function.

    mqtt://[USER:PASSWORD@]HOST[:PORT]/TOPIC   JSON, plain numbers or Sparkplug B; mqtts:// with TLS
    alsa:DEVICE                                a microphone, recorded by arecord
    python:package.module:function             an iterator of values

A source gives blocks of values as they come, `Timeline` makes one recording of them, and `Windows` cuts an extractor's samples out of it. What
is wrong with the values is said once a minute at most, and reading goes on.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import select
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from queue import Empty, Full, Queue, SimpleQueue
from secrets import token_hex
from threading import Event
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from edge_fl import threads
from edge_fl.console.output import print_status
from edge_fl.errors import ConnectError, EdgeFLError, InputError, brief
from edge_fl.inputs import InputSpec
from edge_fl.wire import identity
from edge_fl.wire.endpoint import PORT, TLS_PORT, Endpoint, Login
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Connected, Disconnected, Packet
from edge_fl.wire.transport import Event as MqttEvent
from edge_fl_maker.capture.camera import shown
from edge_fl_maker.capture.sparkplug import NAMESPACE, Metrics

log = logging.getLogger(__name__)

Floats = NDArray[np.float32]
Notify = Callable[[str], None]
EXPECTED = "expected mqtt://HOST/TOPIC, mqtts://HOST/TOPIC, alsa:DEVICE or python:package.module:function"
CLOCKS = frozenset({"time", "timestamp", "ts", "last_seen"})
"""Names of the time of a message, in lower case."""
SWITCHES = {"on": 1.0, "off": 0.0, "true": 1.0, "false": 0.0}
MICROPHONE_RATE = 16_000
REPEAT_S = 60.0


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """A source without values is named after `silent_s`, and one that fails tried again after a pause that doubles up to a maximum.

    most_waiting: blocks that wait for a prediction; of more the oldest are dropped.
    """

    silent_s: float = 10.0
    connect_s: float = 15.0
    min_retry_s: float = 0.5
    max_retry_s: float = 30.0
    most_waiting: int = 2000


LIMITS = StreamLimits()


class Block(NamedTuple):
    """New values of some channels, each [n], with the time of the last ones in seconds on any clock, None if they came without; `arrived`:
    on this machine's clock that is never set.
    """

    values: dict[str, Floats]
    time: float | None
    arrived: float


class Piece(NamedTuple):
    """The next values [C, n] of all channels `names`, at increasing `times` [n]; `fresh`: a gap is before them."""

    names: tuple[str, ...]
    times: NDArray[np.float64]
    values: Floats
    fresh: bool


class Remarks:
    """Says what is wrong with a stream: each kind of remark at once, and again after REPEAT_S."""

    def __init__(self, name: str, notify: Notify) -> None:
        self._name, self._notify = name, notify
        self._said: dict[str, float] = {}

    def say(self, kind: str, words: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._said.get(kind, -math.inf) + REPEAT_S:
            self._said[kind] = now_s
            self._notify(f"stream {self._name}: {words}")


class Stream:
    """Reads `source` in a thread; `rate` in Hz of a microphone and of arrays from a Python function.

    `interrupted`: there are no values at present. An interrupted source is opened again; a Python function may end.
    """

    def __init__(
        self, source: str, rate: float = 0.0, *, limits: StreamLimits = LIMITS, notify: Notify = print_status
    ) -> None:
        kind, _, place = source.partition(":")
        if kind not in SOURCES or not place:
            raise InputError(f"stream {shown(source)}: {EXPECTED}")
        self.name, self.rate, self.limits, self.interrupted = shown(source), rate, limits, False
        self.remarks, self.stopped, self._notify = Remarks(self.name, notify), Event(), notify
        self._waiting: Queue[Block | EdgeFLError | None] = Queue(limits.most_waiting)
        self._given = 0
        self._read, self._place = SOURCES[kind], source if kind.startswith("mqtt") else place
        self._thread = threads.once(self._run, "edge-fl-stream")
        self._thread.start()

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks as they come, until the end. Raises InputError or ConnectError if the source cannot be opened."""
        while not self.stopped.is_set():
            try:
                block = self._waiting.get(timeout=self.limits.silent_s)
            except Empty:
                self.interrupt(f"no values for {self.limits.silent_s:g} s; waiting for them")
                continue
            if isinstance(block, EdgeFLError):
                raise block
            if block is None:
                return
            if self.interrupted:
                self.interrupted = False
                self._notify(f"stream {self.name}: values again")
            yield block

    def give(self, values: dict[str, Floats], time_s: float | None, *, wait: bool = False) -> None:
        """Hand over values; those of a source that cannot `wait` replace the oldest if too many are waiting."""
        block = Block(values, time_s, time.monotonic())
        self._given += 1
        while not self.stopped.is_set():
            with suppress(Full):
                return self._waiting.put(block, timeout=0.2 if wait else 0)
            if not wait:
                self.remarks.say("slow", "faster than they are used; the oldest values are dropped")
                with suppress(Empty):
                    self._waiting.get_nowait()

    def interrupt(self, why: str) -> None:
        """Say why there are no values at present."""
        if not self.interrupted:
            self.interrupted = True
            self._notify(f"stream {self.name}: {why}")

    @property
    def waiting(self) -> int:
        """The number of blocks that were not taken yet."""
        return self._waiting.qsize()

    def close(self) -> None:
        self.stopped.set()
        with suppress(Full):
            self._waiting.put_nowait(None)
        self._thread.join(self.limits.connect_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        end: EdgeFLError | None = None
        pause_s, given = self.limits.min_retry_s, 0
        while not self.stopped.is_set():
            try:
                self._read(self, self._place)
                break
            except Exception as error:
                if not isinstance(error, EdgeFLError):
                    log.exception("stream %s: unexpected error", self.name)
                    error = InputError(f"{type(error).__name__}: {brief(error)}")
                if not self._given:  # it never worked
                    end = error
                    break
                self.interrupt(f"{error.message}; trying again")
                pause_s = self.limits.min_retry_s if self._given > given else min(2 * pause_s, self.limits.max_retry_s)
                given = self._given
            self.stopped.wait(pause_s)
        self._end(end)

    def _end(self, end: EdgeFLError | None) -> None:
        while not self.stopped.is_set():
            with suppress(Full):
                return self._waiting.put(end, timeout=0.2)


# Sources


def _mqtt(stream: Stream, address: str) -> None:
    """Read a topic, whose wildcards name the values: in a/+/b, those of a/ax/b begin with "ax"."""
    try:
        parts = urlsplit(address.replace("#", "%23"))
        options, topic, port = dict(parse_qsl(parts.query)), unquote(parts.path[1:]), parts.port
    except ValueError as error:
        raise InputError(f"stream {stream.name}: {error}; {EXPECTED}") from error
    if not (parts.hostname and topic) or options.keys() - {"identity"}:
        raise InputError(f"stream {stream.name}: {EXPECTED}, perhaps with ?identity=FOLDER")
    endpoint, client = _endpoint(parts, port, options.get("identity"))
    pattern, metrics, changes = topic.split("/"), Metrics(), SimpleQueue[MqttEvent]()
    if pattern[0] == NAMESPACE and len(pattern) > 3:
        pattern[2] = "+"  # births name the values

    def receive(event: MqttEvent) -> None:
        if not isinstance(event, Packet):
            changes.put(event)
            return
        levels = event.topic.split("/")
        try:
            _take(stream, levels, pattern, metrics, event)
        except (ValueError, RecursionError) as error:
            stream.remarks.say("message", f"{event.topic}: {brief(error)}; skipped")

    transport = MqttTransport(endpoint, client, None, receive, session_expiry_s=0, clean_start=True)
    try:
        transport.wait_connected(stream.limits.connect_s)
        while not stream.stopped.is_set():
            if denied := transport.denied:
                raise ConnectError(f"stream {stream.name}: the broker denies {denied}", "nothing is read")
            with suppress(Empty):
                change = changes.get(timeout=0.2)
                if isinstance(change, Connected):
                    transport.subscribe("/".join(pattern), qos=0)  # again would be at another time
                elif isinstance(change, Disconnected):
                    if change.final:
                        raise ConnectError(f"broker {endpoint}: {change}")
                    stream.interrupt(f"{change}; connecting again")
    finally:
        transport.close()


def _endpoint(parts: Any, port: int | None, folder: str | None) -> tuple[Endpoint, str]:
    """The broker of an address, and the client's name. Raises ConfigError."""
    tls, client = parts.scheme == "mqtts", f"edge-fl-{token_hex(4)}"
    port = port or (TLS_PORT if tls else PORT)
    if folder:
        certificate = identity.certificate_in(folder)
        return identity.endpoint(parts.hostname, port, folder), certificate.device if certificate else client
    login = Login(unquote(parts.username), unquote(parts.password or "")) if parts.username else None
    return Endpoint(parts.hostname, port, login=login, tls=tls), client


def _take(stream: Stream, levels: list[str], pattern: list[str], metrics: Metrics, packet: Packet) -> None:
    """Hand over the values of a message. Raises ValueError."""
    prefix = [level for place, level in enumerate(levels) if place >= len(pattern) or pattern[place] in "+#"]
    if levels[0] == NAMESPACE:
        del prefix[: len(prefix) and 1]  # the type of the message
        for time_s, found in metrics.read(levels, packet.payload):
            _give(stream, dict(_flat(found, prefix)), time_s)
        return
    try:
        content = json.loads(packet.payload)
    except ValueError:
        content = packet.payload.decode().strip()
    rows = content if isinstance(content, list) and content and isinstance(content[0], dict) else [content]
    for row in rows:
        _give(stream, dict(_flat(row, prefix if isinstance(row, dict) else prefix or levels[-1:])), None)


def _flat(value: object, levels: list[str]) -> Iterator[tuple[str, object]]:
    """Yield the values of nested objects under their names, joined by dots."""
    if not isinstance(value, dict):
        yield ".".join(levels), value
        return
    for key, each in value.items():
        yield from _flat(each, [*levels, str(key)])


def _give(stream: Stream, found: dict[str, object], time_s: float | None, *, wait: bool = False) -> None:
    """Hand over the values of a message, numbers or lists of them."""
    clock = next((name for name in found if name.rpartition(".")[2].lower() in CLOCKS), None)
    if clock is not None:
        time_s = seconds(found.pop(clock))
    values = {
        name: np.array([number(each) for each in (value if isinstance(value, list) else [value])], np.float32)
        for name, value in found.items()
    }
    stream.give({name: each for name, each in values.items() if len(each)}, time_s, wait=wait)


def number(value: object) -> float:
    """The number that a value is, also as text and as a switch; NaN of all else."""
    try:
        found = SWITCHES.get(value.strip().lower()) if isinstance(value, str) else None
        found = float(value) if found is None else found  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return found if abs(found) < 3e38 else math.nan


def seconds(value: object) -> float | None:
    """The time that a value is: a number of s, ms, µs or ns, or a text of ISO 8601; None of all else."""
    if isinstance(value, str) and not value.replace(".", "", 1).isdecimal():
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            return None
    found = number(value)
    while found > 1e11:
        found /= 1000
    return found if math.isfinite(found) else None


def _python(stream: Stream, place: str) -> None:
    """Read an iterator of dicts as in JSON messages, of numbers, or of arrays [C] or [C, n] at `rate`."""
    module, _, name = place.partition(":")
    try:
        items: Iterable[Any] = getattr(importlib.import_module(module), name)()
        count = 0
        for item in items:
            if stream.stopped.is_set():
                return
            if isinstance(item, dict):
                _give(stream, dict(_flat(item, [])), None, wait=True)
                continue
            array = np.asarray(item, np.float32)
            array = array.reshape(array.shape[0] if array.ndim else 1, -1)
            count += array.shape[1]
            time_s = count / stream.rate if stream.rate else None
            stream.give({str(row): values for row, values in enumerate(array)}, time_s, wait=True)
    except Exception as error:  # third-party code may raise anything
        raise InputError(
            f"stream {stream.name}: {type(error).__name__}: {brief(error)}; expected a function that returns an iterator of values"
        ) from error


def _alsa(stream: Stream, device: str) -> None:
    """Read mono values of 16 bits."""
    rate = round(stream.rate) or MICROPHONE_RATE
    command = ["arecord", "-D", device, "-t", "raw", "-f", "S16_LE", "-c", "1", "-r", str(rate)]
    with tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        except OSError as error:
            raise InputError(
                f"stream {stream.name}: arecord: {error.strerror}; expected sudo apt install alsa-utils"
            ) from error
        pipe, rest, start_s, count = child.stdout, b"", 0.0, 0
        assert pipe
        try:
            while not stream.stopped.is_set():
                if not select.select([pipe], [], [], 0.2)[0]:
                    continue
                if not (read := os.read(pipe.fileno(), 2**14)):
                    break
                errors.seek(0)
                if b"rate is not accurate" in (said := errors.read()):
                    raise InputError(f"{brief(said.decode(errors='replace'))}: expected alsa:plug{device}")
                rest += read
                whole = np.frombuffer(rest[: len(rest) // 2 * 2], "<i2")
                rest, count = rest[2 * len(whole) :], count + len(whole)
                start_s = start_s or time.monotonic() - count / rate
                stream.give({"": whole.astype(np.float32) / 32768}, start_s + count / rate)
            else:
                return
        finally:
            child.terminate()
            child.wait()
            pipe.close()
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    raise InputError(f"stream {stream.name}: arecord ended ({brief(said) or child.returncode})")


SOURCES: dict[str, Callable[[Stream, str], None]] = {
    "mqtt": _mqtt,
    "mqtts": _mqtt,
    "alsa": _alsa,
    "python": _python,
}
