"""Inspect ONNX graphs: versions, types, all weights and subgraphs. No torch and no onnxruntime."""

from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import TensorProto, helper

from edge_fl.errors import brief

STANDARD = ("", "ai.onnx")
"""Domains of the standard operators."""

TYPE_NAMES = {number: name.lower() for name, number in TensorProto.DataType.items()}


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


def item_bytes(kind: int) -> int:
    """Bytes of one value of a tensor type."""
    return int(helper.tensor_dtype_to_np_dtype(kind).itemsize)


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
