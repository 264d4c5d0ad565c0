"""Live values of series, audio and tables.

    mqtt://[USER:PASSWORD@]HOST[:PORT]/TOPIC   JSON, plain numbers or Sparkplug B; mqtts:// with TLS; ?identity=FOLDER
    alsa:DEVICE                                a microphone, recorded by arecord
    python:package.module:function             an iterator of values

A thread reads the source, which may be interrupted; `edge_fl_maker.capture.timeline` makes a recording of its values.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from queue import Empty, Queue, SimpleQueue
from secrets import token_hex
from threading import Event
from typing import Any, NamedTuple, Self
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

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
EXPECTED = "expected mqtt://HOST/TOPIC, mqtts://HOST/TOPIC, alsa:DEVICE or python:package.module:function"
CLOCKS = frozenset({"time", "timestamp", "ts", "last_seen"})
"""Names of the time of a message, in lower case."""
SWITCHES = {"on": 1.0, "off": 0.0, "true": 1.0, "false": 0.0}
MICROPHONE_RATE = 16_000
SILENT_S, CONNECT_S, POLL_S = 10.0, 15.0, 0.2
MIN_RETRY_S, MAX_RETRY_S = 0.5, 30.0
REPEAT_S = 60.0
"""A remark is not made again within this time."""
MOST_WAITING = 2000
"""Blocks that wait to be used; of more the oldest are dropped."""


class Block(NamedTuple):
    """New values [n] of some channels; the time of the last ones in s, on any clock; when they arrived, on one that nobody sets."""

    values: dict[str, Floats]
    time: float | None
    arrived: float


class Stream:
    """Reads `source`; `input` gives the rate of a microphone, and rate and names of arrays of a Python function.

    `interrupted`: there are no values at present. A source that worked before is opened again.
    """

    def __init__(
        self, source: str, input: InputSpec | None = None, notify: Callable[[str], None] = print_status
    ) -> None:
        self.name, self.input, self.interrupted, self.stopped = shown(source), input, False, Event()
        self._notify, self._said = notify, dict[str, float]()
        self._waiting, self._given = Queue[Block](MOST_WAITING), 0
        kind, _, self._place = source.partition(":")
        if kind not in SOURCES or not self._place:
            raise InputError(f"stream {self.name}: {EXPECTED}")
        self._read = SOURCES[kind]
        self._error: EdgeFLError | None = None
        self._thread = threads.once(self._run, "edge-fl-stream")
        self._thread.start()

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks as they come. Raises InputError or ConnectError if the source does not work at first."""
        heard_s = time.monotonic()
        while not self.stopped.is_set():
            try:
                block = self._waiting.get(timeout=POLL_S)
            except Empty:
                if self._error:
                    raise self._error from None
                if not self._thread.is_alive():
                    return
                if time.monotonic() - heard_s > SILENT_S:
                    self.interrupt(f"no values for {SILENT_S:g} s; waiting for them")
                continue
            if self.interrupted:
                self.interrupted = False
                self._notify(f"stream {self.name}: values again")
            heard_s = time.monotonic()
            yield block

    def give(self, values: dict[str, Floats], time_s: float | None) -> None:
        """Hand over new values, in place of the oldest if too many are waiting."""
        if self._waiting.full():
            self.say("slow", "more values than are used in this time; the oldest are dropped")
            with suppress(Empty):
                self._waiting.get_nowait()
        self._waiting.put(Block(values, time_s, time.monotonic()))
        self._given += 1

    def give_message(self, content: object, levels: list[str], time_s: float | None = None) -> None:
        """Hand over the numbers, or lists of them, in nested dicts; their names are joined by dots and begin with `levels`."""
        found = dict(_flat(content, levels))
        if clock := next((name for name in found if name.rpartition(".")[2].lower() in CLOCKS), None):
            time_s = seconds(found.pop(clock))
        lists = {name: value if isinstance(value, list) else [value] for name, value in found.items()}
        self.give(
            {name: np.array([*map(number, each)], np.float32) for name, each in lists.items() if each}, time_s
        )

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

    @property
    def waiting(self) -> int:
        """The number of blocks that wait to be used."""
        return self._waiting.qsize()

    def close(self) -> None:
        """End the thread."""
        self.stopped.set()
        self._thread.join(CONNECT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        pause_s, given = MIN_RETRY_S, 0
        while not self.stopped.is_set():
            try:
                return self._read(self, self._place)
            except Exception as error:
                if not isinstance(error, EdgeFLError):
                    log.exception("stream %s: unexpected error", self.name)
                    error = InputError(f"{type(error).__name__}: {brief(error)}")
                if not self._given:
                    self._error = error
                    return
                self.interrupt(f"{error.message}; trying again")
            pause_s = MIN_RETRY_S if self._given > given else min(2 * pause_s, MAX_RETRY_S)
            given = self._given
            self.stopped.wait(pause_s)


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
    if math.isnan(found):
        try:
            return datetime.fromisoformat(str(value)).timestamp()
        except (ValueError, OverflowError):
            return None
    while found > 1e11:
        found /= 1000
    return found


def _mqtt(stream: Stream, address: str, *, tls: bool = False) -> None:
    """Read a topic, whose wildcards name the values: in a/+/b, those of a/ax/b begin with "ax"."""
    try:
        parts = urlsplit(address.replace("#", "%23"))
        port, topic, folder = parts.port or 0, unquote(parts.path[1:]), parse_qs(parts.query).get("identity")
    except ValueError as error:
        raise InputError(f"stream {stream.name}: {error}; {EXPECTED}") from error
    if not parts.hostname or not topic:
        raise InputError(f"stream {stream.name}: {EXPECTED}")
    endpoint, client = _endpoint(parts.hostname, port, parts, folder[0] if folder else "", tls)
    fixed, metrics, changes = dict(enumerate(topic.split("/"))), Metrics(), SimpleQueue[MqttEvent]()
    if fixed[0] == NAMESPACE and 2 in fixed:
        fixed[2] = "+"  # births name the values
    pattern = "/".join(fixed.values())
    names = [
        place
        for place, level in fixed.items()
        if level in ("+", "#") and (place != 2 or fixed[0] != NAMESPACE)
    ]

    def receive(event: MqttEvent) -> None:
        if not isinstance(event, Packet):
            changes.put(event)
            return
        levels = event.topic.split("/")
        prefix = [level for place, level in enumerate(levels) if place in names or place >= len(fixed)]
        try:
            if levels[0] == NAMESPACE:
                for time_s, found in metrics.read(levels, event.payload):
                    stream.give_message(found, prefix, time_s)
                return
            try:
                content = json.loads(event.payload)
            except ValueError:
                content = event.payload.decode().strip()
            if not isinstance(content, dict):
                prefix = prefix or levels[-1:]
            rows = (
                content
                if isinstance(content, list) and content and isinstance(content[0], dict)
                else [content]
            )
            for row in rows:
                stream.give_message(row, prefix)
        except (ValueError, RecursionError) as error:
            stream.say("message", f"{event.topic}: {brief(error)}; skipped")

    transport = MqttTransport(endpoint, client, None, receive, session_expiry_s=0, clean_start=True)
    try:
        transport.wait_connected(CONNECT_S)
        while not stream.stopped.is_set():
            if transport.denied:
                raise ConnectError(f"stream {stream.name}: the broker denies {transport.denied}")
            with suppress(Empty):
                change = changes.get(timeout=POLL_S)
                if isinstance(change, Connected):
                    transport.subscribe(pattern, qos=0)  # what comes later than it was sent has a wrong time
                elif isinstance(change, Disconnected):
                    stream.interrupt(f"broker {endpoint}: {change}; connecting again")
    finally:
        transport.close()


def _endpoint(host: str, port: int, parts: SplitResult, folder: str, tls: bool) -> tuple[Endpoint, str]:
    """The broker of an address, and the client's name. Raises ConfigError."""
    client = f"edge-fl-{token_hex(4)}"
    if folder:
        certificate = identity.certificate_in(folder)
        return identity.endpoint(host, port, folder), certificate.device if certificate else client
    login = Login(unquote(parts.username), unquote(parts.password or "")) if parts.username else None
    return Endpoint(host, port or (TLS_PORT if tls else PORT), login=login, tls=tls), client


def _python(stream: Stream, place: str) -> None:
    """Read an iterator of dicts as in JSON messages, or of numbers or arrays [C] or [C, n] at the input's rate."""
    module, _, name = place.partition(":")
    rate, names = (stream.input.rate, stream.input.names) if stream.input else (0.0, ())
    count = 0
    try:
        for item in getattr(importlib.import_module(module), name)():
            while stream.waiting >= MOST_WAITING and not stream.stopped.wait(POLL_S):
                pass
            if stream.stopped.is_set():
                return
            if isinstance(item, dict):
                stream.give_message(item, [])
                continue
            rows = np.atleast_1d(np.asarray(item, np.float32))
            rows = rows[:, None] if rows.ndim == 1 else rows
            count += rows.shape[1]
            named = zip(names or (f"channel {row + 1}" for row in range(len(rows))), rows, strict=bool(names))
            stream.give(dict(named), count / rate if rate else None)
    except Exception as error:  # third-party code may raise anything
        raise InputError(
            f"stream {stream.name}: {type(error).__name__}: {brief(error)}; expected a function that returns an iterator of values"
        ) from error


def _alsa(stream: Stream, device: str) -> None:
    """Read mono values of 16 bits."""
    rate = round(stream.input.rate) if stream.input else MICROPHONE_RATE
    command = ["arecord", "-D", device, "-t", "raw", "-f", "S16_LE", "-c", "1", "-r", str(rate)]
    with tempfile.TemporaryFile() as errors, suppress(ProcessLookupError):
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        except OSError as error:
            raise InputError(f"arecord: {error.strerror}; expected apt install alsa-utils") from error
        pipe, rest, start_s, count, said, ended = child.stdout, b"", 0.0, 0, "", False
        assert pipe
        try:
            while not (stream.stopped.is_set() or ended or "rate is not accurate" in said):
                if not select.select([pipe], [], [], POLL_S)[0]:
                    continue
                read = os.read(pipe.fileno(), 2**14)
                errors.seek(0)
                said, ended, rest = errors.read().decode(errors="replace"), not read, rest + read
                whole = np.frombuffer(rest[: len(rest) // 2 * 2], "<i2")
                rest, count = rest[2 * len(whole) :], count + len(whole)
                start_s = start_s or time.monotonic() - count / rate
                if len(whole):
                    stream.give(
                        {"audio": whole.astype(np.float32) / np.float32(32768)}, start_s + count / rate
                    )
        finally:
            child.terminate()
            child.wait()
            pipe.close()
    if not stream.stopped.is_set():
        raise InputError(f"stream {stream.name}: arecord ended: {brief(said)}")


SOURCES: dict[str, Callable[[Stream, str], None]] = {
    "mqtt": _mqtt,
    "mqtts": lambda stream, address: _mqtt(stream, address, tls=True),
    "alsa": _alsa,
    "python": _python,
}
