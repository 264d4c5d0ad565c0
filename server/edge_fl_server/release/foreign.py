"""Inspect ONNX graphs: versions, types, all weights and subgraphs. No torch and no onnxruntime."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from msgspec import Struct, structs
from numpy.typing import NDArray
from onnx import TensorProto, helper, inliner, numpy_helper, shape_inference, version_converter

from edge_fl.blob import MAX_BLOB_BYTES
from edge_fl.errors import InputError, brief
from edge_fl.files.paths import text
from edge_fl.inputs import MAX_CHANNELS, InputSpec
from edge_fl.modalities import ABOUT, noise
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

    `mean` and `std` per channel are applied to samples before the model (empty: it takes pixels 0..1, or other samples as they are); `size`
    is needed where the model declares none. `input`: of samples that are not pictures; its mean and std are not applied.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    size: int = 0
    resize: str = "crop"
    input: InputSpec | None = None


class Converted(NamedTuple):
    """An extractor made from a foreign model."""

    onnx: bytes
    feature_dim: int
    input: InputSpec
    opset: int
    ir: int


class Reference(NamedTuple):
    """An extractor's input x float32 [N, ...] and the features [N, d] that the model gave where it was trained."""

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
    input = _input(model, given)
    _require_output(model)
    original = model.SerializeToString()
    model = _with_opset(model)
    model.ir_version = min(model.ir_version, IR_VERSION)
    model = _with_free_batch(model, input)
    payload = _with_ends(model, given, input).SerializeToString()
    _check(payload)
    feature_dim = _require_features(payload, input)
    _require_unchanged(original, payload, given, input)
    if reference:
        _require_reference(payload, reference, ABOUT[input.kind].sample)
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


def _input(model: onnx.ModelProto, given: ForeignInput) -> InputSpec:
    """What the only input takes, with mean and std that are applied before the model."""
    if len(values := inputs(model)) != 1:
        raise InputError(f"{len(values)} inputs ({named(values)}), expected one sample")
    kind = values[0].type.tensor_type
    found = f"input {values[0].name!r} is {typed(values[0])}"
    dims = [dim.dim_value for dim in kind.shape.dim[1:]] if kind.HasField("shape") else []
    shape = given.input.shape if given.input else _picture(dims, found, given.size)
    of_shape = len(dims) == len(shape) and all(a in (0, b) for a, b in zip(dims, shape, strict=True))
    if kind.elem_type != TensorProto.FLOAT or not of_shape:
        raise InputError(f"{found}, expected float [N, {', '.join(map(str, shape))}]")
    if bool(given.mean) != bool(given.std):
        raise InputError("expected both --mean and --std, or neither (the model takes pixels 0..1)")
    try:
        own = given.input or InputSpec(shape, (0.0,), (1.0,), resize=given.resize)  # type: ignore[arg-type]
        input = structs.replace(own, mean=given.mean or own.mean, std=given.std or own.std)
    except ValueError as error:
        raise InputError(f"{error}") from error
    for name, numbers in (("--mean", given.mean), ("--std", given.std)):
        if len(numbers) not in (0, 1, own.channels):
            raise InputError(
                f"{name} has {len(numbers)} values, expected 1 or {own.channels}, one per channel"
            )
    return input


def _picture(dims: Sequence[int], found: str, size: int) -> tuple[int, ...]:
    """Channels, height and width."""
    if len(dims) != 3:
        raise InputError(f"{found}, expected [N, C, H, W], or --input with samples that are not pictures")
    if not 1 <= dims[0] <= MAX_CHANNELS:
        hint = " (it has channels last: export it with channels first)" if dims[2] in (1, 3) else ""
        raise InputError(f"{found}, expected [N, C, H, W] with 1 or 3 channels{hint}")
    if size and any(side not in (0, size) for side in dims[1:]):
        raise InputError(f"{found}, but --size is {size}")
    if not all(shape := (dims[0], *(side or size for side in dims[1:]))):
        raise InputError(f"{found}: its size is free, expected --size, such as --size 224")
    return shape


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


def _with_free_batch(model: onnx.ModelProto, input: InputSpec) -> onnx.ModelProto:
    """Declare input and output for any number of samples; whether that is true is checked with samples."""
    freed = onnx.ModelProto()
    freed.CopyFrom(model)
    dims = inputs(freed)[0].type.tensor_type.shape.dim
    del dims[:]
    dims.add().dim_param = ROWS
    for side in input.shape:
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
            f"{found} for any number of samples, expected [N, d]: the batch is fixed inside the model; {HOW}"
        )
    freed.graph.output[0].CopyFrom(inferred.graph.output[0])
    return freed


