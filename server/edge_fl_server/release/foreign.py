"""Inspect ONNX graphs: versions, types, all weights and subgraphs. No torch and no onnxruntime."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from msgspec import Struct
from numpy.typing import NDArray
from onnx import TensorProto, helper, inliner, numpy_helper, shape_inference, version_converter

from edge_fl.blob import MAX_BLOB_BYTES
from edge_fl.errors import InputError, brief
from edge_fl.files.paths import text
from edge_fl.inputs import MAX_CHANNELS, MAX_SIDE, InputSpec
from edge_fl.release.onnx_form import FEATURES, IMAGE, IR_VERSION, OLDEST_OPSET, OPSET, PARITY, ROWS
from edge_fl_server.release.onnx_session import Session

STANDARD = ("", "ai.onnx")
"""Domains of the standard operators."""

TYPE_NAMES = {number: name.lower() for name, number in TensorProto.DataType.items()}
REFERENCE_PARITY = (
    1e-3  # largest difference relative to the largest feature, to features that another program computed
)
OURS = (IMAGE, FEATURES, "mean", "std", "centred")  # names of values that conversion adds
HOW = f"export it with a dynamic first axis: torch.onnx.export(..., dynamic_axes={{{IMAGE!r}: {{0: {ROWS!r}}}}})"
RNG_SEED = 0
OUT_OF_MEMORY = ("bfc_arena", "Failed to allocate", "bad_alloc", "bad allocation")
MAX_REASON = 160  # characters: the end of onnxruntime's errors, after a C++ signature, has the reason


def inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs that are not weights."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def opset(model: onnx.ModelProto) -> int:
    """The version of the standard operators."""
    return max((entry.version for entry in model.opset_import if entry.domain in STANDARD), default=0)


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and the bodies of its loops and branches."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node:
                    yield from graphs(inner)


def tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """All constant tensors; a sparse one in its full size, too."""
    for each in graphs(graph):
        yield from each.initializer
        for sparse in each.sparse_initializer:
            yield sparse.values
            dense = TensorProto(name=sparse.values.name, data_type=sparse.values.data_type)
            dense.dims.extend(sparse.dims)
            yield dense
        for node in each.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors


def renamed(model: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """Rename values in the graph and in the bodies of its loops and branches, in place; returns the model."""
    for graph in graphs(model.graph):
        for node in graph.node:
            for values in (node.input, node.output):
                values[:] = [names.get(name, name) for name in values]
        sparse = [tensor.values for tensor in graph.sparse_initializer]
        for item in (*graph.input, *graph.output, *graph.value_info, *graph.initializer, *sparse):
            item.name = names.get(item.name, item.name)
    return model


def named(values: Sequence[onnx.ValueInfoProto]) -> str:
    """The names of inputs or outputs."""
    return brief(", ".join(value.name for value in values)) or "none"


def typed(value: onnx.ValueInfoProto) -> str:
    """Type and shape of an input or output: float [n, 3, 224, 224]."""
    kind = value.type.tensor_type
    names = [dim.dim_param.replace("unk__", "?") for dim in kind.shape.dim]  # of shape inference
    dims = [
        name[:1] if name.startswith("?") else name or (dim.dim_value if dim.HasField("dim_value") else "?")
        for name, dim in zip(names, kind.shape.dim, strict=True)
    ]
    shape = f"[{', '.join(map(str, dims))}]" if kind.HasField("shape") else "of any rank"
    return f"{TYPE_NAMES.get(kind.elem_type, 'no tensor')} {shape}"


def one_line(error: Exception) -> str:
    """The text of another library's error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


