"""Labels to look at on the label page: found on request, corrected or called right with one action, undone, and kept over a restart."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_fl_devices.config import DeviceConfig
from tests.maker.labelling.fruit import CLASSES, Desk, desk, device, fruit
from tests.maker.labelling.test_recordings import IMU, learner_of, posture

PER_CLASS = 8


@pytest.fixture
def config(tmp_path: Path) -> DeviceConfig:
    """Six classes of eight pictures, of which one apple is in the folder of the leaves."""
    for label, number in np.ndindex(len(CLASSES), PER_CLASS):
        name = "leaf" if (label, number) == (0, 0) else CLASSES[label]
        path = tmp_path / "images" / name / f"{label}-{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(fruit(label, number))
    return device(tmp_path)


def examined(site: Desk, deadline_s: float = 60.0) -> dict[str, Any]:
    """Ask for an examination, and wait for what it finds."""
    site.learned()
    status, view = site.act("examine")
    assert status == 200
    ends_s = time.monotonic() + deadline_s
    while "examining" in (found := view["examined"])["words"]:
        assert time.monotonic() < ends_s
        time.sleep(0.02)
        view = site.request("GET", "/api/label/view?client=me")[1]
    return dict(found)


def which(found: dict[str, Any], name: str) -> dict[str, str]:
    """The listed label of a file, as an action names it."""
    (one,) = [each for each in found["labels"] if each["name"] == name]
    return {key: one[key] for key in ("name", "version")}


def names(view: dict[str, Any]) -> list[str]:
    return [each["name"] for each in view["examined"]["labels"]]


def test_a_wrong_label_is_shown_corrected_and_undone(config: DeviceConfig) -> None:
    with desk(config) as site:
        assert site.request("GET", "/api/label/view?client=me")[1]["examined"]["labels"] == []
        found = examined(site)
        first = found["labels"][0]
        assert (first["name"], first["class_name"], first["likely"]) == ("leaf/0-0.png", "leaf", "apple")
        assert "other labels say apple" in first["why"] and "48 labels to look at" in found["words"]
        one = which(found, "leaf/0-0.png")
        picture = site.request("GET", f"/api/label/preview?name={one['name']}&version={one['version']}")
        assert picture[:2] == (200, fruit(0, 0))
        status, done = site.act("correct", **one, class_name="apple")
        assert status == 200 and "leaf/0-0.png" not in names(done["view"])
        assert (site.images / "apple" / "0-0.png").read_bytes() == fruit(0, 0)
        assert not (site.images / "leaf" / "0-0.png").exists()
        status, answer = site.act("correct", **one, class_name="apple")
        assert (
            status == 422 and "changed, moved or called right since; nothing was changed" in answer["error"]
        )
        status, view = site.act("undo", action=done["action"])
        assert status == 200 and names(view)[0] == "leaf/0-0.png"
        assert not (site.images / "apple" / "0-0.png").exists()


def test_a_label_that_a_person_calls_right_is_not_shown_again(config: DeviceConfig) -> None:
    with desk(config) as site:
        one = which(examined(site), "leaf/0-0.png")
        status, done = site.act("approve", **one)
        assert status == 200 and one["name"] not in names(done["view"])
        assert one["name"] in names(site.act("undo", action=done["action"])[1])
        assert site.act("approve", **one)[0] == 200
    with desk(config) as site:  # after a restart
        found = examined(site)
        assert "leaf/0-0.png" not in [each["name"] for each in found["labels"]]
        assert found["words"].startswith(f"{len(found['labels'])} of 48 labels to look at")
        (site.images / "leaf" / "0-0.png").rename(site.images / "plum" / "0-0.png")
        assert "plum/0-0.png" in [
            each["name"] for each in examined(site)["labels"]
        ]  # another label of the file


def test_a_corrected_file_gets_another_name_where_its_own_is_taken(config: DeviceConfig) -> None:
    with desk(config) as site:
        one = which(examined(site), "leaf/0-0.png")
        (site.images / "apple" / "0-0.png").write_bytes(fruit(0, 77))
        status, done = site.act("correct", **one, class_name="apple")
        assert status == 200 and (site.images / "apple" / "0-0.png").read_bytes() == fruit(0, 77)
        assert (site.images / "apple" / "0-0-2.png").read_bytes() == fruit(0, 0)
        assert site.act("undo", action=done["action"])[0] == 200
        assert (site.images / "leaf" / "0-0.png").read_bytes() == fruit(0, 0)


def test_only_listed_files_that_are_still_the_same_can_be_seen_and_changed(config: DeviceConfig) -> None:
    with desk(config) as site:
        one = which(examined(site), "leaf/0-0.png")
        for name in ("apple/0-1.png", "../pi/settings.json", "leaf/../leaf/0-0.png"):
            assert site.act("correct", name=name, version=one["version"], class_name="apple")[0] == 422
            assert site.request("GET", f"/api/label/preview?name={name}")[0] == 422
        status, answer = site.act("correct", **one, class_name="../pi")
        assert status == 422 and "expected one of apple" in answer["error"]
        path = site.images / "leaf" / "0-0.png"
        path.write_bytes(fruit(4, 50))
        os.utime(path, (1, 1))
        assert site.act("correct", **one, class_name="apple")[0] == 422
        assert site.act("approve", **one)[0] == 422
        assert one["name"] not in names(site.request("GET", "/api/label/view?client=me")[1])


def test_without_labels_or_a_release_the_page_says_so(tmp_path: Path) -> None:
    config = device(tmp_path)
    with desk(config) as site:
        assert examined(site)["words"] == "no labels to examine"
    with desk(DeviceConfig("pi", config.data, folder=str(tmp_path / "other"))) as site:
        assert examined(site)["words"] == "labels are examined once there is a release"


@pytest.fixture
def recordings(tmp_path: Path) -> Iterator[Desk]:
    """A device that labels recordings."""
    config = learner_of(tmp_path, IMU)
    with desk(config) as site:
        yield site


def test_a_recording_is_listed_once_with_its_curves(recordings: Desk) -> None:
    site = recordings
    for number in range(16):
        path = site.images / ("lying" if number == 5 else ["lying", "standing"][number % 2]) / f"{number}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(posture(number % 2, number))
    found = examined(site)
    assert found["labels"][0]["name"] == "lying/5.csv"
    one = which(found, "lying/5.csv")
    status, picture, headers = site.request("GET", f"/api/label/preview?name={one['name']}")
    assert status == 200 and headers["Content-Type"] == "image/svg+xml" and b"<path" in picture
