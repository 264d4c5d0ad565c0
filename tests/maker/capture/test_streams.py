"""Values from a real broker, an iterator and a stand-in for arecord: named, and read again after every kind of interruption."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from edge_fl.errors import ConnectError, EdgeFLError, InputError
from edge_fl.inputs import InputSpec
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_maker.capture import streams
from edge_fl_maker.capture.streams import Block, Stream
from edge_fl_maker.capture.timeline import samples
from tests.maker.capture.test_sparkplug import ALIAS, FLOAT, NAME, payload
from tests.maker.wrist import INPUT, RATE

Publish = Callable[[str, object], None]
AUDIO = InputSpec((800,), (0.0,), (1.0,), "T", "float32", rate=8000, hop=400)
ARECORD = """#!{python}
import os, sys, time
arguments = sys.argv[1:]
assert arguments[:2] == ["-D", "plughw:1"] and arguments[2:] == "-t raw -f S16_LE -c 1 -r 8000".split()
here = os.path.dirname(os.path.abspath(__file__))
if os.path.exists(here + "/unplugged"):
    sys.exit("arecord: main:831: audio open error: No such device")
if os.path.exists(here + "/inaccurate"):
    print("Warning: rate is not accurate (requested = 8000Hz, got = 48000Hz)", file=sys.stderr, flush=True)
for block in range(15):
    sys.stdout.buffer.write(b"".join(int(n % 800).to_bytes(2, "little") for n in range(800)))
    sys.stdout.buffer.flush()
    time.sleep(0.01)
sys.exit("arecord: pcm_read:2221: read error: No such device")
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "RETRY_S", 0.05)


@contextmanager
def opened(
    source: str, input: InputSpec | None = INPUT
) -> Iterator[tuple[Stream, Iterator[Block], list[str]]]:
    notes: list[str] = []
    with closing(Stream(source, input, notes.append)) as stream:
        yield stream, stream.blocks(), notes


@contextmanager
def publishing(port: int) -> Iterator[Publish]:
    client = MqttTransport(
        Endpoint(port=port), f"sensor-{port}-{time.monotonic_ns()}", None, lambda event: None
    )

    def publish(topic: str, content: object) -> None:
        payload = content if isinstance(content, bytes) else json.dumps(content).encode()
        client.publish(Packet(topic, payload))

    client.wait_connected(60)
    yield publish
    client.close()


def first(publish: Publish, topic: str, content: object, blocks: Iterator[Block], stream: Stream) -> Block:
    """Publish until the stream, which subscribes in the background, has received something."""
    while stream.waiting.empty():
        publish(topic, content)
        time.sleep(0.05)
    return next(blocks)


def values(block: Block) -> dict[str, list[float]]:
    return {name: each.tolist() for name, each in block[0].items()}


def until(blocks: Iterator[Block], name: str) -> dict[str, list[float]]:
    return next(found for found in map(values, blocks) if name in found)


@pytest.mark.broker
def test_messages_of_every_form_become_named_values(mosquitto: Mosquitto) -> None:
    port = mosquitto.settings.port
    with (
        opened(f"mqtt://127.0.0.1:{port}/home/+/wrist/%23") as (stream, blocks, notes),
        publishing(port) as publish,
    ):
        first(publish, "home/pi/wrist", {"start": 1}, blocks, stream)
        publish(
            "home/pi/wrist",
            {"time": 1.7e12, "acc": {"x": 1.5, "y": [1, "2", None]}, "on": True, "name": "pi"},
        )
        while (block := next(blocks))[1] is None:
            pass
        found = values(block)
        assert block[1] == 1.7e9 and found.keys() == {"pi.acc.x", "pi.acc.y", "pi.on", "pi.name"}
        assert found["pi.acc.x"] == [1.5] and found["pi.acc.y"][:2] == [1, 2] and found["pi.on"] == [1]
        for damaged in (b"unavailable", b"\xff\xfe", b"{", b"[" * 100_000):
            publish("home/pi/wrist/state", damaged)
        publish("home/pi/wrist/state", b" 21.5 ")
        assert until(blocks, "pi.state") == {"pi.state": [21.5]}
        publish("home/pi/wrist", [{"a": 1}, {"a": 2}])
        assert until(blocks, "pi.a") == {"pi.a": [1]} and until(blocks, "pi.a") == {"pi.a": [2]}
    assert notes == [
        f"stream {stream.name}: home/pi/wrist/state: 'unavailable', expected JSON or a number; skipped"
    ]


@pytest.mark.broker
def test_sparkplug_metrics_are_named_by_their_birth(mosquitto: Mosquitto) -> None:
    port, root = mosquitto.settings.port, "spBv1.0/plant"
    with (
        opened(f"mqtt://127.0.0.1:{port}/{root}/DDATA/press/wrist") as (stream, blocks, notes),
        publishing(port) as publish,
    ):
        first(
            publish,
            f"{root}/DBIRTH/press/wrist",
            payload({NAME: "Acc/x", ALIAS: 7, FLOAT: 0.0}),
            blocks,
            stream,
        )
        publish(f"{root}/DDATA/press/wrist", payload({ALIAS: 7, FLOAT: 2.5}, time=5000))
        while (block := next(blocks))[1] is None:
            pass
        assert (values(block), block[1]) == ({"Acc/x": [2.5]}, 5.0)
        publish(f"{root}/DDATA/press/wrist", payload({ALIAS: 8, FLOAT: 2.5}))
        publish(f"{root}/DDATA/press/wrist", payload({NAME: "end", FLOAT: 1.0}))
        until(blocks, "end")
    assert len(notes) == 1 and "no birth of press names alias 8" in notes[0]


