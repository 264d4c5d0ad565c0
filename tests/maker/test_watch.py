"""A camera's newest frames are predicted, at most one frame behind; interrupted streams continue; results go to Home Assistant."""

import json
import queue
import secrets
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edge_fl.cli import main
from edge_fl.errors import ConnectError, EdgeFLError
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Event, Packet
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.agent.effects import Memory
from edge_fl_devices.storage.store import Store
from edge_fl_maker.capture.camera import Camera, CameraLimits
from edge_fl_maker.current_model import CurrentModel
from edge_fl_maker.home_assistant import HomeAssistant
from edge_fl_maker.watch import WatchedPrediction, watch
from tests.devices.scripted import eventually
from tests.devices.serving.refit import refit

pytest.importorskip("cv2", reason="edge-fl[camera]")
from tests.maker.videos import number_of, streaming, write_frames, write_video

QUICK = CameraLimits(timeout_s=20.0, min_retry_s=0.05, max_retry_s=0.1)
FRAMES = 150  # three seconds: a busy machine does not miss all of them
WAIT_S = 60.0


def test_a_slow_extractor_gets_the_newest_frame_of_a_video(tmp_path: Path) -> None:
    video = write_video(tmp_path / "numbers.avi", FRAMES, fps=50)
    seen = []
    with closing(Camera(str(video))) as camera:
        read_before = 0
        while frame := camera.newest():
            assert number_of(frame.pixels) == frame.number > read_before
            seen.append(frame.number)
            next_one = min(frame.number + 4, FRAMES)
            eventually(lambda next_one=next_one: camera.grabbed >= next_one)  # it works on this frame
            read_before = camera.grabbed
        assert camera.grabbed == FRAMES
    assert 1 < len(seen) <= FRAMES / 5 + 1


def test_the_frames_of_a_stream_are_at_most_one_behind_the_newest_one_sent(folder: Path) -> None:
    """FFmpeg takes a frame for complete when the next one begins."""
    notes: list[str] = []
    with (
        streaming(fps=200) as (address, stream),
        closing(Camera(address, limits=QUICK, notify=notes.append)) as camera,
        ThreadPoolExecutor(1) as asking,
    ):
        try:
            stream.hold()
            for _ in range(12):
                stream.send(5)  # while the extractor works on the frame before
                eventually(lambda: camera.grabbed >= stream.sent - 1)
                before = camera.grabbed
                asked = asking.submit(camera.newest)
                eventually(lambda asked=asked: camera._wanted or asked.done())
                stream.send(2)
                frame = asked.result(WAIT_S)
                assert frame and before < number_of(frame.pixels) == frame.number
        finally:
            stream.flow()
    assert not notes


def test_an_interrupted_stream_is_opened_again(capsys: pytest.CaptureFixture[str]) -> None:
    notes: list[str] = []
    with (
        streaming(length=5) as (address, stream),
        closing(Camera(address, limits=QUICK, notify=notes.append)) as camera,
    ):
        while stream.connections < 3:
            assert camera.newest()
    assert "interrupted" in notes[0] and "frames again" in notes[1]
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("97", 4, "camera 97: /dev/video97 cannot be opened (devices: "),
        ("nowhere.mp4", 4, "no such file"),
        ("rtsp://user:secret@127.0.0.1:9/cam", 2, "camera rtsp://127.0.0.1:9/cam: no video stream"),
        (__file__, 4, "not a video that can be read"),
    ],
)
def test_a_missing_camera_is_one_line(
    source: str, code: int, says: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["device", "watch", "--camera", source, "--dir", str(folder)]) == code
    output = capfd.readouterr()
    assert (
        says in output.err and output.err.count("\n") == 1 and not output.out and "secret" not in output.err
    )


def test_without_opencv_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(EdgeFLError, match=r"edge-fl\[camera\]"):
        Camera("0")


def halves(path: Path, frames: int) -> Path:
    """A video at 50 frames per second, 64 x 48, whose left half is dark and whose right half is bright."""
    frame = np.full((48, 64, 3), 40, np.uint8)
    frame[:, 32:] = 210
    return write_frames(path, [frame] * frames, 50, (64, 48))


