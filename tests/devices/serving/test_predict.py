"""Prediction, and the whole work of a head-only device, in processes that cannot import torch or scikit-learn."""

import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from edge_fl import heads
from edge_fl.cli import main
from edge_fl.errors import DataError, InputError
from edge_fl.heads.fleet import Fleet
from edge_fl.modalities import scaled
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices import cli
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import load
from edge_fl_devices.data.spec import UNKNOWN, DataSpec
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.storage.store import Answers, Store, StoredHead
from edge_fl_server.release.repository import Repository
from tests.devices import graphs
from tests.devices.images import X, Y
from tests.devices.scripted import TOPICS, ScriptedServer
from tests.devices.serving.refit import calibrated, known_of, refit


def test_the_served_model_predicts_names_and_probabilities(folder: Path) -> None:
    predictor = Predictor(folder)
    found = predictor.predict(X)
    assert [name for name, _ in found] == ["ab"[y] for y in Y] and all(0.5 < share <= 1 for _, share in found)
    assert np.allclose(predictor.probabilities(X).sum(axis=1), 1, atol=1e-5)


def test_a_head_is_not_used_with_another_extractor(folder: Path) -> None:
    (file,) = (folder / "heads").iterdir()
    (stored,) = Store(folder).heads()
    other = heads.from_arrays(stored.head.to_arrays(), {**stored.head.describe(), "extractor": "f" * 64})
    Store(folder).keep_head(StoredHead(other, 1, stored.parcel))
    (folder / "heads" / f"{'f' * 64}.safetensors").rename(file)
    with pytest.raises(InputError, match="no personal model"):
        Predictor(folder)


def test_images_of_another_shape_are_rejected(folder: Path) -> None:
    with pytest.raises(DataError, match=r"\[12, 1, 5, 5\]"):
        Predictor(folder).predict(np.zeros((12, 1, 5, 5), np.uint8))


def pictures(folder: Path) -> Path:
    folder.mkdir()
    for number in range(3):
        Image.fromarray(X[number, 0]).save(folder / f"{number}.png")
    (folder / "notes.txt").write_text("no picture")
    (folder / "broken.png").write_bytes(b"half")
    return folder


