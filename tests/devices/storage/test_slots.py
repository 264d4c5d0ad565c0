import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from edge_fl.blob import describe, split
from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl_devices.storage.slots import Slots

HERE = Path(__file__).parent


def released(slots: Slots) -> int | None:
    installed = slots.current()
    return installed.manifest.release if installed else None


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".part")]


@pytest.fixture
def slots(tmp_path):
    return Slots(tmp_path)


@pytest.fixture
def installed(slots, make_release, fetch):
    """Slots with release 1, good."""
    manifest, payloads = make_release(1)
    fetch(slots, manifest, payloads)
    slots.install(manifest)
    slots.mark_good()
    return slots


def test_an_empty_folder_serves_nothing(slots):
    assert slots.current() is None
    assert slots.previous() is None
    assert slots.boot() is None


def test_a_release_is_installed_byte_for_byte(slots, make_release, fetch):
    manifest, payloads = make_release(1)
    fetch(slots, manifest, payloads)
    release = slots.install(manifest)
    assert release == slots.current()
    assert release.pending
    assert release.manifest == manifest
    assert release.extractor.read_bytes() == payloads[manifest.extractor.sha256]
    assert release.extras["global_head"].read_bytes() == payloads[manifest.extras["global_head"].sha256]


def test_a_killed_download_resumes_without_refetching(tmp_path, make_release, fetch):
    manifest, payloads = make_release(1)
    chunks = split(payloads[manifest.extractor.sha256], 1024)
    first = Slots(tmp_path)
    first.prepare(manifest)
    first.sink(manifest.extractor).add(2, bytes(chunks[2]))
    first.sink(manifest.extractor).add(0, bytes(chunks[0]))
    second = Slots(tmp_path)  # as after a kill: nothing in memory
    assert second.sink(manifest.extractor).missing == [1, 3]
    assert fetch(second, manifest, payloads) == 3  # two of the extractor, one of the extra
    assert second.install(manifest).manifest.release == 1


def test_a_corrupt_chunk_is_rejected_and_leaves_nothing_behind(slots, make_release):
    manifest, payloads = make_release(1)
    chunks = split(payloads[manifest.extractor.sha256], 1024)
    slots.prepare(manifest)
    for bad in (bytes(1024), bytes(chunks[0])[:-1], bytes(chunks[0]) + b"x", b""):
        with pytest.raises(ArtefactError) as refusal:
            slots.sink(manifest.extractor).add(0, bad)
        assert refusal.value.why == "chunk_hash"
    assert 0 in slots.sink(manifest.extractor).missing
    assert not [path for path in slots.folder.rglob("*") if path.is_file()]


def test_a_chunk_that_a_power_cut_left_half_written_is_fetched_again(tmp_path, make_release):
    manifest, payloads = make_release(1)
    chunks = split(payloads[manifest.extractor.sha256], 1024)
    first = Slots(tmp_path)
    first.prepare(manifest)
    for index in (0, 1):
        first.sink(manifest.extractor).add(index, bytes(chunks[index]))
    with (tmp_path / "chunks" / manifest.extractor.sha256).open("r+b") as file:
        file.truncate(1024 + 100)
    assert Slots(tmp_path).sink(manifest.extractor).missing == [1, 2, 3]


def test_a_foreign_file_in_the_chunk_folder_is_not_used(tmp_path, make_release):
    manifest, payloads = make_release(1)
    (tmp_path / "chunks").mkdir()
    strange = tmp_path / "chunks" / manifest.extractor.sha256
    strange.write_bytes(payloads[manifest.extractor.sha256] + b"and more")
    assert Slots(tmp_path).sink(manifest.extractor).missing == [0, 1, 2, 3]
    assert not strange.exists()


def test_an_incomplete_release_is_not_installed_and_rollback_stays_possible(installed, make_release, fetch):
    fetch(installed, *make_release(2))
    installed.install(make_release(2)[0])
    manifest, _ = make_release(3)
    installed.prepare(manifest)
    with pytest.raises(ArtefactError, match="4 of 4 chunks") as refusal:
        installed.install(manifest)
    assert refusal.value.why == "incomplete"
    assert released(installed) == 2
    assert installed.previous().manifest.release == 1


def test_a_manifest_whose_whole_hash_is_wrong_is_not_installed(installed, make_release, fetch):
    manifest, payloads = make_release(2)
    wrong = msgspec.structs.replace(
        manifest, extractor=msgspec.structs.replace(manifest.extractor, sha256="0" * 64)
    )
    fetch(installed, wrong, payloads | {"0" * 64: payloads[manifest.extractor.sha256]})
    with pytest.raises(ArtefactError, match="manifest says 00000000"):
        installed.install(wrong)
    assert released(installed) == 1
    assert not leftovers(installed.folder)


def test_the_previous_release_stays_in_the_other_slot(installed, make_release, fetch):
    before = installed.current().extractor
    fetch(installed, *make_release(2))
    after = installed.install(make_release(2)[0]).extractor
    assert before != after
    assert before.exists()
    assert installed.previous().manifest.release == 1


def test_chunks_are_gone_after_an_install(installed):
    assert not list((installed.folder / "chunks").iterdir())


def test_rollback_returns_to_the_previous_release_and_blocks_the_failed_one(installed, make_release, fetch):
    manifest, payloads = make_release(2)
    fetch(installed, manifest, payloads)
    installed.install(manifest)
    assert installed.rollback("canary_failed").manifest.release == 1
    again = Slots(installed.folder)
    assert again.blocked == {2: "canary_failed"}
    assert not again.current().pending
    with pytest.raises(ArtefactError, match=r"release 2: failed here before \(canary_failed\)"):
        again.prepare(manifest)
    with pytest.raises(ArtefactError, match="waiting for a newer one"):
        again.install(manifest)
    fetch(again, *make_release(3))
    assert again.install(make_release(3)[0]).manifest.release == 3


