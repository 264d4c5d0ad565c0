"""The canary detects a signed but bad model in its child process."""

from dataclasses import replace

import pytest

from edge_fl.blob import split
from edge_fl.config import ModelConfig
from edge_fl.errors import ArtefactError, KilledError
from edge_fl_devices.install import canary
from edge_fl_devices.install.canary import MEBIBYTE, CanaryLimits
from edge_fl_devices.storage.slots import Slots
from tests.devices import graphs
from tests.devices.deadly import deadly
from tests.devices.graphs import WEIGHTS, graph, manifest_for, on_disk
from tests.sample import sample
from tools.bench import backbone

BACKBONES = ["efficientnet-lite0", "timm:vit_small_patch14_dinov2.lvd142m"]
TIGHT = CanaryLimits(memory_bytes=128 * MEBIBYTE, cpu_s=2, deadline_s=100)


def result_of(folder, payload, limits=TIGHT, **changes):
    return canary.check(on_disk(folder, payload), manifest_for(payload, **changes), limits)


def test_a_good_extractor_passes(tmp_path):
    found = result_of(tmp_path, graph())
    assert found == canary.CanaryResult(True, "ok", found.seconds)
    assert found.seconds > 0


def test_features_other_than_the_manifest_s_fail(tmp_path):
    found = result_of(tmp_path, graph(weights=WEIGHTS * 1.01))
    assert not found.ok
    assert "features differ by" in found.reason


def test_the_tolerance_is_the_manifests(tmp_path):
    manifest = manifest_for(payload := graph(weights=WEIGHTS * 1.00001))
    assert canary.check(on_disk(tmp_path, payload), manifest, TIGHT).ok


def test_nan_fails(tmp_path):
    assert "not finite" in result_of(tmp_path, graphs.gives_nan()).reason


def test_a_model_that_never_returns_runs_out_of_processor_time(tmp_path):
    found = result_of(tmp_path, graphs.never_returns(), CanaryLimits(cpu_s=1, deadline_s=100))
    assert "within 1 s of processor time" in found.reason


def test_a_child_without_a_result_is_stopped_at_the_deadline(tmp_path):
    found = result_of(tmp_path, graphs.never_returns(), CanaryLimits(cpu_s=600, deadline_s=2))
    assert found.reason == "no result within 2 s"


def test_a_model_that_allocates_terabytes_fails(tmp_path):
    assert not result_of(tmp_path, graphs.asks_for_terabytes()).ok


def test_memory_is_limited(tmp_path):
    assert result_of(tmp_path, graphs.takes_memory(16)).ok
    found = result_of(tmp_path, graphs.takes_memory(400))
    assert not found.ok
    assert "alloc" in found.reason.lower()


def test_a_wrong_feature_size_fails(tmp_path):
    assert "gave (2, 2)" in result_of(tmp_path, graphs.drops_a_feature()).reason


def test_a_newer_opset_fails_by_name(tmp_path):
    assert "needs opset 99" in result_of(tmp_path, graph(), opset=99).reason


@pytest.mark.parametrize("payload", [b"not a model", graph()[:100]])
def test_bytes_that_are_no_model_fail(tmp_path, payload):
    assert "does not load" in result_of(tmp_path, payload).reason


def test_a_bad_release_is_never_current_and_the_old_one_keeps_serving(tmp_path):
    slots = Slots(tmp_path / "slots", reserve_bytes=0)
    for release, payload in ((1, graph()), (2, graphs.gives_nan())):
        manifest = manifest_for(payload, release=release)
        slots.prepare(manifest)
        for index in slots.sink(manifest.extractor).missing:
            slots.sink(manifest.extractor).add(index, bytes(split(payload, 1024)[index]))
        if release == 1:
            assert slots.install(manifest, check=canary.require).pending
            continue
        with pytest.raises(ArtefactError, match=r"release 2: canary failed, .*not finite") as caught:
            slots.install(manifest, check=canary.require)
        assert caught.value.why == "canary_failed"
    assert slots.current().manifest.release == 1
    assert slots.blocked == {2: "canary_failed"}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", sample(BACKBONES, BACKBONES[:1]))
def test_backbones_pass_within_half_of_the_limit_of_memory(tmp_path, name):
    manifest, payloads = backbone.released(["a", "b"], ModelConfig(name, {"size": 224}, weights="random"))
    path = on_disk(tmp_path, payloads[manifest.extractor.sha256])
    limits = CanaryLimits()
    assert canary.check(path, manifest, limits).reason == "ok"
    assert canary.check(path, manifest, replace(limits, memory_bytes=limits.memory_bytes // 2)).reason == "ok"
    assert not canary.check(path, manifest, replace(limits, memory_bytes=-3 * path.stat().st_size)).ok


@pytest.mark.parametrize("when", ["start", "output"])
def test_a_canary_that_a_signal_ends_once_is_run_again(tmp_path, monkeypatch, when):
    deaths = deadly(tmp_path / "site", monkeypatch, "canary_child", "SIGSEGV", times=2, when=when)
    assert result_of(tmp_path, graph()).reason == "ok" and not deaths.left


def test_a_model_that_crashes_every_time_fails(tmp_path, monkeypatch):
    deaths = deadly(tmp_path / "site", monkeypatch, "canary_child", "SIGSEGV", times=10, when="output")
    found = result_of(tmp_path, graph())
    assert found.reason == "was ended by SIGSEGV (segmentation fault), 3 times in a row" and not found.ok
    assert deaths.left == 7


def test_a_board_on_which_no_canary_starts_says_nothing_about_the_release(tmp_path, monkeypatch):
    deadly(tmp_path / "site", monkeypatch, "canary_child", "SIGILL", when="onnxruntime")
    with pytest.raises(KilledError, match=r"canary: the child was ended by SIGILL .*not tested") as caught:
        result_of(tmp_path, graph())
    assert not isinstance(caught.value, canary.CrashedError)


def test_a_canary_that_the_system_kills_is_out_of_memory(tmp_path, monkeypatch):
    deadly(tmp_path / "site", monkeypatch, "canary_child", "SIGKILL", when="output")
    with pytest.raises(MemoryError, match=r"canary: out of memory"):
        result_of(tmp_path, graph())