def test_a_folder_without_a_readable_picture_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(tmp_path / "cut.jpg")
    whole = (tmp_path / "cut.jpg").read_bytes()
    for name, payload in {
        "cut.jpg": whole[: len(whole) // 2],
        "text.jpg": b"hello",
        "empty.png": b"",
    }.items():
        (tmp_path / "album").mkdir(exist_ok=True)
        (tmp_path / "album" / name).write_bytes(payload)
    assert main(["device", "predict", str(tmp_path / "album"), "--dir", str(folder)]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'album'}: no picture in it can be read (" in line
    for why in ("1 truncated: cut.jpg", "1 content is not a picture: text.jpg", "1 empty file: empty.png"):
        assert why in line


def test_the_command_predicts_a_picture_a_folder_and_an_archive(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "some.npz", x=X)
    album = pictures(tmp_path / "album")
    for source, names, expected in (
        (album / "1.png", [str(album / "1.png")], Y[1:2]),
        (album, [str(album / f"{number}.png") for number in range(3)], Y[:3]),
        (tmp_path / "some.npz", [f"some.npz[{row}]" for row in range(12)], Y),
    ):
        code = main(["device", "predict", str(source), "--dir", str(folder), "--format", "json"])
        output = capsys.readouterr()
        rows = json.loads(output.out)
        assert code == (source == album)
        assert ("1 skipped: " in output.err and "broken.png (content is not a picture)" in output.err) == (
            source == album
        )
        assert [row["name"] for row in rows] == names and [row["label"] for row in rows] == [
            "ab"[y] for y in expected
        ]


def test_the_command_names_ignored_system_folders_and_says_how_far_it_is(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "PROGRESS_S", 0.0)
    album = pictures(tmp_path / "album")
    (album / "broken.png").unlink()
    pictures(album / "@eaDir")
    assert main(["device", "predict", str(album), "--dir", str(folder)]) == 0
    said = capsys.readouterr().err
    assert "1 folders and files of operating systems were ignored: @eaDir" in said
    assert "3 samples predicted so far" in said


def test_a_promise_leaves_samples_unsure_whose_set_has_several_classes(folder: Path) -> None:
    refit(folder, "logistic", calibration=calibrated())
    usual = Predictor(folder).predictions(X)
    assert all(each.status == "answered" and each.promise == 0.9 for each in usual)
    careful = Predictor(folder, promise=0.85).predictions(X)
    assert {len(each.possible) for each in careful} == {1, 2}, [each.top for each in careful]
    for found in careful:
        assert found.possible[0] == found.top[0].label and found.promise == 0.85
        answered = len(found.possible) == 1
        assert (
            (found.status == "answered")
            == (found.label is not None)
            == (found.class_id is not None)
            == answered
        )
    Store(folder).keep_answers(Answers(promise=0.85))
    assert Predictor(folder).predictions(X) == careful
    assert [each.status for each in Predictor(folder, promise=0).predictions(X)] == ["answered"] * len(X)
    assert Predictor(folder).predict(X)[0][0] in "ab"  # without abstention, as before


def test_a_distant_picture_is_unknown(folder: Path) -> None:
    refit(folder, "logistic", calibration=calibrated(furthest=1e-6))
    found = Predictor(folder).predictions(X)
    unknown = [each for each in found if each.status == "unknown"]
    assert len(unknown) > 6 and all(each.label is None and each.distance > 0.95 for each in unknown)
    assert all(each.status == "answered" for each in Predictor(folder, false_alarm=0).predictions(X))


@pytest.mark.parametrize("present", [[0, 1], [0]])
def test_classes_that_only_the_fleets_head_knows_are_answered(folder: Path, present: list[int]) -> None:
    (stored,) = Store(folder).heads()
    z, rows = scaled(X).reshape(12, -1) @ graphs.WEIGHTS, np.array(present)
    weights = known_of(z, Y).means[rows]
    head = Fleet(2, stored.head.extractor, weights, np.zeros(len(rows), np.float32), rows)
    labelled = replace(
        calibrated(furthest=1e-6), known=known_of(z[Y == 0], Y[Y == 0]), fleet=np.ones(40, np.bool_)
    )
    Store(folder).keep_head(StoredHead(head, 1, stored.parcel, calibration=labelled))
    found = Predictor(folder).predictions(X)
    unknown = [each for each in found if each.status == "unknown"]
    assert unknown and all(each.top[0].class_id == 0 for each in unknown)
    assert all(each.label == "b" and each.distance == 0 for each in found if each.top[0].class_id == 1)
    assert any(each.top[0].class_id for each in found) == (1 in present)


def test_every_format_has_the_same_fields(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    refit(folder, "logistic", calibration=calibrated())
    album = pictures(tmp_path / "album")
    (album / "broken.png").unlink()
    command = ["device", "predict", str(album), "--dir", str(folder), "--top", "2", "--promise", "0.9"]
    assert main([*command, "--format", "json"]) == 0
    output = capsys.readouterr()
    assert "promise 0.9: the set has the right class" in output.err and "; answered 1 of 3" in output.err
    rows = json.loads(output.out)
    assert list(rows[0]) == [
        "name",
        "class_id",
        "label",
        "probability",
        "status",
        "distance",
        "top",
        "possible",
        "promise",
    ]
    assert [list(each) for each in rows[0]["top"]] == [["class_id", "label", "probability"]] * 2
    assert main([*command, "--format", "csv"]) == 0
    lines = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    for row, line in zip(rows, lines, strict=True):
        assert line["possible"].split("|") == row["possible"] and row["promise"] == 0.9
        assert line["status"] == row["status"] and line["label"] == (row["label"] or "")
        assert (
            line["label_2"] == row["top"][1]["label"]
            and float(line["probability_2"]) == row["top"][1]["probability"]
        )
    assert main([*command, "--promise", "0.999"]) == 0
    output = capsys.readouterr()
    assert "; answered 0 of 3" in output.err and output.out.count("unsure") == 3
    assert main([*command, "--top", "0"]) == 4


def test_fifos_sockets_and_devices_are_not_opened(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    album = pictures(tmp_path / "album")
    (album / "broken.png").unlink()
    for name in ("pipe.png", "pipe.npz"):
        os.mkfifo(album / name)
    (album / "zero.png").symlink_to("/dev/zero")
    command = ["device", "predict", "--dir", str(folder), "--format", "json"]
    assert main([*command, str(album)]) == 1
    output = capsys.readouterr()
    assert len(json.loads(output.out)) == 3
    assert "3 skipped: " in output.err and "pipe.png (not a regular file)" in output.err
    for name in ("pipe.png", "pipe.npz", "zero.png"):
        assert main([*command, str(album / name)]) == 4
        assert "not a regular file" in capsys.readouterr().err


def test_the_command_shows_how_the_device_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device", "status", "--dir", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "release 1" in shown and "logistic" in shown and "100.0 %" in shown


def test_the_status_explains_missing_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "images" / "cat").mkdir(parents=True)
    config = DeviceConfig("pi-1", str(folder / "images"), folder=str(folder))
    with pytest.raises(DataError):
        load.count_for(config, UNKNOWN)
    assert main(["device", "status", "--dir", str(folder), "--format", "json"]) == 0
    rows = {row["what"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert (
        "no usable file (no files)" in rows["no_data"] and "fewer than two usable samples" in rows["no_data"]
    )
    pictures(folder / "images" / "dog")
    load.count_for(config, UNKNOWN)
    assert main(["device", "status", "--dir", str(folder), "--format", "json"]) == 0
    rows = {row["what"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert rows["pictures"] == "3: cat 0, dog 3" and "no_data" not in rows
    assert rows["skipped files"] == "1 content is not a picture: dog/broken.png; 1 not a picture file"


def test_before_the_first_labels_the_status_says_why_nothing_is_served(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def status() -> dict[str, str]:
        with pytest.raises(DataError):
            load.count_for(config, UNKNOWN)
        assert main(["device", "status", "--dir", str(folder), "--format", "json"]) == 0
        return {row["what"]: row["value"] for row in json.loads(capsys.readouterr().out)}

    (folder / "images" / "cat").mkdir(parents=True)
    config = DeviceConfig("pi-1", str(folder / "images"), folder=str(folder))
    Store(folder).revoke()
    rows = status()
    assert not {"no_data", "no_labels"} & rows.keys()
    assert (
        rows["serves"]
        == "nothing: no labelled pictures yet, or only one, and the release has no fleet's head"
    )
    assert rows["pictures"].startswith("no labelled pictures yet, or only one (")
    (folder / "images" / "cat" / "broken.png").write_bytes(b"nothing")
    rows = status()
    assert (rows["serves"], rows["head"]) == ("nothing", "nothing fitted yet")
    assert "no usable picture" in rows["no_data"]


def test_without_labels_the_status_of_the_fleets_head_names_no_failure(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "images" / "cat").mkdir(parents=True)
    config = DeviceConfig("pi-1", str(folder / "images"), folder=str(folder))
    with pytest.raises(DataError):
        load.count_for(config, UNKNOWN)
    (stored,) = Store(folder).heads()
    report = msgspec.structs.replace(stored.parcel.report, samples=0)
    Store(folder).keep_head(replace(stored, parcel=msgspec.structs.replace(stored.parcel, report=report)))
    assert main(["device", "status", "--dir", str(folder), "--format", "json"]) == 0
    rows = {row["what"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert "no_data" not in rows
    assert rows["pictures"].startswith("no label yet, the fleet's head serves without")


def test_the_status_names_misspelt_folders_and_classes_that_lost_their_images(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, config = folder / "images", DeviceConfig("pi-1", str(folder / "images"), folder=str(folder))
    images.mkdir()
    pictures(images / "cat")
    pictures(images / "dog")
    load.count_for(config, DataSpec(("cat", "dog")))
    (images / "dog").rename(images / "Dogs")
    load.count_for(config, DataSpec(("cat", "dog")))
    assert main(["device", "status", "--dir", str(folder), "--format", "json"]) == 0
    rows = {row["what"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert rows["classes that lost their pictures"] == "dog"
    assert rows["folders"] == "folder 'Dogs' is not a class: did you mean 'dog'?"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict", "missing.png", "--dir", "HERE"], "no such file"),
        (["predict", "missing.png", "--dir", "nowhere"], "no personal model"),
        (["predict", "HERE", "--dir", "HERE"], "no picture"),
        (["predict", "--dir", "HERE"], "Missing argument 'FILES'"),
        (["status", "--dir", "nowhere"], "no such folder"),
        (["run"], "id"),
        (["run", "--id", "Pi 1", "--data", "x"], "id = 'Pi 1': expected 1 to 32"),
        (["run", "--id", "pi-1", "--data", "HERE", "--head", "logistics"], "did you mean 'logistic'"),
        (["run", "--config", "nowhere.toml"], "cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_4(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["device", *(str(folder) if word == "HERE" else word for word in arguments)]) == 4
    output = capsys.readouterr()
    assert words in output.err and output.err.count("\n") == 1 and not output.out


def test_an_unknown_setting_names_the_nearest_known_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "device.toml").write_text('id = "pi-1"\ndata = "x"\nheads = "svm"\n')
    assert main(["device", "run", "--config", str(tmp_path / "device.toml")]) == 4
    assert "unknown key 'heads' (did you mean 'head'?)" in capsys.readouterr().err


BANNED = """
import sys
class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "torchvision", "onnx", "sklearn", "scipy"}:
            raise ModuleNotFoundError(f"{name} is banned here", name=name)
sys.meta_path.insert(0, Ban())
from edge_fl.cli import main
code = main(sys.argv[1:])
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
heavy = [name for name in ("torch", "sklearn", "scipy", "onnx") if name in sys.modules]
print(*(status[name].strip() for name in ("VmRSS", "VmHWM")), heavy)
sys.exit(code)
"""


@pytest.mark.broker
def test_the_whole_head_path_runs_where_torch_and_scikit_learn_cannot_be_imported(
    server: ScriptedServer, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    np.savez(tmp_path / "images.npz", x=np.repeat(X, 4, axis=0), y=np.repeat(Y, 4))
    payload = graphs.graph()
    manifest = graphs.manifest_for(payload)
    server.release(Repository(tmp_path / "server"), manifest, payload)
    where = [
        "--host",
        mosquitto.endpoint.host,
        "--port",
        str(mosquitto.endpoint.port),
        "--fleet",
        TOPICS.fleet,
    ]
    what = [
        "--id",
        "pi-09",
        "--data",
        str(tmp_path / "images.npz"),
        "--dir",
        str(tmp_path / "pi"),
        "--head",
        "svm",
    ]
    command = [sys.executable, "-c", BANNED, "device", "run", *what, *where]
    started_s = time.monotonic()
    device = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        born = server.wait_for("pi-09", "meta", lambda meta: meta.samples)  # counted after the first birth
        assert born.tier == "head" and sum(born.samples_per_class) == 48 and born.max_opset >= 17
        server.assignment("pi-09", "serve", run_id="toy", round=1, id="rel-1", release=1)
        report = server.wait_for("pi-09", "rpt")
        took_s = time.monotonic() - started_s
        assert not report.error, report
        assert report.head == "svm" and report.metrics["personal.test_acc.after"] > 0.9
        server.ack("pi-09", "rel-1")
        server.wait_for("pi-09", "state", lambda s: s.activity == "idle" and s.release == 1)
    finally:
        device.terminate()
        output, complained = device.communicate(timeout=60)
    assert device.returncode == 0 and output.rstrip().endswith("[]"), complained
    assert server.messages("pi-09", "state")[-1].status == "disconnected"
    sys.stdout.write(f"start to report {took_s:.2f} s; agent at its end and at its peak {output.strip()}\n")
    predict = [
        sys.executable,
        "-c",
        BANNED,
        "device",
        "predict",
        str(tmp_path / "images.npz"),
        "--dir",
        str(tmp_path / "pi"),
    ]
    found = subprocess.run(predict, capture_output=True, text=True, check=True)
    assert "images.npz[47]" in found.stdout and found.stdout.rstrip().endswith("[]")
