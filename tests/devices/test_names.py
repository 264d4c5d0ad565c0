"""Files and folders with names of any bytes and any Unicode form: a device reads, counts, watches, predicts and reports them."""

import csv
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from edge_fl.data.class_names import UNUSABLE
from edge_fl.errors import DataError
from edge_fl.inputs import InputSpec
from edge_fl.modalities import pictures
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices import config as configuration
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import load, location, record
from edge_fl_devices.data.record import DataReport
from edge_fl_devices.data.sources import select_files
from edge_fl_devices.data.spec import DataSpec
from edge_fl_server.release.repository import Repository
from tests.devices import graphs
from tests.devices.images import X, Y
from tests.devices.loading import loaded
from tests.devices.scripted import TOPICS, ScriptedServer

GREY = InputSpec((1, 4, 4))
LATIN1 = b"caf\xe9.png"
NAMES = (LATIN1, b"a\nb\x1b[31m.png", "müll 👩\u200d🚀.png".encode(), b"x" * 251 + b".png")
APART = unicodedata.normalize("NFD", "müll")


def store(folder: Path, name: bytes | str, row: int = 0) -> Path:
    """Stores one of the pictures X under a name of any bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / os.fsdecode(name)
    with path.open("wb") as file:
        Image.fromarray(X[row, 0]).save(file, "PNG")
    return path


def labelled(root: Path) -> Path:
    """All pictures X in the folders a and b, one of each class with each of the NAMES."""
    for row, label in enumerate(Y):
        number = row // 2
        store(root / "ab"[label], NAMES[number] if number < len(NAMES) else f"{row}.png", row)
    return root


def config(root: Path, **settings: object) -> DeviceConfig:
    (root.parent / "pi").mkdir(exist_ok=True)
    return DeviceConfig("pi-01", str(root), folder=str(root.parent / "pi"), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [DataSpec(("a", "b"), GREY), DataSpec()])
def test_pictures_count_whatever_their_names(tmp_path: Path, spec: DataSpec) -> None:
    report = load.count_for(config(labelled(tmp_path / "data")), spec)
    assert report.samples_per_class == (6, 6) and not report.skipped and not report.local_notes


@pytest.mark.parametrize("policy", ["newest", "reservoir"])
def test_a_selection_takes_pictures_whatever_their_names(tmp_path: Path, policy: str) -> None:
    files = sorted((labelled(tmp_path / "data") / "a").iterdir())
    chosen = select_files(files, DataSpec(keep=4, policy=policy))  # type: ignore[arg-type]
    assert len(chosen) == 4 and {*chosen} < {*files}


def test_a_changed_picture_is_noticed_whatever_its_name(tmp_path: Path) -> None:
    root = labelled(tmp_path / "data")
    stamps = [location.snapshot(str(root)).stamp]
    for name in NAMES:
        store(root / "a", name, row=3)
        os.utime(root / "a" / os.fsdecode(name), ns=(1, 1))
        stamps.append(location.snapshot(str(root)).stamp)
    assert len(set(stamps)) == len(stamps)


def test_a_damaged_picture_of_any_name_is_skipped(tmp_path: Path) -> None:
    root = labelled(tmp_path / "data")
    (root / "a" / os.fsdecode(b"half\xe9.png")).write_bytes(b"half")
    with pytest.raises(DataError, match=r"half\\xe9\.png"):
        pictures.decode(root / "a" / os.fsdecode(b"half\xe9.png"), GREY)
    report = load.count_for(config(root), DataSpec(("a", "b"), GREY))
    assert report.skipped == {"content is not a picture": 1} and report.samples == 12


def test_a_folder_whose_name_is_not_utf8_is_a_remark_and_no_class(tmp_path: Path) -> None:
    root = labelled(tmp_path / "data")
    store(root / os.fsdecode(b"caf\xe9"), "1.png")
    for spec in (DataSpec(("a", "b"), GREY), DataSpec()):
        report = load.count_for(config(root), spec)
        assert report.classes == ("a", "b") and report.skipped == {UNUSABLE: 1}
        assert report.local_notes == [
            "folder 'caf\\xe9': its name is not UTF-8, so it is no class; rename it"
        ]
    assert record.read(tmp_path / "pi").report.hints == tuple(report.local_notes)  # it was stored


def test_a_folder_in_either_unicode_form_is_the_class(tmp_path: Path) -> None:
    root, n = tmp_path / "data", len(X)
    for row in range(n):
        store(root / (APART, "glas")[row % 2], f"{row}.png", row)
    for name in ("müll", APART):
        spec = DataSpec((name, "glas"), GREY, only=("müll",))
        report = loaded(str(root), spec)[1]
        assert report.classes == ("müll", "glas") and report.samples_per_class == (n // 2, 0)
    assert loaded(str(root), DataSpec())[1].classes == ("glas", "müll")
    assert config(root, classes=[APART]).classes == ["müll"]


def test_folders_in_both_unicode_forms_are_one_class(tmp_path: Path) -> None:
    for row in range(4):
        store(tmp_path / ("müll", APART)[row % 2], f"{row}.png", row)
    report = loaded(str(tmp_path), DataSpec())[1]
    assert (report.classes, report.samples_per_class, report.local_notes) == (("müll",), (4,), [])


def test_system_folders_and_similar_classes_are_remarked_here_and_not_sent(tmp_path: Path) -> None:
    root = labelled(tmp_path / "data")
    for name in ("Pear", "pear", "@eaDir", "__MACOSX"):
        store(root / name, "1.png")
        store(root / name / "@eaDir", "1.png")
    report = load.count_for(config(root), DataSpec())
    assert report.classes == ("Pear", "a", "b", "pear") and not report.notes
    assert report.local_notes == [
        "classes 'Pear' and 'pear' are similar; if they are the same, put them in one folder",
        "4 folders and files of operating systems were ignored: @eaDir, __MACOSX",
    ]


def test_pictures_behind_links_to_folders_count_once(tmp_path: Path) -> None:
    labelled(tmp_path / "disk")
    root = tmp_path / "data"
    root.mkdir()
    for link, target in (
        ("a", "../disk/a"),
        ("b", "../disk/b"),
        ("c", "../disk/a"),
        ("d", ".."),
        ("e", "none"),
    ):
        (root / link).symlink_to(target)
    (tmp_path / "link").symlink_to("data")
    for source in (root, tmp_path / "link"):
        report = loaded(str(source), DataSpec(("a", "b"), GREY))[1]
        assert report.samples_per_class == (6, 6)
        assert report.skipped == {
            "a link to a folder that is read already": 1,
            "a link to a folder around this one": 1,
            "a broken link": 1,
        }
        assert report.notes == DataReport((), (), report.skipped).notes


def edge_fl(*arguments: str | bytes, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "edge_fl", *arguments]
    return subprocess.run(command, capture_output=True, env={**os.environ, **environment}, timeout=120)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_predict_prints_every_picture_of_a_folder_with_such_names(
    folder: Path, tmp_path: Path, encoding: str
) -> None:
    album = tmp_path / "album"
    for row, name in enumerate(NAMES):
        store(album, name, row)
    (album / os.fsdecode(b"half\xe9.png")).write_bytes(b"half")
    shown = {"caf\\xe9.png", "a\\nb\\x1b[31m.png", "müll 👩\u200d🚀.png", "x" * 251 + ".png"}
    for format in ("table", "json", "csv"):
        done = edge_fl(
            "device",
            "predict",
            str(album),
            "--dir",
            str(folder),
            "--format",
            format,
            PYTHONIOENCODING=encoding,
        )
        assert done.returncode == 1 and b"half\\xe9.png (content is not a picture)" in done.stderr, (
            done.stderr
        )
        output = done.stdout.decode()
        if encoding == "ascii":
            output = output.replace("\\xfc", "ü").replace("\\U0001f469\\u200d\\U0001f680", "👩\u200d🚀")
        if format == "json":
            names = {Path(row["name"]).name for row in json.loads(output)} if encoding == "utf-8" else shown
        elif format == "csv":
            names = {Path(row["name"]).name for row in csv.DictReader(output.splitlines())}
        else:
            names = {name for name in shown if name in output}
            assert len(output.splitlines()) == 1 + len(NAMES)
        assert names == shown


def test_predict_of_one_picture_in_a_folder_of_such_a_name(folder: Path, tmp_path: Path) -> None:
    picture = store(tmp_path / os.fsdecode(b"caf\xe9"), LATIN1)
    moved = tmp_path / os.fsdecode(b"pi\xe9")
    folder.rename(moved)
    done = edge_fl("device", "predict", os.fsencode(picture), "--dir", os.fsencode(moved))
    assert done.returncode == 0 and b"caf\\xe9/caf\\xe9.png" in done.stdout, done.stderr
    done = edge_fl("device", "predict", os.fsencode(picture) + b"x", "--dir", os.fsencode(moved))
    assert done.returncode == 4 and b"caf\\xe9/caf\\xe9.pngx: no such file" in done.stderr


@pytest.mark.parametrize("option", ["--data", "--dir"])
def test_settings_with_such_a_path_say_what_to_do_and_a_link_to_it_works(tmp_path: Path, option: str) -> None:
    given = labelled(tmp_path / os.fsdecode(b"caf\xe9"))
    options = {"--id": "pi-01", "--data": "python:nothing:here", "--dir": str(tmp_path / "pi"), option: given}
    done = edge_fl("device", "run", *(os.fsencode(word) for pair in options.items() for word in pair))
    key = {"--dir": "folder"}.get(option, option[2:])
    assert done.returncode == 4 and done.stderr.count(b"\n") == 1
    assert f"{key} = '{tmp_path}/caf\\xe9'".encode() in done.stderr and b"ln -s" in done.stderr
    (tmp_path / "link").symlink_to(given)
    found = configuration.convert(
        {"id": "pi-01", "data": str(tmp_path / "link"), "folder": str(tmp_path)}, ""
    )
    configuration.remember(found)
    assert configuration.remembered(tmp_path) == replace(found, data=f"folder:{tmp_path}/link")


@pytest.mark.broker
def test_an_agent_lives_with_such_names_from_its_start_and_while_it_runs(
    server: ScriptedServer, mosquitto: Mosquitto, tmp_path: Path
) -> None:
    root, payload = labelled(tmp_path / "data"), graphs.graph()
    manifest = graphs.manifest_for(payload)
    server.release(Repository(tmp_path / "server"), manifest, payload)
    (tmp_path / "pi.toml").write_text(
        f'id = "pi-01"\ndata = "{root}"\nfolder = "{tmp_path}/pi"\ntier = "head"\nwatch_s = 0.2\nrefit_every_s = 0.2\n'
        f'[broker]\nhost = "{mosquitto.endpoint.host}"\nport = {mosquitto.endpoint.port}\nfleet = "{TOPICS.fleet}"\n'
    )
    command = [sys.executable, "-m", "edge_fl", "device", "run", "--config", str(tmp_path / "pi.toml")]
    agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        server.wait_for("pi-01", "meta", lambda born: sum(born.samples_per_class) == 12)
        server.assignment("pi-01", "serve", run_id="toy", round=1, id="rel-1", release=1)
        assert not server.wait_for("pi-01", "rpt").error
        rows = iter(np.arange(len(Y)))
        for count, name in enumerate((b"new\xe9.png", b"new\n.png"), 13):
            store(root / "a", name, int(next(rows)))
            server.wait_for("pi-01", "meta", lambda meta, count=count: sum(meta.samples_per_class) == count)
        (root / "a" / os.fsdecode(b"half\xe9.png")).write_bytes(b"half")
        store(root / os.fsdecode(b"caf\xe9"), LATIN1)
        found = f"1 file skipped: {UNUSABLE}"
        server.wait_for(
            "pi-01",
            "meta",
            lambda meta: {found, "1 file skipped: content is not a picture"} <= {*meta.notes},
        )
        assert agent.poll() is None
    finally:
        agent.terminate()
        _, complained = agent.communicate(timeout=60)
    assert agent.returncode == 0, complained.decode(errors="replace")
    assert "Traceback" not in complained.decode(errors="replace")
    status = edge_fl("device", "status", "--dir", str(tmp_path / "pi"))
    assert b"folder 'caf\\xe9': its name is not UTF-8" in status.stdout
