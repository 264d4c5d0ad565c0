"""A device trains on its data as they are now: new pictures take part in the next round, deleted ones in none."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_fl.blob import describe, digest
from edge_fl.config import MethodConfig, MethodSpec, ModelConfig, OptimiserConfig
from edge_fl.data.samples import ClientData
from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.wire.messages import Assignment
from edge_fl.wire.tensors import pack
from edge_fl_devices.agent.effects import Train
from edge_fl_devices.agent.events import Finished
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import load
from edge_fl_devices.data.current import CurrentData
from edge_fl_devices.data.spec import UNKNOWN
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.full import FullWorker
from edge_fl_devices.workers.worker import attempt

CLASSES, INPUT = ("a", "b"), InputSpec((1, 8, 8))
SPEC = MethodSpec(
    ModelConfig("cnn-tiny", {"feature_dim": 4, "width": 2}),
    INPUT,
    [*CLASSES],
    MethodConfig("fedavg", 1, 4, OptimiserConfig(lr=0.1)),
    seed=3,
)


def picture(folder: Path, number: int) -> Path:
    """Write picture `number`, whose first pixel tells which it is."""
    path = folder / CLASSES[number % 2] / f"{number}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8)
    pixels[0, 0] = number
    Image.fromarray(pixels).save(path)
    return path


def numbers(data: ClientData) -> list[int]:
    """The pictures in a device's data."""
    return sorted(np.concatenate([part.x[:, 0, 0, 0] for part in (data.train, data.validation, data.test)]))


@pytest.fixture
def config(tmp_path: Path) -> DeviceConfig:
    return DeviceConfig("pi-1", str(tmp_path / "images"), folder=str(tmp_path / "pi"))


def trained(worker: FullWorker, round: int) -> Finished:
    method = build_method(SPEC)
    down = pack(tree.to_arrays(steps.broadcast(method, method.init_shared(), "pi-1")))
    assignment = Assignment(
        round, "train", run_id="run", round=round, id=f"r{round}", down=describe(down), deadline_s=60
    )
    done = attempt(lambda: worker.perform(Train(assignment, SPEC, "boot", 5), {digest(down): down}))
    assert isinstance(done, Finished), done
    return done


@pytest.mark.parametrize("monitored", [True, False])
def test_the_next_round_trains_on_new_pictures_and_on_no_deleted_one(
    config: DeviceConfig, monitored: bool
) -> None:
    images = Path(config.data)
    paths = [picture(images, number) for number in range(28)]
    current = CurrentData(config)
    worker = FullWorker("pi-1", Store(Path(config.folder)), current)
    if monitored:
        current.accept(current.look())
    first = trained(worker, 1)
    assert numbers(current(CLASSES, INPUT)) == [*range(28)]
    for number in range(28, 138):
        picture(images, number)
    for path in paths[:10]:
        path.unlink()
    if monitored:
        assert numbers(current(CLASSES, INPUT)) == [*range(10, 28)]  # at once; the new ones when accepted
        current.accept(current.look())
    second = trained(worker, 2)
    assert numbers(current(CLASSES, INPUT)) == [*range(10, 138)]
    assert second.report.samples > 3 * first.report.samples
    assert second.report.blob != first.report.blob


def test_a_picture_that_is_still_being_written_is_not_read(config: DeviceConfig) -> None:
    images = Path(config.data)
    for number in range(4):
        picture(images, number)
    reports = []
    current = CurrentData(config, reports.append)
    current.accept(current.look())
    half = picture(images, 4).read_bytes()[:40]
    (images / "a" / "4.png").write_bytes(half)
    assert numbers(current(CLASSES, INPUT)) == [0, 1, 2, 3]
    assert not reports[0].skipped


def test_unchanged_data_are_read_once(config: DeviceConfig) -> None:
    for number in range(4):
        picture(Path(config.data), number)
    reports = []
    current = CurrentData(config, reports.append)
    first = current(CLASSES, INPUT)
    assert current(CLASSES, INPUT) is first and len(reports) == 1
    assert current(CLASSES, InputSpec((1, 4, 4))).train.shape == (1, 4, 4)
    assert current(CLASSES, INPUT) is not first


def test_an_archive_is_read_again_when_it_changed_and_its_last_content_counts_meanwhile(
    tmp_path: Path,
) -> None:
    config = DeviceConfig("pi-1", str(tmp_path / "x.npz"), folder=str(tmp_path / "pi"))
    x = np.arange(12, dtype=np.uint8)[:, None, None, None] * np.ones((1, 1, 8, 8), np.uint8)
    np.savez(config.data, x=x[:6], y=np.arange(6) % 2)
    current = CurrentData(config)
    current.accept(current.look())
    assert numbers(current(CLASSES, INPUT)) == [*range(6)]
    Path(config.data).write_bytes(b"PK half")
    assert numbers(current(CLASSES, INPUT)) == [*range(6)]
    np.savez(config.data, x=x, y=np.arange(12) % 2)
    current.accept(current.look())
    assert numbers(current(CLASSES, INPUT)) == [*range(12)]


def test_a_function_is_called_for_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "growing_source.py").write_text(
        "import numpy as np\ncalls = []\n"
        "def images():\n"
        "    calls.append(1)\n"
        "    n = 4 + len(calls)\n"
        "    return np.arange(n, dtype=np.uint8)[:, None, None, None].repeat(8, 2).repeat(8, 3), np.arange(n) % 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    current = CurrentData(DeviceConfig("pi-1", "python:growing_source:images", folder=str(tmp_path / "pi")))
    current.accept(current.look())
    assert current.stamp() == ""
    assert [len(numbers(current(CLASSES, INPUT))) for _ in range(2)] == [5, 6]


def test_another_mode_or_an_overwritten_picture_of_the_same_size_and_time_changes_the_stamp(
    config: DeviceConfig,
) -> None:
    path = picture(Path(config.data), 0)
    current, stat = CurrentData(config), path.stat()
    before = current.stamp()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert current.stamp() != before
    before = current.stamp()
    path.chmod(0o600)
    assert current.stamp() != before


def test_counting_makes_no_folder(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("L", (8, 8), 100).save(tmp_path / "images" / name / "0.png")
    config = DeviceConfig("pi-1", str(tmp_path / "images"), folder=str(tmp_path / "home"))
    assert load.count_for(config, UNKNOWN).samples == 2  # as of `device doctor`, which changes nothing
    assert not (tmp_path / "home").exists()