def test_the_prediction_is_that_of_the_cropped_part(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = str(halves(tmp_path / "halves.avi", 400))
    command = ["device", "watch", "--camera", video, "--dir", str(folder), "--limit", "2"]
    for crop, label in (("0,0,32,48", "a"), ("32,0,32,48", "b"), ("40, 8, 16, 40", "b")):
        assert main([*command, "--crop", crop]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["label"] for line in lines] == [label] * 2
    with closing(Camera(video, crop="32,0,16,48")) as camera:
        frame = camera.newest()
    assert frame and frame.pixels.shape == (48, 16, 3) and frame.pixels.min() > 150


@pytest.mark.parametrize(
    ("crop", "says"),
    [
        ("40,0,32,48", "reaches to 72, 48; its frames have 64 x 48 pixels, expected x + w at most 64"),
        ("0,1,64,48", "reaches to 64, 49; its frames have 64 x 48 pixels"),
        ("0,0,0,48", "expected x,y,w,h in pixels from the upper left corner, such as 120,40,320,240"),
        ("-1,0,10,10", "expected x,y,w,h in pixels"),
        ("10,10,10", "expected x,y,w,h in pixels"),
    ],
)
def test_a_crop_that_does_not_fit_is_one_line(
    crop: str, says: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = str(halves(tmp_path / "halves.avi", 20))
    assert main(["device", "watch", "--camera", video, f"--crop={crop}", "--dir", str(folder)]) == 4
    output = capsys.readouterr()
    assert says in output.err and output.err.count("\n") == 1 and not output.out
    assert output.err.rstrip().endswith(("the frame was not used", "nothing was predicted"))


def test_a_captured_camera_is_watched_with_its_crop(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head learns from the captured pictures: predictions are of the same part of the frame, or it is said that they are not."""
    with streaming(fps=100) as (address, _):
        config = tmp_path / "device.toml"
        config.write_text(
            f'id = "pi"\ndata = "{tmp_path}"\nfolder = "{folder}"\n[capture]\nsource = "{address}"\ncrop = "16,16,32,32"\n'
        )
        command = ["device", "watch", "--camera", address, "--config", str(config), "--limit", "1"]
        for options, says in (
            ([], f"camera {address}: cropped to 16,16,32,32, as the pictures of [capture]"),
            (
                ["--crop", "0,0,8,8"],
                "--crop 0,0,8,8, but the pictures of [capture] are cropped to 16,16,32,32",
            ),
        ):
            assert main([*command, *options]) == 0
            assert says in capsys.readouterr().err
        assert main([*command, "--crop", "16,16,32,32"]) == 0
        assert "[capture]" not in capsys.readouterr().err


STAYS, SHARE = 150, 0.25  # frames; of them with flicker


def test_a_video_with_flicker_changes_the_state_only_when_its_content_does(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three parts, dark, bright and dark, a quarter of the frames show the other one, at most three of nine in a row."""
    rng, wrong = np.random.default_rng(0), []
    for _ in range(3 * STAYS):
        wrong.append(sum(wrong[-8:]) < 3 and rng.random() < SHARE)
    true = ["aba"[frame // STAYS] for frame in range(3 * STAYS)]
    greys = [200 if (label == "b") != other else 40 for label, other in zip(true, wrong, strict=True)]
    grey_frames = (np.full((48, 64, 3), grey, np.uint8) for grey in greys)
    video = write_frames(tmp_path / "flicker.avi", grey_frames, 50, (64, 48))
    options = ["--consensus", "6/9", "--for", "0.5s"]
    assert main(["device", "watch", "--camera", str(video), "--dir", str(folder), *options]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    last = lines[-1]
    assert sum(wrong) > 0.15 * len(wrong) and last["flips"] == 2 and last["raw_flips"] >= 10 * last["flips"]

    shown = [line["label"] != true[line["frame"] - 1] for line in lines]
    premise = all(sum(shown[first : first + 9]) <= 3 for first in range(len(shown)))
    assert premise or len(lines) < len(true)  # a busy machine leaves frames out
    for change in (STAYS, 2 * STAYS) if premise else ():
        after = [line for line in lines if line["frame"] > change]
        latest_s = after[8]["watched_s"] + 0.5 + 0.002
        followed = next(line for line in after if line["watched_s"] >= latest_s)
        assert followed["state"] == true[change]


def test_a_pi_camera_is_read_through_picamera2(monkeypatch: pytest.MonkeyPatch) -> None:
    class Picamera2:
        @staticmethod
        def global_camera_info() -> list[dict[str, str]]:
            return [{"Model": "imx708"}]

        def __init__(self, number: int) -> None:
            self.taken = number

        def create_video_configuration(self, main: dict[str, str], **_: object) -> dict[str, str]:
            return main

        def configure(self, main: dict[str, str]) -> None:
            assert main == {"format": "BGR888"}

        def start(self) -> None: ...

        def capture_array(self, stream: str) -> np.ndarray:
            time.sleep(0.01)
            self.taken += 1
            return np.full((2, 2, 3), self.taken, np.uint8)

        def close(self) -> None: ...

    module = ModuleType("picamera2")
    module.Picamera2 = Picamera2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "picamera2", module)
    with closing(Camera("0")) as camera:
        for _ in range(3):
            frame = camera.newest()
            assert frame and frame.pixels[0, 0, 0] == frame.number


def test_the_command_writes_one_object_per_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = write_video(tmp_path / "numbers.avi", 2000, fps=100)  # longer than the command takes
    command = ["device", "watch", "--camera", str(video), "--dir", str(folder), "--top", "2"]
    assert main([*command, "--limit", "3", "--interval", "0.02"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == [str(video)] * 3 and all(line["behind"] >= 0 for line in lines)
    assert lines[0]["frame"] < lines[1]["frame"] < lines[2]["frame"] and len(lines[0]["top"]) == 2
    assert {"time", "class_id", "label", "probability", "status", "distance"} <= lines[0].keys()
    assert main([*command, "--publish"]) == 4
    assert "--id" in capsys.readouterr().err


def test_a_new_model_is_used_from_the_next_frame_on(folder: Path, tmp_path: Path) -> None:
    video = write_video(tmp_path / "numbers.avi", 2000, fps=100)
    kinds = []
    with closing(Camera(str(video))) as camera:
        model = CurrentModel(folder)
        for _ in watch(model, camera, count=2):
            kinds.append(model.current().head.kind)
            refit(folder, "nearest")
    assert kinds == ["logistic", "nearest"]


# Home Assistant


@pytest.mark.broker
def test_home_assistant_discovers_the_device_and_sees_it_leave(
    mosquitto: Mosquitto, folder: Path, tmp_path: Path
) -> None:
    """A subscriber that comes later, as Home Assistant after a restart, gets the retained messages of a real broker."""
    video, port = write_video(tmp_path / "numbers.avi", 2000, fps=50), mosquitto.settings.port
    options = ["--publish", "--id", "pi-07", "--host", "127.0.0.1", "--port", str(port)]
    before, prefix = retained_at(port), "homeassistant/sensor/pi-07"
    updates = "homeassistant/update/pi-07"
    Store(folder).remember(Memory(offered=3, agent="0.1.7"))
    with subscribed(port, f"{prefix}/prediction") as heard:
        command = ["device", "watch", "--camera", str(video), "--dir", str(folder), "--limit", "3"]
        assert main([*command, *options]) == 0
        state = json.loads(heard.get(timeout=WAIT_S).payload)
    assert state["status"] == "answered" and state["label"] in "ab"

    retained = {topic: text for topic, text in retained_at(port).items() if topic not in before}
    assert retained.keys() == {
        f"{prefix}/class/config",
        f"{prefix}/probability/config",
        f"{prefix}/availability",
        *(f"{updates}/{what}/{leaf}" for what in ("release", "agent") for leaf in ("config", "state")),
    }
    assert retained[f"{prefix}/availability"] == "offline"
    for topic in (f"{prefix}/class", f"{prefix}/probability", f"{updates}/release", f"{updates}/agent"):
        config, is_update = json.loads(retained[f"{topic}/config"]), topic.startswith(updates)
        state = f"{topic}/state" if is_update else f"{prefix}/prediction"
        assert config["state_topic"] == state  # the one required field of a sensor
        assert config["availability_topic"] == f"{prefix}/availability"
        assert (
            config["unique_id"] == f"edge-fl-main-pi-07-{topic.rpartition('/')[2]}"
        )  # required for a device, as are its identifiers
        assert (
            config["device"]["identifiers"] == ["edge-fl-main-pi-07"]
            and config["origin"]["name"] == "edge-fl"
        )
        assert is_update or "value_json" in config["value_template"]
        assert "command_topic" not in config  # the server decides what is installed
    assert json.loads(retained[f"{updates}/release/state"]) == {
        "installed_version": "1",
        "latest_version": "3",
    }
    agent = json.loads(retained[f"{updates}/agent/state"])
    assert agent == {"installed_version": "0.1.7", "latest_version": "0.1.7"}  # no other one is known


@pytest.mark.broker
def test_after_a_crash_the_will_says_offline_and_a_reconnect_online(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    endpoint = Endpoint(port=mosquitto.settings.port)
    made: list[MqttTransport] = []

    def connect(name: str, will: object, deliver: object) -> MqttTransport:
        made.append(MqttTransport(endpoint, name, will, deliver))  # type: ignore[arg-type]
        return made[-1]

    publisher = HomeAssistant(connect, "pi-08-watch", "pi-08", "main", tmp_path)
    publisher.publish(prediction("a"))
    made[0].drain(WAIT_S)
    topic, port = "homeassistant/sensor/pi-08/availability", mosquitto.settings.port
    assert retained_at(port)[topic] == "online"
    with subscribed(port, topic) as heard:
        assert heard.get(timeout=WAIT_S).payload == b"online"
        made[0].close(clean=False)
        assert heard.get(timeout=WAIT_S).payload == b"offline"
    assert retained_at(port)[topic] == "offline"


@pytest.mark.broker
def test_an_unchanged_class_is_not_repeated(mosquitto: Mosquitto, tmp_path: Path) -> None:
    port = mosquitto.settings.port
    connect, labels = partial(MqttTransport, Endpoint(port=port)), []
    with subscribed(port, "homeassistant/sensor/pi-09/#") as heard:
        with closing(HomeAssistant(connect, "pi-09-watch", "pi-09", "main", tmp_path)) as publisher:
            for label in ("a", "a", "b", "b", "a"):
                publisher.publish(prediction(label))
        while (packet := heard.get(timeout=WAIT_S)).payload != b"offline":
            if packet.topic.endswith("/prediction"):
                labels.append(json.loads(packet.payload)["label"])
    assert labels == ["a", "b", "a"]


def test_without_a_broker_publishing_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("edge_fl_maker.home_assistant.CONNECT_S", 0.3)
    with pytest.raises(ConnectError, match="no MQTT broker"):
        HomeAssistant(partial(MqttTransport, Endpoint(port=9)), "x-watch", "x", "main", tmp_path)


def prediction(label: str) -> WatchedPrediction:
    time = "2026-01-01T00:00:00.000+00:00"
    return WatchedPrediction("0", 0, label, 0.9, "answered", 0.1, (), (label,), 0.9, time, 1, 0, state=label)


@contextmanager
def subscribed(port: int, topic: str) -> Iterator[queue.SimpleQueue[Packet]]:
    """The packets on a topic, from now on and retained ones."""
    heard: queue.SimpleQueue[Packet] = queue.SimpleQueue()

    def keep(event: Event) -> None:
        if isinstance(event, Packet):
            heard.put(event)

    name = f"listener-{secrets.token_hex(4)}"
    client = MqttTransport(Endpoint(port=port), name, None, keep, session_expiry_s=0)
    try:
        client.subscribe(topic)
        client.drain(WAIT_S)
        yield heard
    finally:
        client.close()


def retained_at(port: int) -> dict[str, str]:
    """What the broker retains for Home Assistant, by topic."""
    found, last = {}, f"homeassistant/last-{secrets.token_hex(4)}"
    with subscribed(port, "homeassistant/#") as heard:
        client = MqttTransport(
            Endpoint(port=port), f"{last[14:]}", None, lambda event: None, session_expiry_s=0
        )
        client.publish(Packet(last, b""))  # comes after all that is retained
        while (packet := heard.get(timeout=WAIT_S)).topic != last:
            found[packet.topic] = packet.payload.decode()
        client.close()
    return found