class ForeignInput(Struct, frozen=True):
    """What the ONNX file itself does not say of its input.

    `mean` and `std` per channel are applied to pixels 0..1 before the model (empty: it takes pixels 0..1); `size` is needed where the model
    declares none.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    size: int = 0
    resize: str = "crop"


class Converted(NamedTuple):
    """An extractor made from a foreign model."""

    onnx: bytes
    feature_dim: int
    input: InputSpec
    opset: int
    ir: int


class Reference(NamedTuple):
    """Images x float32 [N, C, H, W] in 0..1 and the features [N, d] that the model gave where it was trained."""

    x: NDArray[np.float32]
    features: NDArray[np.float32]


def convert(path: Path, given: ForeignInput, reference: Reference | None = None) -> Converted:
    """Check a model and convert it. Raises InputError, whose message begins with the file."""
    try:
        return _converted(path, given, reference)
    except InputError as error:
        raise InputError(f"{text(path)}: {error.message}") from error


def _converted(path: Path, given: ForeignInput, reference: Reference | None) -> Converted:
    model = _inlined(_read(path))
    _require_self_contained(model)
    shape = _input_shape(model, given)
    input = _input_spec(shape, given)
    _require_output(model)
    original = model.SerializeToString()
    model = _with_opset(model)
    model.ir_version = min(model.ir_version, IR_VERSION)
    model = _with_free_batch(model, shape)
    payload = _with_ends(model, given, shape).SerializeToString()
    _check(payload)
    feature_dim = _require_features(payload, input)
    _require_unchanged(original, payload, given, input)
    if reference:
        _require_reference(payload, reference)
    return Converted(payload, feature_dim, input, opset(model), model.ir_version)


def _read(path: Path) -> onnx.ModelProto:
    try:
        size = path.stat().st_size
        if not 0 < size <= MAX_BLOB_BYTES:
            raise InputError(f"{size} bytes, expected an ONNX model of at most {MAX_BLOB_BYTES >> 20} MiB")
        model = onnx.ModelProto.FromString(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror}); expected an ONNX model") from error
    except Exception as error:  # protobuf's errors differ between its implementations
        if isinstance(error, InputError):
            raise
        raise InputError(f"not an ONNX model ({brief(error)})") from error
    if not model.graph.node or not model.opset_import:
        raise InputError("not an ONNX model (no graph in it)")
    return model


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace the model's own functions, which some exporters write, by their operators."""
    if not model.functions:
        return model
    try:
        return inliner.inline_local_functions(model)
    except Exception as error:
        raise InputError(f"its functions cannot be expanded ({brief(error)})") from error


def _require_self_contained(model: onnx.ModelProto) -> None:
    """No custom operators, and no weights outside the file or larger than it."""
    for graph in graphs(model.graph):
        for node in graph.node:
            if node.domain not in STANDARD:
                raise InputError(
                    f"operator {node.domain}.{node.op_type}, expected standard ONNX operators only; devices have no others"
                )
    weights_bytes = 0
    for tensor in tensors(model.graph):
        if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
            place = next((entry.value for entry in tensor.external_data if entry.key == "location"), "?")
            raise InputError(
                f"weights of {tensor.name!r} are in another file ({brief(place)}), expected one file:"
                " onnx.save(model, path, save_as_external_data=False)"
            )
        if tensor.data_type in TYPE_NAMES and tensor.data_type != TensorProto.STRING:
            weights_bytes += (
                int(np.prod(tensor.dims, dtype=object))
                * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            )
    if weights_bytes > MAX_BLOB_BYTES:
        raise InputError(
            f"declares weights of {weights_bytes >> 20} MiB, expected at most {MAX_BLOB_BYTES >> 20} MiB"
        )


def _input_shape(model: onnx.ModelProto, given: ForeignInput) -> tuple[int, int, int]:
    """Channels, height and width of the only input."""
    if len(values := inputs(model)) != 1:
        raise InputError(f"{len(values)} inputs ({named(values)}), expected one image")
    kind = values[0].type.tensor_type
    found = f"input {values[0].name!r} is {typed(values[0])}"
    if kind.elem_type != TensorProto.FLOAT:
        raise InputError(f"{found}, expected float [N, C, H, W]")
    if not kind.HasField("shape") or len(kind.shape.dim) != 4:
        raise InputError(f"{found}, expected four dimensions [N, C, H, W]")
    channels, height, width = (dim.dim_value for dim in kind.shape.dim[1:])
    if not 1 <= channels <= MAX_CHANNELS:
        last = kind.shape.dim[3].dim_value
        hint = " (it has channels last: export it with channels first)" if last in (1, 3) else ""
        raise InputError(f"{found}, expected [N, C, H, W] with 1 or 3 channels{hint}")
    if given.size and any(side not in (0, given.size) for side in (height, width)):
        raise InputError(f"{found}, but --size is {given.size}")
    height, width = height or given.size, width or given.size
    if not height or not width:
        raise InputError(f"{found}: its size is free, expected --size, such as --size 224")
    if max(height, width) > MAX_SIDE:
        raise InputError(f"{found}, expected at most {MAX_SIDE} pixels per side")
    return channels, height, width


