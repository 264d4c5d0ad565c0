"""The windows of a stream are predicted, and a state is reported once they agree; a release of another kind does not stop it."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec import structs

from edge_fl.cli import main
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_maker.capture.streams import Stream
from edge_fl_maker.current_model import CurrentModel
from edge_fl_maker.watch import watch
from tests.maker import wrist
from tests.maker.test_watch import WAIT_S, subscribed
from tests.maker.wrist import LEVELS, RATE

HERE = f"python:{__name__}"
MOVES = ["rest"] * 6 + ["move", "move", "rest", "rest"] * 2 + ["move"] * 6
"""A state per half a second, half a window."""


def moves() -> Iterator[dict[str, float]]:
    for n in range(len(MOVES) * RATE // 2):
        level = LEVELS[MOVES[n * 2 // RATE]]
        yield {"time": n / RATE, "ax": level, "gyro.z": level}


def repeated() -> Iterator[dict[str, float]]:
    while True:
        yield from moves()


@pytest.fixture
def device(tmp_path: Path) -> Path:
    return wrist.install(tmp_path / "wrist")


def watched(device: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[list[dict], str]:
    assert main(["device", "watch", "--stream", f"{HERE}:moves", "--dir", str(device), *options]) == 0
    output = capsys.readouterr()
    return [json.loads(line) for line in output.out.splitlines()], output.err


def test_the_command_predicts_every_window_until_the_stream_ends(
    device: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, _ = watched(device, capsys)
    assert [line["frame"] for line in lines] == list(range(1, len(MOVES)))
    assert [lines[0]["label"], lines[-1]["label"]] == ["rest", "move"] and lines[0]["name"] == f"{HERE}:moves"
    assert all(line["state"] == line["label"] and line["flips"] == line["raw_flips"] for line in lines)


def test_a_state_is_reported_once_windows_agree(device: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, said = watched(device, capsys, "--consensus", "4/4")
    states = [line["state"] for line in lines]
    assert states[:2] == [None, None] and states[-1] == "move" and lines[-1]["flips"] == 1
    assert [states[n] for n in range(1, len(states)) if states[n] != states[n - 1]] == ["rest", "move"]
    assert len({line["label"] for line in lines[5:-4]}) == 2  # single predictions change
    changes = sum(old["label"] != new["label"] for old, new in pairwise(lines))
    assert lines[-1]["raw_flips"] == changes > 4 and lines[-1]["flips_per_hour"] is None
    assert [line["release"] for line in lines] == [1] * len(lines) and lines[0]["watched_s"] == 0
    single = f"the class of single predictions changed {changes} times, the state changed 1 time"
    assert f" {single} (less than 10 min, so no rate per hour)\n" in said
    assert f"{HERE}:moves: rest (change 0)\n" in said and f"{HERE}:moves: move (change 1)\n" in said


def test_wrong_options_are_one_line(device: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, says in (
        (["--stream", f"{HERE}:moves", "--consensus", "5/3", "--dir", str(device)], "expected K/N"),
        (["--stream", "mqtt://", "--dir", str(device)], "expected mqtt://HOST/TOPIC"),
        (
            ["--stream", f"{HERE}:nothing", "--dir", str(device)],
            "expected a function that returns an iterator",
        ),
        (["--stream", "alsa:x", "--crop", "0,0,2,2", "--dir", str(device)], "only frames of a camera"),
        (["--stream", f"{HERE}:moves", "--for", "1min", "--dir", str(device)], "expected --consensus K/N"),
        (
            ["--stream", f"{HERE}:moves", "--dir", str(folder)],
            "the release takes pictures; expected --camera",
        ),
    ):
        assert main(["device", "watch", *options]) == 4
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1 and "nothing was predicted" in error


@pytest.mark.broker
def test_home_assistant_gets_the_stable_state(
    device: Path, mosquitto: Mosquitto, capsys: pytest.CaptureFixture[str]
) -> None:
    port, root = mosquitto.settings.port, "homeassistant/sensor/wrist-1"
    options = [
        "--consensus",
        "4/4",
        "--publish",
        "--id",
        "wrist-1",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    states = []
    with subscribed(port, f"{root}/#") as heard:
        watched(device, capsys, *options)
        while (packet := heard.get(timeout=WAIT_S)).payload != b"offline":
            if packet.topic.endswith("/class/config"):
                assert json.loads(packet.payload)["value_template"] == "{{ value_json.state }}"
            if packet.topic.endswith("/prediction"):
                states.append(json.loads(packet.payload)["state"])
    assert states == [None, "rest", "move"]


def test_a_release_of_another_kind_is_named_and_the_one_before_predicts_on(device: Path) -> None:
    notes: list[str] = []
    with closing(Stream(f"{HERE}:repeated", wrist.INPUT, notes.append)) as stream:
        model = CurrentModel(device)
        found = watch(model, stream)
        next(found)
        wrist.install(device, wrist.PICTURES, release=2)
        labels = {next(found).label for _ in range(20)}
        assert model.current().manifest.input.kind == "picture" and labels == {"rest", "move"}
    assert (
        f"stream {stream.name}: release 2 takes pictures, the stream has windows; release 1 predicts on"
        in notes
    )


def test_windows_of_a_new_release_are_those_of_its_input(device: Path) -> None:
    with closing(Stream(f"{HERE}:repeated", wrist.INPUT, lambda words: None)) as stream:
        found = watch(CurrentModel(device), stream)
        next(found)
        wrist.install(device, structs.replace(wrist.INPUT, shape=(2, 2 * RATE)), release=2)
        assert [next(found).frame for _ in range(30)] == list(range(2, 32))


def test_an_interval_leaves_windows_out(device: Path) -> None:
    with closing(Stream(f"{HERE}:paced", wrist.INPUT, lambda words: None)) as stream:
        began_s = time.monotonic()
        frames = [found.frame for found in watch(CurrentModel(device), stream, interval_s=0.2, count=3)]
        assert time.monotonic() - began_s >= 0.4 and frames[-1] > 5


def paced() -> Iterator[dict[str, float]]:
    for each in repeated():
        time.sleep(0.002)
        yield each
