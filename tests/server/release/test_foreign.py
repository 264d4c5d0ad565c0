"""Foreign ONNX models: what is accepted is converted without a change of its features; every bad kind is one line that says what to do."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge_fl import modalities
from edge_fl.errors import InputError
from edge_fl.inputs import InputSpec
from edge_fl.release.onnx_form import IR_VERSION, OPSET
from edge_fl_server.release import foreign_child
from edge_fl_server.release.foreign import ForeignInput, Reference, convert
from edge_fl_server.release.foreign_child import ForeignLimits
from edge_fl_server.release.onnx_session import Session
from tests.devices import graphs
from tests.devices.deadly import deadly
from tests.devices.graphs import DIM, WEIGHTS, constant, graph

PIXELS = graphs.images(5).astype(np.float32) / 255
FEATURES = PIXELS.reshape(5, -1) @ WEIGHTS
PLAIN = ForeignInput()
SERIES = InputSpec((2, 8), axes="CT", dtype="float32", rate=50, hop=4, names=("x", "y"))
LEVELS = graphs.images(5)
QUICK = ForeignLimits(memory_mb=512, cpu_s=60, deadline_s=100)


@pytest.fixture
def file(tmp_path):
    """Write a model -> its path."""

    def write(payload: bytes | onnx.ModelProto) -> Path:
        path = tmp_path / "model.onnx"
        path.write_bytes(payload if isinstance(payload, bytes) else payload.SerializeToString())
        return path

    return write


def edited(payload: bytes, change) -> onnx.ModelProto:
    model = onnx.ModelProto.FromString(payload)
    change(model)
    return model


def with_type(place: str, kind: int):
    def change(model):
        getattr(model.graph, place)[0].type.tensor_type.elem_type = kind

    return change


def without_shape(place: str):
    def change(model):
        getattr(model.graph, place)[0].type.tensor_type.ClearField("shape")

    return change


def external(model):
    tensor = model.graph.initializer[0]
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../etc/passwd")
    tensor.ClearField("raw_data")


def bomb(model):
    """A weight of a petabyte that a few bytes declare."""
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend([2**25, 2**23])


def custom(model):
    model.graph.node[0].domain = "com.microsoft"
    model.opset_import.add(domain="com.microsoft", version=1)


def mean_of_batch() -> bytes:
    """Features that depend on the other images of a batch."""
    nodes = [
        helper.make_node("ReduceMean", ["z"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("Sub", ["z", "mean"], ["features"]),
    ]
    return graph(nodes)


def reshaped(*shape: int) -> bytes:
    return graph(
        [helper.make_node("Reshape", ["z", "shape"], ["features"])], [constant("shape", shape, np.int64)]
    )


def forever() -> bytes:
    """A loop that never ends, behind which the shape is known."""
    model = onnx.ModelProto.FromString(graphs.never_returns())
    model.graph.node[-1].output[0] = "looped"
    model.graph.initializer.append(constant("shape", [-1, DIM], np.int64))
    model.graph.node.append(helper.make_node("Reshape", ["looped", "shape"], ["features"]))
    return model.SerializeToString()


FIXED = graph(input_shape=(1, 1, 4, 4), output_shape=(1, DIM))


@pytest.mark.parametrize(
    ("payload", "versions"),
    [
        pytest.param(graph(), (17, 8), id="as ours"),
        pytest.param(FIXED, (17, 8), id="batch of one"),
        pytest.param(graph(opset=13, ir=7), (13, 7), id="older"),
        pytest.param(graph(opset=21, ir=10), (OPSET, IR_VERSION), id="newer"),
        pytest.param(reshaped(-1, DIM, 1, 1), (17, 8), id="pooled"),
        pytest.param(edited(graph(), without_shape("output")), (17, 8), id="shape inferred"),
        pytest.param(graph(input_shape=("n", 1, 4, 4), output_shape=("n", "d")), (17, 8), id="free d"),
    ],
)
def test_an_accepted_model_gives_its_features_for_batches_of_any_size(file, payload, versions):
    found = convert(file(payload), PLAIN)
    assert (found.opset, found.ir) == versions
    assert (found.feature_dim, found.input.shape) == (DIM, (1, 4, 4))
    assert (found.input.mean, found.input.std) == ((0.0,), (1.0,))
    model = onnx.ModelProto.FromString(found.onnx)
    assert [value.name for value in (*model.graph.input, *model.graph.output)] == ["image", "features"]
    for count in (1, 5):
        assert np.allclose(Session(found.onnx).run(PIXELS[:count]), FEATURES[:count], atol=1e-5)


def test_mean_and_std_become_part_of_the_graph(file):
    found = convert(file(graph()), ForeignInput((0.5,), (0.25,), resize="letterbox"))
    assert (found.input.mean, found.input.std, found.input.resize) == ((0.5,), (0.25,), "letterbox")
    expected = ((PIXELS - 0.5) / 0.25).reshape(5, -1) @ WEIGHTS
    assert np.allclose(Session(found.onnx).run(PIXELS), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "given", "mean", "std"),
    [
        ((2, 8), ForeignInput((1.0, -2.0), (4.0, 3.0), input=SERIES), (1.0, -2.0), (4.0, 3.0)),
        ((2, "t"), ForeignInput(input=SERIES), (), ()),
        ((16,), ForeignInput((0.5,), (2.0,), input=InputSpec((16,), axes="T", dtype="float32", rate=9, hop=4)), (0.5,), (2.0,)),
        ((16,), ForeignInput(input=InputSpec((16,), axes="F", dtype="float32")), (), ()),
    ],
)  # fmt: skip
def test_a_series_audio_and_a_table_are_described_by_an_input(file, tmp_path, shape, given, mean, std):
    input = given.input
    path, x = (
        file(graph(input_shape=("n", *shape))),
        modalities.noise(LEVELS.reshape(-1, *input.shape), input),
    )
    mean, std = (
        np.reshape(np.broadcast_to(values or one, input.channels), (-1, *(1 for _ in input.shape[1:])))
        for values, one in ((mean, 0.0), (std, 1.0))
    )
    expected = ((x - mean) / std).reshape(5, -1) @ WEIGHTS
    np.savez(reference := tmp_path / "reference.npz", x=x, features=expected)
    found = foreign_child.read(path, given, reference, QUICK)
    assert (found.input.shape, found.input.rate) == (input.shape, input.rate) and found == convert(
        path, given
    )
    assert found.input.mean == (given.mean or input.mean)


def test_a_free_size_is_the_given_one(file):
    payload = graph(input_shape=("n", 1, "h", "w"))
    assert convert(file(payload), ForeignInput(size=4)).input.shape == (1, 4, 4)
    with pytest.raises(InputError, match=r"its size is free, expected --size"):
        convert(file(payload), PLAIN)


def test_features_equal_those_of_a_reference(file):
    path = file(graph())
    assert convert(path, PLAIN, Reference(PIXELS, FEATURES)).feature_dim == DIM
    with pytest.raises(InputError, match=r"differ by .* from the reference, at most 1e-03"):
        convert(path, PLAIN, Reference(PIXELS, FEATURES * 1.01))
    with pytest.raises(InputError, match=r"features \[5, 3\], the reference has \[5, 2\]"):
        convert(path, PLAIN, Reference(PIXELS, FEATURES[:, :2]))


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"", "0 bytes, expected an ONNX model"),
        (b"not a model at all", "not an ONNX model"),
        (b"\x08\x07", r"not an ONNX model \(no graph in it\)"),
        (edited(graph(), custom), r"operator com.microsoft.Flatten, expected standard ONNX operators only"),
        (edited(graph(), external), r"weights of 'w' are in another file \(../../etc/passwd\)"),
        (edited(graph(), bomb), r"declares weights of \d+ MiB, expected at most 512 MiB"),
        (graph(outputs=2), r"2 outputs \(features, more1\), expected one with the features"),
        (edited(graph(), lambda m: m.graph.input.append(m.graph.input[0])), "2 inputs"),
        (
            edited(graph(), with_type("input", TensorProto.DOUBLE)),
            r"is double \[n, 1, 4, 4\], expected float",
        ),
        (
            edited(graph(), with_type("output", TensorProto.INT64)),
            r"is int64 \[n, 3\], expected float features",
        ),
        (
            edited(graph(), without_shape("input")),
            r"is float of any rank, expected \[N, C, H, W\], or --input",
        ),
        (
            graph(input_shape=("n", 16)),
            r"is float \[n, 16\], expected \[N, C, H, W\], or --input with samples",
        ),
        (
            graph(input_shape=("n", 24, 24, 3)),
            r"expected \[N, C, H, W\] with 1 or 3 channels \(it has channels",
        ),
        (graphs.never_returns(), "has no fixed rank"),
        (reshaped(-1, DIM, 2, 2), r"is float \[\?, 3, 2, 2\], expected features \[N, d\] or \[N, d, 1, 1\]"),
        (reshaped(-1, 1, DIM), r"is float \[\?, 1, 3\], expected features \[N, d\].*pool over"),
        (reshaped(1, DIM), r"is float \[1, 3\] for any number of samples.*batch is fixed.*dynamic_axes"),
        (mean_of_batch(), r"differ by .* between batches of 1 and 4"),
        (graphs.gives_nan(), r"12 of 12 features of pictures are not finite"),
        (graph(weights=np.zeros_like(WEIGHTS)), "the same features for all pictures"),
        (graph(opset=6, ir=3), "opset 6"),
    ],
)
def test_every_bad_kind_is_one_line(file, payload, said):
    path = file(payload)
    with pytest.raises(InputError, match=said) as refused:
        convert(path, PLAIN)
    assert str(refused.value).startswith(f"{path}: ") and "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (ForeignInput(mean=(0.5,)), "expected both --mean and --std"),
        (ForeignInput((0.5, 0.5), (0.5, 0.5)), "--mean has 2 values, expected 1 or 1"),
        (ForeignInput((0.5,), (0.0,)), "expected values above 0"),
        (ForeignInput(input=SERIES), r"is float \[n, 1, 4, 4\], expected float \[N, 2, 8\]"),
        (ForeignInput(size=5), r"is float \[n, 1, 4, 4\], but --size is 5"),
    ],
)
def test_a_wrong_description_is_one_line(file, given, said):
    with pytest.raises(InputError, match=said):
        convert(file(graph()), given)


@pytest.mark.parametrize(
    ("payload", "cpu_s", "said"),
    [
        (graphs.asks_for_terabytes(), 60, "takes too much memory"),
        (graphs.takes_memory(2000), 60, "takes too much memory"),
        (forever(), 2, "needs more than 512 MiB of memory or 2 s of processor time"),
    ],
)
def test_a_model_that_takes_everything_harms_only_a_child(file, payload, cpu_s, said):
    limits = ForeignLimits(memory_mb=512, cpu_s=cpu_s, deadline_s=100)
    with pytest.raises(InputError, match=said):
        foreign_child.read(file(payload), PLAIN, limits=limits)


def test_the_child_returns_what_the_conversion_gives(file, tmp_path):
    path = file(FIXED)
    np.savez(reference := tmp_path / "reference.npz", x=graphs.images(5), features=FEATURES)
    assert foreign_child.read(path, PLAIN, reference, QUICK) == convert(path, PLAIN)
    np.savez(reference, x=graphs.images(5))
    with pytest.raises(InputError, match=r"holds x; expected x .* and features"):
        foreign_child.read(path, PLAIN, reference, QUICK)
    with pytest.raises(InputError, match="no such file; expected an ONNX model"):
        foreign_child.read(path.with_name("absent.onnx"), PLAIN)


def test_a_crash_of_the_child_is_named_and_once_is_no_verdict(file, tmp_path, monkeypatch):
    path = file(FIXED)
    deaths = deadly(tmp_path / "site", monkeypatch, "foreign_child", "SIGSEGV", times=4, when="onnx")
    with pytest.raises(InputError, match=r"crashes \(the child was ended by SIGSEGV"):
        foreign_child.read(path, PLAIN, limits=QUICK)
    assert deaths.left == 1
    assert foreign_child.read(path, PLAIN, limits=QUICK) == convert(path, PLAIN)
