"""A small wheel that unpacks to a large one is refused: when it is signed, before it is unpacked, and while."""

import io
import struct
import zipfile
from pathlib import Path

import pytest

from edge_fl.errors import ArtefactError, InputError
from edge_fl.release import device_wheel
from edge_fl.release.agent import MAX_FILES, MAX_UNPACKED_BYTES, unpacked_bytes
from edge_fl_devices.agent_update import environment
from edge_fl_server.release import agent_releases
from edge_fl_server.release.repository import Repository

NAME = "edge_fl-9.0-py3-none-any.whl"
MB = 1 << 20


def built(content: bytes) -> bytes:
    """A wheel of edge-fl with one module, compressed."""
    metadata = b"Metadata-Version: 2.1\nName: edge-fl\nVersion: 9.0\n"
    payload = device_wheel._zip(
        {"edge_fl_big.py": content, "edge_fl-9.0.dist-info/METADATA": metadata}, "edge_fl-9.0.dist-info"
    )
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(payload)) as stored,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in stored.namelist():
            archive.writestr(name, stored.read(name))
    return packed.getvalue()


def lying(payload: bytes, real: int, stated: int) -> bytes:
    """The wheel with another unpacked size of its module in both headers."""
    assert payload.count(struct.pack("<I", real)) == 2
    return payload.replace(struct.pack("<I", real), struct.pack("<I", stated))


def build(tmp_path: Path, payload: bytes, most_bytes: int) -> Path:
    folder = tmp_path / "7"
    (folder / environment.WHEELS).mkdir(parents=True)
    (wheel := folder / environment.WHEELS / NAME).write_bytes(payload)
    environment.build(folder, tmp_path / "factory", {wheel: most_bytes})
    return folder


def module(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "7").rglob("edge_fl_big.py"))


def test_the_signed_size_is_that_of_all_files_and_enough_to_install_it(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(payload := built(bytes(10 * MB)))
    assert len(payload) < 20_000
    (wheel,) = agent_releases.sign(Repository(tmp_path / "server"), [tmp_path / NAME]).wheels
    with zipfile.ZipFile(tmp_path / NAME) as archive:
        assert wheel.unpacked == sum(len(archive.read(name)) for name in archive.namelist()) > 10 * MB
    folder = build(tmp_path, payload, wheel.unpacked)
    assert environment.is_complete(folder) and module(tmp_path)[0].stat().st_size == 10 * MB


def test_a_wheel_that_unpacks_to_more_than_was_signed_is_refused_before_anything_is_unpacked(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ArtefactError, match=r"unpacks to 104\d+ bytes, the signed metadata say 1048576"
    ) as caught:
        build(tmp_path, built(bytes(10 * MB)), MB)
    assert (
        caught.value.why == "bad_wheel"
        and not environment.is_complete(tmp_path / "7")
        and not module(tmp_path)
    )


def test_a_wheel_that_states_a_smaller_size_than_it_has_is_refused(tmp_path: Path) -> None:
    payload = lying(built(bytes(10 * MB)), 10 * MB, 1000)
    with pytest.raises(ArtefactError) as caught:
        build(tmp_path, payload, 5000)
    assert caught.value.why == "bad_wheel"
    assert sum(path.stat().st_size for path in module(tmp_path)) <= MB + 5000
    (tmp_path / NAME).write_bytes(payload)
    with pytest.raises(InputError, match="expected a wheel; nothing was signed"):
        agent_releases.sign(Repository(tmp_path / "server"), [tmp_path / NAME])


def test_unpacking_stops_at_the_limit(tmp_path: Path) -> None:
    destination = environment._Destination({"purelib": str(tmp_path)}, "python", "posix")
    destination.left = 100
    destination.write_to_fs("purelib", "first", io.BytesIO(bytes(60)), False)
    with pytest.raises(ArtefactError, match="more than its declared size") as caught:
        destination.write_to_fs("purelib", "second", io.BytesIO(bytes(10**7)), False)
    assert caught.value.why == "bad_wheel" and (tmp_path / "second").stat().st_size <= 41


def test_no_wheel_has_more_than_a_gibibyte_or_too_many_files(tmp_path: Path) -> None:
    large = zipfile.ZipInfo("a")
    large.file_size = MAX_UNPACKED_BYTES
    assert unpacked_bytes("x", [large]) == MAX_UNPACKED_BYTES
    for files in (
        [large, zipfile.ZipInfo("b"), large],
        [zipfile.ZipInfo(str(n)) for n in range(MAX_FILES + 1)],
    ):
        with pytest.raises(ArtefactError, match=r"expected at most 20,000 of 1\.0 GiB"):
            unpacked_bytes("x", files)
    (tmp_path / NAME).write_bytes(lying(built(bytes(700_001)), 700_001, MAX_UNPACKED_BYTES + 1))
    with pytest.raises(InputError, match=r"expected at most 20,000 of 1\.0 GiB"):
        agent_releases.sign(Repository(tmp_path / "server"), [tmp_path / NAME])