@pytest.mark.broker
def test_a_broker_that_is_gone_is_named_and_the_topic_read_again(
    mosquitto_program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Mosquitto(BrokerSettings(tmp_path / "broker", port=0), mosquitto_program) as broker:
        port = broker.settings.port
        with opened(f"mqtt://127.0.0.1:{port}/a/b") as (stream, blocks, notes):
            with publishing(port) as publish:
                assert values(first(publish, "a/b", 1, blocks, stream)) == {"b": [1]}
            broker.stop()
            while not stream.interrupted:
                time.sleep(0.01)
            with (
                Mosquitto(BrokerSettings(tmp_path / "again", port=port), mosquitto_program),
                publishing(port) as publish,
            ):
                while values(first(publish, "a/b", 2, blocks, stream)) != {"b": [2]}:
                    pass
    assert f"broker mqtt://127.0.0.1:{port}: " in notes[0] and "connecting again" in notes[0]
    assert notes[1] == f"stream {stream.name}: values again"


def test_a_broker_that_is_missing_at_first_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CONNECT_S", 0.3)
    with opened("mqtt://user:secret@127.0.0.1:9/a") as (stream, blocks, _):
        with pytest.raises(ConnectError, match=r"no MQTT broker at mqtt://127.0.0.1:9"):
            next(blocks)
        assert stream.name == "mqtt://127.0.0.1:9/a"


@pytest.mark.parametrize(
    "source", ["mqtt:", "mqtt://host", "mqtt:///a", "mqtt://host:port/a", "udp://host/a", "alsa:", "", "0"]
)
def test_other_sources_are_named(source: str) -> None:
    with pytest.raises(InputError, match=r"expected mqtt://HOST/TOPIC"), opened(source) as (_, blocks, _):
        next(blocks)


ERRORS: list[Exception] = []


def numbers() -> Iterator[object]:
    """Rows, batches and messages, which end in an exception once."""
    for n in range(40):
        yield {"time": n / RATE, "ax": n, "gyro": {"z": -n}}
    if ERRORS:
        raise ERRORS.pop()
    yield [5.0, 6.0]
    yield np.array([[1, 2], [3, 4]])


def test_an_iterator_is_read_into_windows_and_called_again_after_an_exception() -> None:
    ERRORS.append(OSError("sensor is gone"))
    with opened(f"python:{__name__}:numbers") as (stream, _, notes):
        found = [*samples(stream, INPUT)]
    assert len(found) == 2 * 4 and all(x.shape == (1, 2, RATE) and x.dtype == np.float32 for x in found)
    assert np.array_equal(found[1][0, 0], np.arange(8, 24)) and np.array_equal(found[1], found[5])
    assert "OSError: sensor is gone" in notes[0] and "trying again" in notes[0]
    assert any("its clock went" in note for note in notes)


@pytest.mark.parametrize(
    "place", ["nowhere:numbers", f"{__name__}:nothing", f"{__name__}", f"{__name__}:RATE"]
)
def test_what_is_no_iterator_is_one_error(place: str) -> None:
    with (
        opened(f"python:{place}") as (_, blocks, _),
        pytest.raises(EdgeFLError, match="expected a function that returns"),
    ):
        next(blocks)


def test_silence_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SILENT_S", 0.1)
    with opened(f"python:{__name__}:slowly") as (stream, blocks, notes):
        assert next(blocks) and next(blocks)
    assert notes == [
        f"stream {stream.name}: no values for 0.1 s; waiting for them",
        f"stream {stream.name}: values again",
    ]


def slowly() -> Iterator[dict[str, int]]:
    yield {"ax": 1}
    time.sleep(1.0)
    yield {"ax": 2}


@pytest.fixture
def arecord(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the program that reads a microphone: 1.5 s of samples, then the device is gone."""
    program = tmp_path / "arecord"
    program.write_text(ARECORD.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_a_microphone_is_read_into_clips_and_again_once_it_is_back(arecord: Path) -> None:
    with opened("alsa:plughw:1", AUDIO) as (stream, _, notes):
        clips = samples(stream, AUDIO)
        found = [next(clips) for _ in range(29)]
        (arecord / "unplugged").touch()
        while not stream.interrupted:
            time.sleep(0.01)
        time.sleep(0.3)  # several attempts
        (arecord / "unplugged").unlink()
        assert next(clips).shape == (1, 800)
    assert all(x.shape == (1, 800) and x.dtype == np.float32 for x in found)
    assert np.allclose(found[0][0], np.arange(800) / 32768) and np.allclose(
        found[1][0, :400], np.arange(400, 800) / 32768
    )
    assert "read error: No such device; trying again" in notes[0] and "values again" in notes[1]


def test_a_microphone_that_cannot_be_opened_is_named(arecord: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (arecord / "unplugged").touch()
    with (
        opened("alsa:plughw:1", AUDIO) as (_, blocks, _),
        pytest.raises(InputError, match="audio open error"),
    ):
        next(blocks)
    (arecord / "unplugged").unlink()
    (arecord / "inaccurate").touch()
    with opened("alsa:plughw:1", AUDIO) as (_, blocks, _), pytest.raises(InputError, match="got = 48000Hz"):
        next(blocks)
    monkeypatch.setenv("PATH", "/nowhere")
    with opened("alsa:plughw:1", AUDIO) as (_, blocks, _), pytest.raises(InputError, match="alsa-utils"):
        next(blocks)
