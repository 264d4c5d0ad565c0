"""Compute features of samples with onnxruntime, on the board's cores and in little memory.

Features do not depend on the batch, so cached and new ones can be mixed. With EfficientNet-Lite0 at 224 pixels a batch of 16 samples takes
twice the time per sample and 248 instead of 104 MB, because activations leave the processor's cache; onnxruntime's memory arena saves time
and, for one sample, memory.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.files.npz import Array
from edge_fl.files.paths import is_utf8
from edge_fl.modalities import ABOUT, scaled
from edge_fl.release.manifests import Manifest
from edge_fl.release.onnx_form import OLDEST_OPSET, SESSION
from edge_fl_devices.features.onnx_runtime import Runtime, require_runnable

MAX_BATCH = 64
BATCH_VALUES = 2**18  # values per batch: 64 pictures up to 3x36x36, 9 at 3x96x96, one at 3x224x224
OPSETS = range(OLDEST_OPSET, 100)  # the upper end is beyond any runtime
IDENTITY = b'\x08\x07:7\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01g' + (
    b"Z\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x02\x10"
)
"""The ONNX model y = x without its last byte, the opset. A literal, because a device has no onnx package."""

UNSUPPORTED = ("opset", "ir version", "not_implemented", "no op registered", "not a registered function")
"""Words in onnxruntime's errors for a valid graph that is too new for it."""

Features = NDArray[np.float32]


@cache
def runtime() -> Runtime:
    """Return the version of this process's onnxruntime and its highest opset, found by loading a small model."""
    known = bisect(OPSETS, 0, key=lambda opset: not _loads(opset))  # every opset up to the newest one loads
    return Runtime(str(onnxruntime.__version__), OPSETS[known - 1] if known else 0)


class Extractor:
    """A loaded extractor; it computes on `threads` threads (0: one for each core that the process may use).

    Raises ArtefactError: "unsupported_opset", or "canary_failed" for a graph that does not match its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest, threads: int = 0) -> None:
        require_runnable(manifest, runtime())
        self.sha256 = manifest.extractor.sha256
        self._dim, self._taken, self._shape = manifest.feature_dim, manifest.input, manifest.input.shape
        self._session = self._open(path, threads or usable_cores())
        self._check_signature()

    def features(self, x: Array) -> Features:
        """Return features [N, d] of samples [N, ...], computed in small batches."""
        if x.shape[1:] != self._shape or x.dtype != self._taken.dtype:
            raise ArtefactError(
                f"{ABOUT[self._taken.kind].samples} {x.dtype}{list(x.shape)}, expected {self._taken.dtype}"
                f" [N, {', '.join(map(str, self._shape))}]"
            )
        z = np.empty((len(x), self._dim), np.float32)
        for start in range(0, len(x), self.batch_size):
            batch = slice(start, start + self.batch_size)
            z[batch] = self.run(scaled(x[batch]))
        return z

    @property
    def batch_size(self) -> int:
        """Samples per run."""
        return max(1, min(MAX_BATCH, BATCH_VALUES // int(np.prod(self._shape))))

    def run(self, x: NDArray[np.float32]) -> Features:
        """Return features [n, d] of one batch of `scaled` samples. Raises ArtefactError unless the result is finite [n, d]."""
        try:
            (z,) = self._session.run([self._output], {self._input: x})
        except Exception as error:  # onnxruntime's errors share no base class
            raise self._error(f"failed on {list(x.shape)}: {_reason(error)}") from error
        if not isinstance(z, np.ndarray) or z.shape != (len(x), self._dim):
            raise self._error(f"gave {np.shape(z)}, expected {(len(x), self._dim)}")
        if z.dtype != np.float32 or not np.isfinite(z).all():
            raise self._error(
                f"gave {z.dtype} with {int((~np.isfinite(z)).sum())} values that are not finite"
            )
        return z

    def _open(self, path: Path, threads: int) -> onnxruntime.InferenceSession:
        try:
            # onnxruntime takes a path in UTF-8, or the whole model
            session = _session(os.fspath(path) if is_utf8(path) else path.read_bytes(), threads)
        except Exception as error:  # as above
            too_new = any(words in str(error).lower() for words in UNSUPPORTED)
            why = Failure.UNSUPPORTED_OPSET if too_new else Failure.CANARY_FAILED
            raise self._error(f"does not load: {_reason(error)}", why) from error
        with suppress(OSError, AttributeError):  # glibc only: return what loading freed to the system, 25 MB
            ctypes.CDLL(None).malloc_trim(0)
        return session

    def _check_signature(self) -> None:
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if len(inputs) != 1 or len(outputs) != 1:
            raise self._error(f"has {len(inputs)} inputs and {len(outputs)} outputs, expected one of each")
        self._input, self._output = inputs[0].name, outputs[0].name
        for node, shape in ((inputs[0], self._shape), (outputs[0], (self._dim,))):
            if node.type != "tensor(float)" or not _fits(node.shape, shape):
                expected = f"tensor(float) [N, {', '.join(map(str, shape))}]"
                raise self._error(f"declares {node.name} as {node.type} {node.shape}, expected {expected}")

    def _error(self, reason: str, why: Failure = Failure.CANARY_FAILED) -> ArtefactError:
        return ArtefactError(f"extractor {self.sha256[:8]} {reason}", why)


def usable_cores() -> int:
    """Number of cores on which this process may run."""
    return len(os.sched_getaffinity(0))


def _session(model: str | bytes, threads: int = 1) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    for key, value in SESSION.items():
        options.add_session_config_entry(key, value)
    options.log_severity_level = 4  # errors are raised; do not log them as well
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _fits(declared: list[object], expected: tuple[int, ...]) -> bool:
    """Whether a declared shape is [any number of rows, *expected]; a symbolic size matches any number."""
    if len(declared) != len(expected) + 1:
        return False
    sizes = zip(declared[1:], expected, strict=True)
    return all(not isinstance(size, int) or size == wanted for size, wanted in sizes)


def _reason(error: Exception) -> str:
    """The end of the first line of an onnxruntime error; a C++ signature precedes the reason."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if len(line) <= 160 else f"...{line[-160:]}"


def _loads(opset: int) -> bool:
    try:
        _session(IDENTITY + bytes([opset]))
    except Exception:  # onnxruntime's errors share no base class
        return False
    return True
