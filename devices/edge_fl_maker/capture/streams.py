"""Live values of series, audio and tables.

    mqtt://[USER:PASSWORD@]HOST[:PORT]/TOPIC   JSON, plain numbers or Sparkplug B; mqtts:// with TLS; ?identity=FOLDER
    alsa:DEVICE                                a microphone, recorded by arecord
    python:package.module:function             an iterator of values

A thread reads the source, which may be interrupted; `edge_fl_maker.capture.timeline` makes a recording of its values.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from queue import Empty, Queue, SimpleQueue
from secrets import token_hex
from threading import Event
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from edge_fl import threads
from edge_fl.console.output import print_status
from edge_fl.errors import ConnectError, EdgeFLError, InputError, brief
from edge_fl.inputs import InputSpec
from edge_fl_maker.capture.camera import NOTHING, shown

Numbers = NDArray[np.float64]
Notify = Callable[[str], None]
Block = tuple[dict[str, Numbers], float | None, float]
"""New values [n] of some channels; the time of the last ones in s, on any clock; when they arrived, on one that nobody sets."""
EXPECTED = "expected mqtt://HOST/TOPIC, mqtts://HOST/TOPIC, alsa:DEVICE or python:package.module:function"
CLOCKS = frozenset({"time", "timestamp", "ts", "last_seen"})
"""Names of the time of a message, in lower case."""
SWITCHES = {"on": 1.0, "off": 0.0, "true": 1.0, "false": 0.0}
MICROPHONE_RATE = 16_000
SILENT_S, CONNECT_S, CLOSE_S, RETRY_S, POLL_S = 10.0, 15.0, 2.0, 2.0, 0.2
REPEAT_S = 60.0
"""A remark is not made again within this time."""
MOST_WAITING = 2000
"""Blocks that wait to be used; of more the oldest are dropped."""


class Stream:
    """Reads `source`; `input` gives the rate of a microphone and the names of unnamed values. `interrupted`: there are none at present.

    Raises InputError for another form. A source that has worked is opened again when it fails.
    """

    def __init__(self, source: str, input: InputSpec | None = None, notify: Notify = print_status) -> None:
        self.name, self.input, self.interrupted, self.stopped = shown(source), input, False, Event()
        self.waiting = Queue[Block | EdgeFLError | None](MOST_WAITING)
        self._source, self._has_worked, self._notify, self._said = source, False, notify, dict[str, float]()
        kind, _, place = source.partition(":")
        if kind not in SOURCES or not place:
            raise InputError(f"stream {self.name}: {EXPECTED}", NOTHING)
        self._read = SOURCES[kind]
        self._thread = threads.once(self._run, "edge-fl-stream", report=self.interrupt)
        self._thread.start()

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks as they come. Raises InputError or ConnectError if the source does not work at first."""
        heard_s = time.monotonic()
        while not self.stopped.is_set():
            try:
                block = self.waiting.get(timeout=POLL_S)
            except Empty:
                if time.monotonic() - heard_s > SILENT_S:
                    self.interrupt(f"no values for {SILENT_S:g} s; waiting for them")
                continue
            if isinstance(block, EdgeFLError):
                raise block
            if block is None:
                return
            if self.interrupted:
                self.interrupted = False
                self._notify(f"stream {self.name}: values again")
            heard_s = time.monotonic()
            yield block

    def give(self, values: dict[str, Numbers], time_s: float | None) -> None:
        """Hand over new values."""
        self._has_worked = True
        self._put((values, time_s, time.monotonic()))

    def give_message(self, content: object, levels: list[str], time_s: float | None = None) -> None:
        """Hand over the numbers, or lists of them, in nested dicts; their names are joined by dots and begin with `levels`."""
        found = dict(_flat(content, levels))
        if clock := next((name for name in found if name.rpartition(".")[2].lower() in CLOCKS), None):
            time_s = seconds(found.pop(clock))
        lists = ((name, value if isinstance(value, list) else [value]) for name, value in found.items())
        self.give({name: np.array([*map(number, each)]) for name, each in lists if each}, time_s)

    def interrupt(self, why: str) -> None:
        """Say why there are no values at present."""
        if not self.interrupted:
            self._notify(f"stream {self.name}: {why}")
        self.interrupted = True

    def say(self, kind: str, words: str) -> None:
        """Say what is wrong, once for each kind in REPEAT_S."""
        if time.monotonic() - self._said.get(kind, -math.inf) > REPEAT_S:
            self._said[kind] = time.monotonic()
            self._notify(f"stream {self.name}: {words}")

    def close(self) -> None:
        """End the thread."""
        self.stopped.set()
        self._thread.join(CLOSE_S)

    def _put(self, item: Block | EdgeFLError | None) -> None:
        with suppress(Empty):
            while self.waiting.full():
                self.say("slow", "more values than are used in this time; the oldest are dropped")
                self.waiting.get_nowait()
        self.waiting.put(item)

    def _run(self) -> None:
        while not self.stopped.is_set():
            try:
                self._read(self, self._source)
                return self._put(None)
            except EdgeFLError as error:
                if not self._has_worked:
                    error.consequence = NOTHING
                    return self._put(error)
                self.interrupt(f"{error.message}; trying again")
            self.stopped.wait(RETRY_S)


def _flat(value: object, levels: list[str]) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(each, [*levels, str(key)])
    else:
        yield ".".join(levels), value