def _input_spec(shape: tuple[int, int, int], given: ForeignInput) -> InputSpec:
    if bool(given.mean) != bool(given.std):
        raise InputError("expected both --mean and --std, or neither (the model takes pixels 0..1)")
    for name, values in (("--mean", given.mean), ("--std", given.std)):
        if len(values) not in (0, 1, shape[0]):
            raise InputError(f"{name} has {len(values)} values, expected 1 or {shape[0]}, one per channel")
    try:
        return InputSpec(shape, given.mean or (0.0,), given.std or (1.0,), resize=given.resize)  # type: ignore[arg-type]
    except ValueError as error:
        raise InputError(f"{error}") from error


def _require_output(model: onnx.ModelProto) -> None:
    outputs = list(model.graph.output)
    if len(outputs) != 1:
        raise InputError(
            f"{len(outputs)} outputs ({named(outputs)}), expected one with the features: export the model without the others"
        )
    kind = outputs[0].type.tensor_type
    found = f"output {outputs[0].name!r} is {typed(outputs[0])}"
    if kind.elem_type != TensorProto.FLOAT:
        hint = "; remove the last step, such as ArgMax" if kind.elem_type in (6, 7) else ""
        raise InputError(f"{found}, expected float features [N, d]{hint}")
    if kind.HasField("shape"):
        _require_vector([dim.dim_value for dim in kind.shape.dim], found)


def _require_vector(dims: Sequence[int], found: str) -> None:
    """Features [N, d], also as [N, d, 1, 1]; 0 is an unknown size."""
    if len(dims) < 2 or any(size > 1 for size in dims[2:]):
        raise InputError(f"{found}, expected features [N, d] or [N, d, 1, 1]; pool over the other dimensions")


def _with_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    found = opset(model)
    if OLDEST_OPSET <= found <= OPSET:
        return model
    try:
        return version_converter.convert_version(model, OPSET)
    except Exception as error:  # a C++ error of any type
        raise InputError(
            f"opset {found}, expected {OLDEST_OPSET} to {OPSET}, and it cannot be converted ({brief(error)}); export it with"
            f" opset_version={OPSET}"
        ) from error


def _with_free_batch(model: onnx.ModelProto, shape: tuple[int, int, int]) -> onnx.ModelProto:
    """Declare input and output for any number of images; whether that is true is checked with images."""
    freed = onnx.ModelProto()
    freed.CopyFrom(model)
    dims = inputs(freed)[0].type.tensor_type.shape.dim
    del dims[:]
    dims.add().dim_param = ROWS
    for side in shape:
        dims.add().dim_value = side
    del freed.graph.value_info[:]
    freed.graph.output[0].type.tensor_type.ClearField("shape")
    try:
        inferred = shape_inference.infer_shapes(freed, strict_mode=True, data_prop=True)
    except Exception as error:
        raise InputError(
            f"shapes do not fit together for a batch of any size ({brief(error)}); {HOW}"
        ) from error
    kind = inferred.graph.output[0].type.tensor_type
    if not kind.HasField("shape"):
        raise InputError(f"output {freed.graph.output[0].name!r} has no fixed rank, expected features [N, d]")
    found = f"output {freed.graph.output[0].name!r} is {typed(inferred.graph.output[0])}"
    _require_vector([dim.dim_value for dim in kind.shape.dim], found)
    if kind.shape.dim[0].dim_value:
        raise InputError(
            f"{found} for any number of images, expected [N, d]: the batch is fixed inside the model; {HOW}"
        )
    freed.graph.output[0].CopyFrom(inferred.graph.output[0])
    return freed


def _with_ends(model: onnx.ModelProto, given: ForeignInput, shape: tuple[int, int, int]) -> onnx.ModelProto:
    """The model between "image" and "features", with mean and std before it."""
    graph, channels = renamed(model, {name: f"model/{name}" for name in OURS}).graph, shape[0]
    first, last = inputs(model)[0].name, model.graph.output[0].name
    nodes, constants = [], []
    if given.mean:
        for name, values in (("mean", given.mean), ("std", given.std)):
            array = np.broadcast_to(np.array(values, np.float32), (channels,)).reshape(1, channels, 1, 1)
            constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        nodes.append(helper.make_node("Sub", [IMAGE, "mean"], ["centred"]))
        nodes.append(helper.make_node("Div", ["centred", "std"], [first]))
    else:
        nodes.append(helper.make_node("Identity", [IMAGE], [first]))
    ends = [helper.make_node("Flatten", [last], [FEATURES], axis=1)]
    whole = helper.make_model(
        helper.make_graph(
            [*nodes, *graph.node, *ends],
            "extractor",
            [helper.make_tensor_value_info(IMAGE, TensorProto.FLOAT, [ROWS, *shape])],
            [helper.make_tensor_value_info(FEATURES, TensorProto.FLOAT, [ROWS, None])],
            [*constants, *graph.initializer],
            sparse_initializer=list(graph.sparse_initializer),
        ),
        opset_imports=[helper.make_opsetid("", opset(model))],
        ir_version=model.ir_version,
    )
    return whole