def test_rollback_of_the_first_release_leaves_nothing_to_serve(slots, make_release, fetch):
    fetch(slots, *make_release(1))
    slots.install(make_release(1)[0])
    assert slots.rollback("canary_failed") is None
    assert slots.current() is None


def test_a_release_that_fails_its_check_is_never_current(installed, make_release, fetch):
    seen = []

    def fail(staged):
        seen.append((staged.extractor.read_bytes(), released(installed)))
        raise ArtefactError("features differ", Failure.CANARY_FAILED)

    manifest, payloads = make_release(2)
    fetch(installed, manifest, payloads)
    with pytest.raises(ArtefactError, match="features differ"):
        installed.install(manifest, check=fail)
    assert seen == [(payloads[manifest.extractor.sha256], 1)]
    assert released(installed) == 1
    assert not installed.current().pending
    assert installed.blocked == {2: "canary_failed"}
    assert [path.name for path in installed.folder.rglob("*.onnx")] == ["extractor.onnx"]  # release 1's alone
    assert not list((installed.folder / "chunks").iterdir())


def test_a_release_that_stays_pending_over_three_boots_is_rolled_back(installed, make_release, fetch):
    fetch(installed, *make_release(2))
    installed.install(make_release(2)[0])
    assert [Slots(installed.folder).boot().manifest.release for _ in range(3)] == [2, 2, 1]
    assert installed.blocked == {2: "crash_loop"}
    assert Slots(installed.folder).boot().manifest.release == 1


def test_a_release_marked_good_survives_any_number_of_boots(installed, make_release, fetch):
    fetch(installed, *make_release(2))
    installed.install(make_release(2)[0])
    Slots(installed.folder).boot()
    installed.mark_good()
    assert [Slots(installed.folder).boot().manifest.release for _ in range(5)] == [2] * 5


def test_a_pending_release_is_replaced_and_the_proved_one_stays_as_previous(installed, make_release, fetch):
    for number in (2, 3):  # 2 is still pending when 3 comes
        fetch(installed, *make_release(number))
        installed.install(make_release(number)[0])
    assert released(installed) == 3
    assert installed.previous().manifest.release == 1


def test_the_older_release_comes_back_from_the_disk_alone(installed, make_release, fetch):
    fetch(installed, *make_release(2))
    installed.install(make_release(2)[0])
    installed.mark_good()
    manifest, payloads = make_release(1)
    assert fetch(installed, manifest, payloads) == 0
    assert installed.install(manifest).manifest.release == 1


def test_installing_what_is_current_changes_nothing(installed, make_release):
    before = installed.current()
    assert installed.install(make_release(1)[0]) == before == installed.current()


def test_only_changed_chunks_are_fetched(installed, make_release, fetch):
    manifest, payloads = make_release(1)
    changed = bytearray(payloads[manifest.extractor.sha256])
    changed[1500] ^= 1  # in chunk 1 of 4
    extractor = describe(bytes(changed), 1024)
    newer = msgspec.structs.replace(manifest, release=2, extractor=extractor)
    assert fetch(installed, newer, payloads | {extractor.sha256: bytes(changed)}) == 1
    assert installed.install(newer).extractor.read_bytes() == bytes(changed)


def test_corrupt_files_are_found_at_boot(installed, make_release, fetch):
    fetch(installed, *make_release(2))
    path = installed.install(make_release(2)[0]).extractor
    installed.mark_good()
    rotten = bytearray(path.read_bytes())
    rotten[0] ^= 1
    path.write_bytes(rotten)
    assert Slots(installed.folder).boot().manifest.release == 1
    assert installed.blocked == {}  # not the release's fault: it may be fetched again
    assert fetch(installed, *make_release(2)) == 1  # the chunk that is bad, no more
    assert installed.install(make_release(2)[0]).manifest.release == 2


def test_two_corrupt_slots_leave_an_empty_device(installed):
    installed.current().extractor.write_bytes(b"short")
    (installed.folder / "state.json").write_bytes(b"{")
    assert Slots(installed.folder).boot() is None


def test_leftovers_of_a_power_cut_are_removed_at_boot(installed):
    for folder in (installed.folder, installed.current().extractor.parent):
        (folder / ".extractor.onnx.0a1b2c3d.part").write_bytes(b"half")
    Slots(installed.folder).boot()
    assert not leftovers(installed.folder)


def test_a_download_that_does_not_fit_is_rejected_before_it_starts(installed, make_release):
    manifest, _ = make_release(2)
    with pytest.raises(ArtefactError, match="bytes needed") as refusal:
        Slots(installed.folder, reserve_bytes=2**60).prepare(manifest)
    assert refusal.value.why == "enospc"
    assert released(installed) == 1


def run_script(name: str, folder: Path) -> str:
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / name), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_full_disk_stops_the_download_and_the_old_release_serves(tmp_path):
    """In a child whose files may not grow (RLIMIT_FSIZE): the first chunk, the third, then metadata; then space returns."""
    assert run_script("fill_the_disk.py", tmp_path).split() == [
        "first",
        "enospc",
        "third",
        "enospc",
        "metadata",
        "enospc",
        "recovered",
    ]


def test_a_kill_at_any_step_of_an_install_leaves_a_whole_release_and_the_next_try_succeeds(tmp_path):
    """The child dies by SIGKILL before its n-th change to the disk, for every n until it gets through."""
    kills = int(run_script("die_while_installing.py", tmp_path))
    assert kills >= 20