def _with_ends(model: onnx.ModelProto, given: ForeignInput, input: InputSpec) -> onnx.ModelProto:
    """The model between "image" and "features", with mean and std before it."""
    graph = renamed(model, {name: f"model/{name}" for name in OURS}).graph
    first, last = inputs(model)[0].name, model.graph.output[0].name
    nodes, constants = [], []
    if given.mean:
        for name, values in (("mean", given.mean), ("std", given.std)):
            constants.append(numpy_helper.from_array(_per_channel(values, input)[None], name))
        nodes.append(helper.make_node("Sub", [IMAGE, "mean"], ["centred"]))
        nodes.append(helper.make_node("Div", ["centred", "std"], [first]))
    else:
        nodes.append(helper.make_node("Identity", [IMAGE], [first]))
    ends = [helper.make_node("Flatten", [last], [FEATURES], axis=1)]
    return helper.make_model(
        helper.make_graph(
            [*nodes, *graph.node, *ends],
            "extractor",
            [helper.make_tensor_value_info(IMAGE, TensorProto.FLOAT, [ROWS, *input.shape])],
            [helper.make_tensor_value_info(FEATURES, TensorProto.FLOAT, [ROWS, None])],
            [*constants, *graph.initializer],
            sparse_initializer=list(graph.sparse_initializer),
        ),
        opset_imports=[helper.make_opsetid("", opset(model))],
        ir_version=model.ir_version,
    )


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
    """The number of features. They are finite, differ between samples, and do not depend on the other samples of a batch."""
    x, one, many = _samples(input), ABOUT[input.kind].sample, ABOUT[input.kind].samples
    together = _features(payload, x, one)
    if together.ndim != 2 or len(together) != len(x):
        raise InputError(f"output {list(together.shape)} for {len(x)} {many}, expected [{len(x)}, d]; {HOW}")
    if bad := int((~np.isfinite(together)).sum()):
        raise InputError(f"{bad} of {together.size} features of {many} are not finite")
    if not np.ptp(together, axis=0).any():
        raise InputError(f"the same features for all {many}, expected features that depend on the {one}")
    alone = np.concatenate([_features(payload, each[None], one) for each in x])
    if (difference := _difference(together, alone)) > PARITY:
        raise InputError(
            f"features of one {one} differ by {difference:.1e} between batches of 1 and {len(x)}, at most {PARITY:.0e}; {HOW}"
        )
    return int(together.shape[1])


def _require_unchanged(original: bytes, payload: bytes, given: ForeignInput, input: InputSpec) -> None:
    """The converted model gives the features of the original."""
    x = raw = _samples(input)
    if given.mean:
        raw = (x - _per_channel(given.mean, input)) / _per_channel(given.std, input)
    one = ABOUT[input.kind].sample
    before = np.concatenate([_features(original, each[None], one).reshape(1, -1) for each in raw])
    if (difference := _difference(before, _features(payload, x, one))) > PARITY:
        raise InputError(
            f"converted to opset {OPSET}, its features differ by {difference:.1e}, at most {PARITY:.0e}; export it with"
            f" opset_version={OPSET}"
        )


def _require_reference(payload: bytes, reference: Reference, sample: str) -> None:
    found = _features(payload, reference.x, sample)
    if found.shape != reference.features.shape:
        raise InputError(f"features {list(found.shape)}, the reference has {list(reference.features.shape)}")
    if (difference := _difference(reference.features, found)) > REFERENCE_PARITY:
        raise InputError(
            f"features differ by {difference:.1e} from the reference, at most {REFERENCE_PARITY:.0e} of the largest;"
            " expected the same input: --mean, --std"
        )


def _features(payload: bytes, x: NDArray[np.float32], sample: str) -> NDArray[np.float32]:
    try:
        return Session(payload).run(x)
    except Exception as error:  # onnxruntime's errors share no base class
        reason = one_line(error)
        if any(words in reason for words in OUT_OF_MEMORY):
            raise InputError("takes too much memory, expected a model for small devices") from error
        if len(x) > 1:
            _features(payload, x[:1], sample)  # does it fail on one alone, too?
            raise InputError(
                f"fails on {len(x)} {sample}s, but not on one ({reason[-MAX_REASON:]}); {HOW}"
            ) from error
        raise InputError(f"fails on a {sample} {list(x.shape)} ({reason[-MAX_REASON:]})") from error


def _samples(input: InputSpec) -> NDArray[np.float32]:
    """The lowest values, the highest, and two samples of random ones: of pictures black, white and noise."""
    count = int(np.prod(input.shape))
    levels = bytes(count) + b"\xff" * count + np.random.default_rng(RNG_SEED).bytes(2 * count)
    return noise(np.frombuffer(levels, np.ubyte).reshape(-1, *input.shape), input)


def _per_channel(values: Sequence[float], input: InputSpec) -> NDArray[np.float32]:
    """Numbers per channel, or one for all, as they are applied to one sample."""
    one = np.broadcast_to(np.array(values, np.float32), (input.channels,))
    return np.ascontiguousarray(one.reshape(-1, *(1 for _ in input.shape[1:])))


def _difference(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    if expected.shape != found.shape:
        return float("inf")
    largest = max(float(np.abs(expected).max()), 1e-12)
    difference = float(np.abs(expected - found).max()) / largest
    return difference if np.isfinite(difference) else float("inf")
