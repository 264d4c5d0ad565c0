from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import onnx
import pytest

from devices.install.runtime import require_runnable
from devices.sight.features import Extractor, FeatureCache, fingerprint, runtime
from edge_fl.config import InputSpec
from edge_fl.errors import ArtefactError
from tests.devices import graphs
from tests.devices.graphs import DIM, WEIGHTS, graph, manifest_for, on_disk


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 1, 4, 4), np.uint8)


def extractor(folder: Path, payload: bytes | None = None, **changes: object) -> Extractor:
    payload = payload or graph()
    return Extractor(on_disk(folder, payload), manifest_for(payload, **changes))


def refusal(folder: Path, payload: bytes, **changes: object) -> ArtefactError:
    with pytest.raises(ArtefactError) as caught:
        extractor(folder, payload, **changes)
    return caught.value


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_features_are_those_of_the_scaled_images_whatever_the_batches(tmp_path, count):
    x = images(count)
    z = extractor(tmp_path).features(x)
    assert z.shape == (count, DIM)
    assert z.dtype == np.float32
    np.testing.assert_allclose(z, (x / 255).reshape(count, 16) @ WEIGHTS, atol=1e-5)


def test_large_images_go_in_small_batches(tmp_path):
    assert extractor(tmp_path).batch_size == 64
    payload = graph(input_shape=("n", "c", "h", "w"))
    assert extractor(tmp_path, payload, input=InputSpec(3, 224, 224)).batch_size == 6
    assert extractor(tmp_path, payload, input=InputSpec(3, 4096, 4096)).batch_size == 1


@pytest.mark.parametrize(
    "x", [images(2).astype(np.float32), images(2)[:, :, :3], images(2)[:, 0], np.repeat(images(2), 3, axis=1)]
)
def test_images_of_another_shape_or_type_are_refused(tmp_path, x):
    with pytest.raises(ArtefactError, match=r"expected uint8 \[N, 1, 4, 4\]"):
        extractor(tmp_path).features(x)


def test_an_opset_beyond_the_runtime_is_refused_by_name_before_the_fetch():
    with pytest.raises(
        ArtefactError,
        match=rf"needs opset 99, onnxruntime {runtime().version} runs up to {runtime().max_opset}",
    ) as caught:
        require_runnable(manifest_for(graph(), opset=99), runtime())
    assert caught.value.why == "unsupported_opset"


def test_a_runtime_that_is_too_old_is_named():
    with pytest.raises(
        ArtefactError, match=rf"needs onnxruntime 99\.1, this is {runtime().version}"
    ) as caught:
        require_runnable(manifest_for(graph(), min_onnxruntime="99.1"), runtime())
    assert caught.value.why == "unsupported_opset"
    # 1.31 is newer: numbers, not text
    require_runnable(manifest_for(graph(), min_onnxruntime="1.9"), runtime())


def test_max_opset_is_what_the_runtime_really_loads(tmp_path):
    newest = min(runtime().max_opset, onnx.defs.onnx_opset_version())
    assert newest >= 17
    extractor(tmp_path, graph(opset=newest), opset=newest)
    if runtime().max_opset < onnx.defs.onnx_opset_version():
        error = refusal(tmp_path, graph(opset=runtime().max_opset + 1))  # the manifest says 17: it lies
        assert error.why == "unsupported_opset"
        assert "opset" in str(error).lower()


def test_an_ir_version_beyond_the_runtime_is_refused_by_name(tmp_path):
    error = refusal(tmp_path, graph(ir=99))
    assert error.why == "unsupported_opset"
    assert "IR version: 99" in str(error)


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (graph(input_shape=("n", 2, 2, 4)), r"declares image as tensor\(float\) \['n', 2, 2, 4\]"),
        (graph(input_shape=("n", 16)), "declares image"),
        (graph(input_shape=("n", 3, 4, 4)), "does not load"),
        (graph(weights=WEIGHTS[:, :2], output_shape=("n", 2)), "declares features"),
        (graph(outputs=2), "2 outputs"),
        (graph()[:-30], "does not load"),
        (b"not a model", "does not load"),
    ],
)
def test_a_graph_that_is_not_what_its_manifest_says_is_refused(tmp_path, payload, complaint):
    error = refusal(tmp_path, payload)
    assert error.why == "canary_failed"
    with pytest.raises(ArtefactError, match=complaint):
        raise error


def test_a_feature_size_that_shows_only_when_run_is_refused(tmp_path):
    lying = extractor(tmp_path, graphs.drops_a_feature())
    with pytest.raises(ArtefactError, match=r"gave \(2, 2\), expected \(2, 3\)"):
        lying.features(images(2))


def test_features_that_are_not_finite_are_refused(tmp_path):
    with pytest.raises(ArtefactError, match="6 values that are not finite"):
        extractor(tmp_path, graphs.gives_nan()).features(images(2))


class Counting(Extractor):
    runs = 0

    def run(self, images):
        self.runs += 1
        return super().run(images)


@pytest.fixture
def counting(tmp_path):
    payload = graph()
    return Counting(on_disk(tmp_path, payload), manifest_for(payload))


def test_features_are_computed_once_and_survive_a_restart(tmp_path, counting):
    first = FeatureCache(tmp_path / "cache").features(counting, images(5))
    again = FeatureCache(tmp_path / "cache").features(counting, images(5))
    assert counting.runs == 1
    assert np.array_equal(first, again)


def test_new_data_and_a_new_extractor_never_meet_old_features(tmp_path, counting):
    cache = FeatureCache(tmp_path / "cache")
    cache.features(counting, images(5))
    cache.features(counting, images(5, seed=1))
    assert counting.runs == 2
    payload = graph(weights=2 * WEIGHTS)
    newer = Extractor(on_disk(tmp_path, payload), manifest_for(payload))
    np.testing.assert_allclose(
        cache.features(newer, images(5)), 2 * cache.features(counting, images(5)), atol=1e-5
    )
    assert counting.runs == 2


def test_the_cache_keeps_the_entries_used_last(tmp_path, counting):
    cache = FeatureCache(tmp_path / "cache", entries=2)
    for seed in (1, 2, 1, 3):  # 2 is the one not used for longest
        cache.features(counting, images(5, seed))
    assert len(list((tmp_path / "cache").iterdir())) == 2
    runs = counting.runs
    cache.features(counting, images(5, 1))
    assert counting.runs == runs
    cache.features(counting, images(5, 2))
    assert counting.runs == runs + 1


@pytest.mark.parametrize("garbage", [b"", b"\x93NUMPY", b"\x80\x04pickle", b"x" * 500])
def test_a_damaged_cache_file_is_computed_again(tmp_path, counting, garbage):
    cache = FeatureCache(tmp_path / "cache")
    good = cache.features(counting, images(5))
    (entry,) = (tmp_path / "cache").iterdir()
    entry.write_bytes(garbage)
    assert np.array_equal(cache.features(counting, images(5)), good)
    assert counting.runs == 2


def test_features_are_for_their_owner_alone(tmp_path, counting):
    FeatureCache(tmp_path / "cache").features(counting, images(5))
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


def test_a_fingerprint_sees_shape_and_pixels():
    x = images(4)
    assert fingerprint(x) == fingerprint(x.copy())
    assert fingerprint(x) == fingerprint(np.asfortranarray(x))
    assert len({fingerprint(y) for y in (x, x[:3], x.reshape(2, 2, 4, 4), 255 - x)}) == 4
