"""The child that counts the data needs little memory; without enough of it the agent continues and reports that."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from edge_fl.errors import ChildError, DataError, DeadlineError, KilledError
from edge_fl_devices.child import Children, Progress, decode, encode, feature_children, ignore
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import record
from edge_fl_devices.data.location import Snapshot, snapshot
from edge_fl_devices.doctor import status
from edge_fl_devices.features.child_loader import ChildFeatureLoader, FeatureRequest, Inspection
from edge_fl_devices.features.onnx_runtime import Runtime
from edge_fl_devices.runtime.monitor import COUNTING, Board, as_counted_last, inspect_board, measured

PHOTOS, PHOTO_SIZE, MAX_MB = 40, (4000, 3000), 120
PEAK = """
import sys
from edge_fl_devices.features.child_main import answer
print(answer(bytes.fromhex(sys.argv[1])).hex())
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.fixture
def config(tmp_path: Path) -> DeviceConfig:
    return DeviceConfig("pi-1", str(tmp_path / "images"), folder=str(tmp_path), tier="head")


def test_photos_of_a_phone_are_counted_in_little_memory(config: DeviceConfig) -> None:
    kinds = [Path(config.data) / name for name in ("cat", "dog")]
    for folder in kinds:
        folder.mkdir(parents=True)
    for number in range(PHOTOS):
        size = PHOTO_SIZE if number % 4 else PHOTO_SIZE[::-1]
        if number < 4:
            Image.new("RGB", size, (number, 100, 100)).save(kinds[number % 2] / f"{number}.jpg")
        else:
            (kinds[number % 2] / f"{number}.jpg").write_bytes(
                (kinds[number % 2] / f"{number % 4}.jpg").read_bytes()
            )
    request = encode(FeatureRequest(config)).hex()
    command = [sys.executable, "-c", PEAK, request]
    answer, peak_kb = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[
        :2
    ]
    report = decode(bytes.fromhex(answer), Inspection).report
    assert report and report.samples_per_class == (PHOTOS // 2, PHOTOS // 2)
    sys.stdout.write(f"peak of the whole child: {int(peak_kb) // 1024} MB\n")
    assert int(peak_kb) < MAX_MB * 1024


class LimitedChildren(Children):
    """Runs out of memory whenever the data is counted."""

    def request(self, payload: bytes, deadline_s: float, progress: Progress = ignore) -> bytes:
        request = decode(payload, FeatureRequest)
        if request.count:
            raise MemoryError("data: out of memory, the system killed the child")
        return super().request(payload, deadline_s, progress)


@pytest.fixture
def limited() -> Iterator[LimitedChildren]:
    with closing(LimitedChildren("edge_fl_devices.features.child_main", "data")) as children:
        yield children


def test_without_memory_for_the_data_the_agent_starts_and_has_the_reason(
    config: DeviceConfig, limited: LimitedChildren
) -> None:
    loader = ChildFeatureLoader(config, limited)
    board, problem = inspect_board(config, loader)
    capability = measured(config, board)
    assert (capability.tier, capability.samples, problem) == ("head", 0, "") and capability.onnxruntime
    with pytest.raises(MemoryError, match="out of memory"):
        loader.inspect(Snapshot(frozenset()))
    assert record.read(Path(config.folder)).why == "out_of_memory"


class FailingChildren(Children):
    """Fails at every request."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def request(self, payload: bytes, deadline_s: float, progress: Progress = ignore) -> bytes:
        raise self.error


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (KilledError("data: the child was ended by SIGSEGV", "SIGSEGV"), "killed"),
        (ChildError("data: the child exited with code 1"), "error"),
        (DeadlineError("data: no result after 120 s"), "deadline"),
        (MemoryError("data: out of memory"), "out_of_memory"),
        (DataError("data: expected a folder"), "error"),
    ],
)
@pytest.mark.parametrize("tier", ["auto", "head", "full"])
def test_a_board_that_cannot_be_measured_starts_head_only_with_the_reason(
    config: DeviceConfig, tier: str, error: Exception, why: str
) -> None:
    config = msgspec.structs.replace(config, tier=tier)
    board, problem = inspect_board(config, ChildFeatureLoader(config, FailingChildren(error)))
    assert board is None and problem == why == record.read(Path(config.folder)).why
    capability = measured(config, board)
    assert capability.tier == "head" and "not measured yet" in capability.notes[0]
    assert any(str(error) in str(row["value"]) for row in status.read(Path(config.folder)))


def test_a_board_is_measured_once_its_child_no_longer_fails(config: DeviceConfig) -> None:
    for name in ("cat", "dog"):
        (Path(config.data) / name).mkdir(parents=True)
        Image.new("L", (8, 8), 100).save(Path(config.data) / name / "0.png")
    unmeasured = as_counted_last(config, measured(config, None))
    lines: list[str] = []
    tiers: list[str] = []
    with closing(feature_children()) as children:
        board = Board(config, None, ChildFeatureLoader(config, children), tiers.append, lines.append)
        found = board.inspect(unmeasured, snapshot(config.data))
    assert tiers == ["head", "head"] and board.runtime().max_opset == found.max_opset
    assert unmeasured.max_opset == 0 and unmeasured.notes[-1] == COUNTING
    assert found.max_opset >= 17 and found.onnxruntime and found.samples_per_class == [1, 1]
    assert found.notes[0] == "head: limited by its owner" and found.notes[1].startswith("measured: ")
    assert COUNTING not in found.notes and lines == ["pi-1: 2 samples to train on"]


LIMITED = """
import resource, sys
from contextlib import closing
from edge_fl_devices.child import feature_children
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data.location import snapshot
from edge_fl_devices.features.child_loader import ChildFeatureLoader
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
with closing(feature_children()) as children:
    config = DeviceConfig("pi-1", sys.argv[1], folder=sys.argv[2], tier="head")
    try:
        ChildFeatureLoader(config, children).inspect(snapshot(config.data))
    except MemoryError:
        sys.exit(0)
sys.exit(1)
"""


def test_an_archive_too_large_for_memory_is_out_of_memory_and_not_missing_data(tmp_path: Path) -> None:
    file, count = tmp_path / "large.npz", 1025
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("x.npy", "w", force_zip64=True) as x,
    ):
        header = {"descr": "|u1", "fortran_order": False, "shape": (count, 1024, 1024)}
        np.lib.format.write_array_header_1_0(x, header)
        for _ in range(count):
            x.write(bytes(2**20))
    command = [sys.executable, "-c", LIMITED, str(file), str(tmp_path)]
    subprocess.run(command, check=True, timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1"})
    (row,) = (row for row in status.read(tmp_path) if row["what"] == "out_of_memory")
    assert "large.npz: Unable to allocate 1.00 GiB" in str(row["value"])


def test_an_inspection_without_the_data_does_not_read_them(config: DeviceConfig) -> None:
    with closing(feature_children()) as children:
        inspection = decode(children.request(encode(FeatureRequest(config, count=False)), 60), Inspection)
    assert inspection.report is None and not inspection.trouble and isinstance(inspection.runtime, Runtime)