def _check(payload: bytes) -> None:
    try:
        onnx.checker.check_model(payload, full_check=True)
    except Exception as error:
        raise InputError(f"not a valid ONNX model ({brief(one_line(error))})") from error
    try:
        Session(payload)
    except Exception as error:
        raise InputError(f"does not load in onnxruntime ({brief(one_line(error))})") from error


def _require_features(payload: bytes, input: InputSpec) -> int:
    """The number of features. They are finite, differ between images, and do not depend on the other images of a batch."""
    images = _images(input)
    together = _features(payload, images)
    if together.ndim != 2 or len(together) != len(images):
        raise InputError(
            f"output {list(together.shape)} for {len(images)} images, expected [{len(images)}, d]; {HOW}"
        )
    if bad := int((~np.isfinite(together)).sum()):
        raise InputError(f"{bad} of {together.size} features of random images are not finite")
    if not np.ptp(together, axis=0).any():
        raise InputError("the same features for all images, expected features that depend on the image")
    alone = np.concatenate([_features(payload, image[None]) for image in images])
    if (difference := _difference(together, alone)) > PARITY:
        raise InputError(
            f"features of one image differ by {difference:.1e} between batches of 1 and {len(images)}, at most {PARITY:.0e};"
            f" {HOW}"
        )
    return int(together.shape[1])


def _require_unchanged(original: bytes, payload: bytes, given: ForeignInput, input: InputSpec) -> None:
    """The converted model gives the features of the original."""
    images = _images(input)
    raw = images
    if given.mean:
        mean, std = (np.array(values, np.float32).reshape(-1, 1, 1) for values in (given.mean, given.std))
        raw = (images - mean) / std
    before = np.concatenate([_features(original, image[None]).reshape(1, -1) for image in raw])
    if (difference := _difference(before, _features(payload, images))) > PARITY:
        raise InputError(
            f"converted to opset {OPSET}, its features differ by {difference:.1e}, at most {PARITY:.0e}; export it with"
            f" opset_version={OPSET}"
        )


def _require_reference(payload: bytes, reference: Reference) -> None:
    found = _features(payload, reference.x)
    if found.shape != reference.features.shape:
        raise InputError(f"features {list(found.shape)}, the reference has {list(reference.features.shape)}")
    if (difference := _difference(reference.features, found)) > REFERENCE_PARITY:
        raise InputError(
            f"features differ by {difference:.1e} from the reference, at most {REFERENCE_PARITY:.0e} of the largest;"
            " expected the same input: --mean, --std"
        )


def _features(payload: bytes, images: NDArray[np.float32]) -> NDArray[np.float32]:
    try:
        return Session(payload).run(images)
    except Exception as error:  # onnxruntime's errors share no base class
        reason = one_line(error)
        if any(words in reason for words in OUT_OF_MEMORY):
            raise InputError("takes too much memory, expected a model for small devices") from error
        if len(images) > 1:
            _features(payload, images[:1])  # does it fail on one image, too?
            raise InputError(
                f"fails on {len(images)} images, but not on one ({reason[-MAX_REASON:]}); {HOW}"
            ) from error
        raise InputError(f"fails on an image {list(images.shape)} ({reason[-MAX_REASON:]})") from error


def _images(input: InputSpec) -> NDArray[np.float32]:
    """Black, white and random images."""
    rng = np.random.default_rng(RNG_SEED)
    noise = rng.random((2, *input.shape), np.float32)
    return np.concatenate(
        [np.zeros((1, *input.shape), np.float32), np.ones((1, *input.shape), np.float32), noise]
    )


def _difference(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    if expected.shape != found.shape:
        return float("inf")
    largest = max(float(np.abs(expected).max()), 1e-12)
    difference = float(np.abs(expected - found).max()) / largest
    return difference if np.isfinite(difference) else float("inf")