def number(value: Any) -> float:
    """The number that a value is, also as text or a switch; NaN of all else."""
    try:
        found = float(SWITCHES.get(value.strip().lower(), value) if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return found if abs(found) < 3e38 else math.nan


def seconds(value: object) -> float | None:
    """The time that a value is: a number of s, ms, µs or ns, or a text as in ISO 8601; None of all else."""
    found = number(value)
    with suppress(ValueError, OverflowError):
        found = datetime.fromisoformat(str(value)).timestamp() if math.isnan(found) else found
    while found > 1e11:
        found /= 1000
    return None if math.isnan(found) else found


def _mqtt(stream: Stream, source: str) -> None:
    """Read a topic, whose wildcards name the values: in a/+/b, those of a/ax/b begin with "ax"."""
    from edge_fl.wire import identity, transport  # here: other sources have no use for their 15 MB
    from edge_fl.wire.endpoint import PORT, TLS_PORT, Endpoint, Login
    from edge_fl.wire.mqtt.transport import MqttTransport
    from edge_fl_maker.capture.sparkplug import NAMESPACE, Metrics

    try:
        parts = urlsplit(source.replace("#", "%23"))
        host, port, pattern = parts.hostname or "", parts.port, unquote(parts.path[1:]).split("/")
        if not host or not pattern[0]:
            raise ValueError("no host or no topic")
    except ValueError as error:
        raise InputError(f"stream {stream.name}: {error}; {EXPECTED}") from error
    tls, client = parts.scheme == "mqtts", f"edge-fl-{token_hex(4)}"
    metrics, changes = Metrics(), SimpleQueue[transport.Event]()
    login = Login(unquote(parts.username), unquote(parts.password or "")) if parts.username else None
    endpoint = Endpoint(host, port or (TLS_PORT if tls else PORT), login=login, tls=tls)
    for folder in parse_qs(parts.query).get("identity", ()):
        endpoint, certificate = identity.endpoint(host, port or 0, folder), identity.certificate_in(folder)
        client = certificate.device if certificate else client
    fixed = {place for place, level in enumerate(pattern) if level not in ("+", "#")}
    if is_sparkplug := pattern[0] == NAMESPACE and len(pattern) > 2:
        pattern[2] = "+"  # the type of message: births name the values
        fixed.add(2)

    def receive(event: transport.Event) -> None:
        if not isinstance(event, transport.Packet):
            return changes.put(event)
        levels = event.topic.split("/")
        names = [level for place, level in enumerate(levels) if place not in fixed]
        try:
            if is_sparkplug:
                for time_s, found in metrics.read(levels, event.payload):
                    stream.give_message(found, names, time_s)
                return None
            try:
                content = json.loads(event.payload)
            except ValueError:
                content = event.payload.decode().strip()
                if math.isnan(number(content)):
                    raise ValueError(f"{content!r}, expected JSON or a number") from None
            rows = content if isinstance(content, list) and isinstance((*content, 0)[0], dict) else [content]
            for row in rows:
                stream.give_message(row, names or levels[-1:] * (not isinstance(row, dict)))
        except (ValueError, RecursionError) as error:
            stream.say("message", f"{event.topic}: {brief(error)}; skipped")

    connection = MqttTransport(endpoint, client, None, receive, session_expiry_s=0, clean_start=True)
    try:
        connection.wait_connected(CONNECT_S)
        while not stream.stopped.is_set():
            if connection.denied:
                raise ConnectError(f"stream {stream.name}: the broker denies {connection.denied}")
            with suppress(Empty):
                change = changes.get(timeout=POLL_S)
                if isinstance(change, transport.Connected):
                    connection.subscribe("/".join(pattern), qos=0)  # what is sent again has a wrong time
                elif isinstance(change, transport.Disconnected):
                    stream.interrupt(f"broker {endpoint}: {change}; connecting again")
    finally:
        connection.close()


def _python(stream: Stream, source: str) -> None:
    """Read an iterator of dicts as in JSON messages, or of the values of all channels, or a list of values of each."""
    _, module, name = (*source.split(":", 2), "")[:3]
    names = stream.input.names if stream.input else ()
    try:
        for item in getattr(importlib.import_module(module), name)():
            while stream.waiting.full() and not stream.stopped.wait(POLL_S):
                pass
            if stream.stopped.is_set():
                return
            if not isinstance(item, dict):
                rows = np.atleast_1d(np.asarray(item)).tolist()
                item = dict(zip(names or [f"channel {n + 1}" for n in range(len(rows))], rows, strict=True))
            stream.give_message(item, [])
    except Exception as error:  # third-party code may raise anything
        what = f"{type(error).__name__}: {brief(error)}; expected a function that returns an iterator"
        raise InputError(f"stream {stream.name}: {what} of values") from error


def _alsa(stream: Stream, source: str) -> None:
    """Read mono values of 16 bits."""
    rate = round(stream.input.rate) if stream.input else MICROPHONE_RATE
    command = ["arecord", "-D", source.partition(":")[2], *f"-t raw -f S16_LE -c 1 -r {rate}".split()]
    with tempfile.TemporaryFile() as errors:
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        except OSError as error:
            raise InputError(f"arecord: {error.strerror}; expected apt install alsa-utils") from error
        with child:
            said, time_s = "", time.monotonic()
            while child.stdout and not stream.stopped.is_set():
                read = child.stdout.read(2 * (rate // 10))
                said = os.pread(errors.fileno(), 1000, 0).decode(errors="replace").strip()
                if not read or "rate is not accurate" in said:
                    break
                values = np.frombuffer(read[: len(read) // 2 * 2], "<i2") / 32768
                time_s += len(values) / rate
                stream.give({"audio": values}, time_s)
            child.terminate()
    if not stream.stopped.is_set():
        raise InputError(f"stream {stream.name}: arecord ended: {brief(said)}")


SOURCES: dict[str, Callable[[Stream, str], None]] = {
    **dict.fromkeys(("mqtt", "mqtts"), _mqtt),
    "alsa": _alsa,
    "python": _python,
}
