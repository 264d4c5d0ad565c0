"""The label page of devices that learn from recordings: previews, suggestions, sound, and what is said of unusable files."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

import numpy as np
import pytest

from edge_fl.inputs import InputSpec
from edge_fl.modalities import audio
from edge_fl_devices.config import CaptureConfig, DeviceConfig
from edge_fl_devices.serving.predict import Predictor
from tests.maker.labelling.fruit import Desk, desk, device, manifest

SVG = "{http://www.w3.org/2000/svg}"
IMU = InputSpec(
    (2, 50), axes="CT", dtype="float32", rate=50.0, hop=25, names=("ax", "<b>&"), units=("g", "g")
)
SOUND = InputSpec((4000,), axes="T", dtype="float32", rate=8000.0, hop=2000)
CLASSES = ["lying", "standing"]


def posture(label: int, seed: int, seconds: float = 3.0) -> bytes:
    """A CSV of an accelerometer whose axis `label` points down."""
    rng, count = np.random.default_rng([label, seed]), round(50 * seconds)
    values = rng.normal(0, 0.1, (count, 2))
    values[:, label] += 1
    rows = [f"{row / 50:.2f},{a:.4f},{b:.4f}" for row, (a, b) in enumerate(values)]
    return "\n".join(["time,ax,<b>&", *rows]).encode()


def tone(label: int, seed: int, seconds: float = 1.5) -> bytes:
    """A WAV of a low or a high tone on a level, as random features see no phase."""
    rng, seconds_ = np.random.default_rng([label, seed]), np.arange(round(8000 * seconds)) / 8000
    sound = 0.3 * np.sin(2 * np.pi * (200, 2000)[label] * seconds_) + rng.normal(0, 0.01, len(seconds_))
    return audio.wav((sound + (0.3, -0.3)[label]).astype(np.float32), 8000.0)


def learner_of(folder: Path, input: InputSpec) -> DeviceConfig:
    return device(folder, manifest(CLASSES, input), capture=CaptureConfig(every_s=0.1))


def filled(site: Desk, file_of: Callable[[int, int], bytes], per_class: int) -> dict[str, str]:
    """Post recordings to the pool -> their classes by name."""
    truth = {}
    for label, seed in np.ndindex(2, per_class):
        status, added, _ = site.request("POST", f"/frame?source={label}-{seed}", file_of(label, seed))
        assert status == 201, added
        truth[added["name"]] = CLASSES[label]
    return truth


def preview(site: Desk, item: dict[str, str], what: str = "preview") -> tuple[int, bytes, dict[str, str]]:
    path = f"/api/label/{what}?name={quote(item['name'])}&version={item['version']}"
    return site.request("GET", path)


@pytest.mark.parametrize(("input", "file_of"), [(IMU, posture), (SOUND, tone)])
def test_labels_of_recordings_lead_to_suggestions_for_whole_files(
    tmp_path: Path, input: InputSpec, file_of: Callable[[int, int], bytes]
) -> None:
    with desk(learner_of(tmp_path, input)) as site:
        assert site.request("POST", "/frame", b"a,b\nno,numbers\n")[0] == 422
        truth = filled(site, file_of, 6)
        for _ in range(6):
            view = site.request("GET", "/api/label/view?client=me")[1]
            item = view["item"]
            body = {"name": item["name"], "version": item["version"], "class_name": truth[item["name"]]}
            assert site.act("label", **body)[0] == 200
        view = site.learned()
        assert (view.word, view.unlabelled, view.fits > 0, view.problem) == ("recording", 6, True, "")
        assert sum(each.count for each in view.classes) == 6
        rows = site.session.learner._release
        assert rows
        for name in site.session.pool.names():
            key = bytes.fromhex(site.session._version(name))
            z = rows.rows.find(key)
            found = site.session.learner.prediction(name, key)
            assert z is not None and len(z) == 5 and found and found.top[0].label == truth[name]
            each = Predictor(Path(site.config.folder)).from_features(z, [name] * 5, 2)
            mean = np.mean([{one.label: one.probability for one in row.top}[truth[name]] for row in each])
            assert found.top[0].probability == pytest.approx(mean)
        status, error = site.act("skip", **dict.fromkeys(("name", "version"), "x"))
        assert status == 422 and "x: not among the files without labels" in error["error"]


def test_a_series_is_shown_as_curves_and_its_names_are_no_markup(tmp_path: Path) -> None:
    with desk(learner_of(tmp_path, IMU)) as site:
        filled(site, posture, 1)
        view = site.request("GET", "/api/label/view?client=me")[1]
        item = view["item"]
        assert (view["kind"], item["about"], item["remarks"]) == ("series", "2 channels, 3.0 s", [])
        status, content, headers = preview(site, item)
        assert status == 200 and headers["Content-Type"] == "image/svg+xml"
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "sandbox" in policy
        svg = ElementTree.fromstring(content)
        words = ["".join(each.itertext()) for each in svg.iter(f"{SVG}text")]
        assert "● ax ● <b>& (g)" in words and {"0 s", "1"} <= {*words}
        assert len([each for each in svg.iter(f"{SVG}path") if each.get("stroke")]) == 2
        assert preview(site, item, "sound")[0] == 422


def test_a_sound_is_shown_as_a_spectrogram_and_played(tmp_path: Path) -> None:
    with desk(learner_of(tmp_path, SOUND)) as site:
        filled(site, tone, 1)
        item = site.request("GET", "/api/label/view?client=me")[1]["item"]
        assert item["about"] == "1.5 s of sound"
        status, content, _ = preview(site, item)
        image = ElementTree.fromstring(content).find(f".//{SVG}image")
        assert status == 200 and image is not None and "data:image/png;base64," in image.get("href", "")
        status, content, headers = preview(site, item, "sound")
        assert (status, headers["Content-Type"]) == (200, "audio/wav")
        (tmp_path / "sound.wav").write_bytes(content)
        assert len(audio.recording(tmp_path / "sound.wav", 8000.0)[0]) == 12000
        assert "media-src blob:" in site.request("GET", "/label")[2]["Content-Security-Policy"]


def test_remarks_and_the_reason_of_an_unusable_recording_are_shown(tmp_path: Path) -> None:
    config = learner_of(tmp_path, IMU)
    pool = Path(config.folder) / "unlabelled"
    pool.mkdir()
    still = b"\n".join([b"time,ax,<b>&", *(b"%.2f,0,%d" % (row / 50, row % 7) for row in range(100))])
    (pool / '<img src=x onerror="a">.csv').write_bytes(still)
    (pool / "short.csv").write_bytes(posture(0, 0, 0.5))
    with desk(config) as site:
        remarks = {}
        for client in ("me", "you"):
            item = site.request("GET", f"/api/label/view?client={client}")[1]["item"]
            remarks[item["name"]] = (item["remarks"], preview(site, item)[0])
        (found, status), (reason, failed) = remarks['<img src=x onerror="a">.csv'], remarks["short.csv"]
        assert found == ["channel ax is constant"] and status == 200
        assert "shorter than a window" in reason[0] and failed == 422


def test_rows_of_a_table_are_not_labelled_here(tmp_path: Path) -> None:
    config = learner_of(tmp_path, InputSpec((2,), axes="F", dtype="float32"))
    (Path(config.folder) / "unlabelled").mkdir()
    (Path(config.folder) / "unlabelled" / "a.csv").write_bytes(b"a,b\n1,2\n")
    with desk(config) as site:
        view = site.request("GET", "/api/label/view?client=me")[1]
        assert (view["kind"], view["item"], view["unlabelled"]) == ("table", None, 0)


def test_the_service_loads_neither_pillow_nor_mqtt_before_it_needs_them() -> None:
    code = "import sys, edge_fl_maker.labelling.serve; sys.stdout.write(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    unwanted = {"PIL", "paho", "edge_fl.modalities.audio", "edge_fl.modalities.series"}
    assert not unwanted.intersection(loaded.split())
