import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from edge_fl.errors import ArtefactError
from edge_fl.inputs import InputSpec
from edge_fl_devices.features.extractor import Extractor, runtime
from edge_fl_devices.features.onnx_runtime import require_runnable
from tests.devices import graphs
from tests.devices.graphs import DIM, WEIGHTS, graph, images, manifest_for, on_disk


def extractor(folder: Path, payload: bytes | None = None, **changes: object) -> Extractor:
    payload = payload or graph()
    return Extractor(on_disk(folder, payload), manifest_for(payload, **changes))


def load_error(folder: Path, payload: bytes, **changes: object) -> ArtefactError:
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


def test_large_images_are_processed_in_small_batches(tmp_path):
    assert extractor(tmp_path).batch_size == 64
    payload = graph(input_shape=("n", "c", "h", "w"))
    assert extractor(tmp_path, payload, input=InputSpec((3, 224, 224))).batch_size == 1
    assert extractor(tmp_path, payload, input=InputSpec((3, 4096, 4096))).batch_size == 1


@pytest.mark.parametrize(
    "x", [images(2).astype(np.float32), images(2)[:, :, :3], images(2)[:, 0], np.repeat(images(2), 3, axis=1)]
)
def test_images_of_another_shape_or_type_are_rejected(tmp_path, x):
    with pytest.raises(ArtefactError, match=r"expected uint8 \[N, 1, 4, 4\]"):
        extractor(tmp_path).features(x)


def test_an_opset_beyond_the_runtime_is_rejected_by_name_before_the_fetch():
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
        error = load_error(tmp_path, graph(opset=runtime().max_opset + 1))  # the manifest declares opset 17
        assert error.why == "unsupported_opset"
        assert "opset" in str(error).lower()


def test_an_ir_version_beyond_the_runtime_is_rejected_by_name(tmp_path):
    error = load_error(tmp_path, graph(ir=99))
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
def test_a_graph_that_is_not_what_its_manifest_says_is_rejected(tmp_path, payload, complaint):
    error = load_error(tmp_path, payload)
    assert error.why == "canary_failed"
    with pytest.raises(ArtefactError, match=complaint):
        raise error


def test_a_feature_size_that_shows_only_when_run_is_rejected(tmp_path):
    lying = extractor(tmp_path, graphs.drops_a_feature())
    with pytest.raises(ArtefactError, match=r"gave \(2, 2\), expected \(2, 3\)"):
        lying.features(images(2))


def test_features_that_are_not_finite_are_rejected(tmp_path):
    with pytest.raises(ArtefactError, match="6 values that are not finite"):
        extractor(tmp_path, graphs.gives_nan()).features(images(2))


def test_threads_do_not_change_the_features(tmp_path):
    payload, x = graph(), images(70)
    path, manifest = on_disk(tmp_path, payload), manifest_for(payload)
    one, two = (Extractor(path, manifest, threads).features(x) for threads in (1, 2))
    assert np.array_equal(one, two)


def test_by_default_there_is_a_thread_for_each_core_that_the_process_may_use(tmp_path, monkeypatch):
    asked = []
    session = onnxruntime.InferenceSession

    def recorded(model, options, **settings):
        asked.append(options.intra_op_num_threads)
        return session(model, options, **settings)

    monkeypatch.setattr(onnxruntime, "InferenceSession", recorded)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 3})
    payload = graph()
    path, manifest = on_disk(tmp_path, payload), manifest_for(payload)
    Extractor(path, manifest)
    Extractor(path, manifest, threads=1)
    assert asked == [3, 1]
