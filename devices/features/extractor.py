"""From images to features with onnxruntime alone, on one thread and in little memory."""

from __future__ import annotations

from bisect import bisect
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from devices.features.onnx_runtime import Runtime, require_runnable
from edge_fl.errors import ArtefactError
from edge_fl.release.manifest import Manifest, scale

MAX_BATCH = 64
# pixel values per batch: 64 images up to 3x73x73, 6 at 3x224x224, where activations are what counts
BATCH_VALUES = 2**20
OPSETS = range(7, 100)  # what onnxruntime reads begins at 7; no runtime knows the last

UNSUPPORTED = ("opset", "ir version", "not_implemented", "no op registered", "not a registered function")
"""How onnxruntime says that a graph is well formed but newer than itself."""

Features = NDArray[np.float32]
Images = NDArray[np.uint8]


@cache
def runtime() -> Runtime:
    """The runtime of this process."""
    known = bisect(OPSETS, 0, key=lambda opset: not _loads(opset))  # it loads every opset up to its newest
    return Runtime(str(onnxruntime.__version__), OPSETS[known - 1] if known else 0)


class Extractor:
    """An extractor ready to run.

    Raises ArtefactError: "unsupported_opset", or "canary_failed" for a graph that is not what its manifest says.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        require_runnable(manifest, runtime())
        self.sha256 = manifest.extractor.sha256
        self._dim, self._shape = manifest.feature_dim, manifest.input.shape
        self._session = self._open(path)
        self._check_signature()

    def features(self, x: Images) -> Features:
        """Features [N, d] of images [N, C, H, W], in small batches."""
        if x.shape[1:] != self._shape or x.dtype != np.uint8:
            raise ArtefactError(
                f"images {x.dtype}{list(x.shape)}, expected uint8 [N, {', '.join(map(str, self._shape))}]"
            )
        found = np.empty((len(x), self._dim), np.float32)
        for start in range(0, len(x), self.batch_size):
            batch = slice(start, start + self.batch_size)
            found[batch] = self.run(scale(x[batch]))
        return found

    @property
    def batch_size(self) -> int:
        """Images per run."""
        return max(1, min(MAX_BATCH, BATCH_VALUES // int(np.prod(self._shape))))

    def run(self, images: NDArray[np.float32]) -> Features:
        """Features [n, d] of one batch, pixels in 0..1. Raises ArtefactError when the graph fails or gives anything but finite [n, d]."""
        try:
            (found,) = self._session.run([self._output], {self._input: images})
        except Exception as error:  # onnxruntime's errors share no base class
            raise self._refused(f"failed on {list(images.shape)}: {_first_line(error)}") from error
        if not isinstance(found, np.ndarray) or found.shape != (len(images), self._dim):
            raise self._refused(f"gave {np.shape(found)}, expected {(len(images), self._dim)}")
        if found.dtype != np.float32 or not np.isfinite(found).all():
            raise self._refused(
                f"gave {found.dtype} with {int((~np.isfinite(found)).sum())} values that are not finite"
            )
        return found

    def _open(self, path: Path) -> onnxruntime.InferenceSession:
        try:
            return onnxruntime.InferenceSession(str(path), _options(), providers=["CPUExecutionProvider"])
        except Exception as error:  # as above
            newer = any(words in str(error).lower() for words in UNSUPPORTED)
            why = "unsupported_opset" if newer else "canary_failed"
            raise self._refused(f"does not load: {_first_line(error)}", why) from error

    def _check_signature(self) -> None:
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1:
            raise self._refused(f"has {len(inputs)} inputs and {len(outputs)} outputs, expected one of each")
        self._input, self._output = inputs[0].name, outputs[0].name
        for node, shape in ((inputs[0], self._shape), (outputs[0], (self._dim,))):
            if node.type != "tensor(float)" or not _fits(node.shape, shape):
                expected = f"tensor(float) [N, {', '.join(map(str, shape))}]"
                raise self._refused(f"declares {node.name} as {node.type} {node.shape}, expected {expected}")

    def _refused(self, what: str, why: str = "canary_failed") -> ArtefactError:
        return ArtefactError(f"extractor {self.sha256[:8]} {what}", why)


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.enable_cpu_mem_arena = False  # memory goes back to the system between batches
    options.log_severity_level = 4  # what goes wrong is raised, in our words
    return options


def _fits(declared: list[object], expected: tuple[int, ...]) -> bool:
    """Whether a declared shape is [any number of rows, *expected]; a name stands for any number."""
    if len(declared) != len(expected) + 1:
        return False
    return all(
        not isinstance(found, int) or found == size
        for found, size in zip(declared[1:], expected, strict=True)
    )


def _first_line(error: Exception) -> str:
    """What onnxruntime means stands at the end of its first line, behind a C++ signature."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if len(line) <= 160 else f"...{line[-160:]}"


def _loads(opset: int) -> bool:
    try:
        onnxruntime.InferenceSession(_identity(opset), _options(), providers=["CPUExecutionProvider"])
    except Exception:  # any refusal means no
        return False
    return True


def _identity(opset: int) -> bytes:
    """The smallest ONNX model, y = x, in protobuf: written by hand because a device has no onnx package."""

    def field(number: int, value: int | bytes) -> bytes:
        if isinstance(value, int):
            return bytes([number << 3, value])
        return bytes([number << 3 | 2, len(value)]) + value

    def tensor(name: bytes) -> bytes:
        shape = field(2, field(1, field(1, 1)))
        return field(1, name) + field(2, field(1, field(1, 1) + shape))

    node = field(1, b"x") + field(2, b"y") + field(4, b"Identity")
    graph = field(1, node) + field(2, b"g") + field(11, tensor(b"x")) + field(12, tensor(b"y"))
    return field(1, 7) + field(7, graph) + field(8, field(2, opset))
