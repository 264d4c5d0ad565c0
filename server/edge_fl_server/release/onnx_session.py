"""Run an ONNX extractor in this process, on one thread as on a device: for checks before a release."""

import logging
import timeit
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edge_fl.files.npz import Array
from edge_fl.modalities import scaled
from edge_fl.release.onnx_form import SESSION

BATCH = 64
TRIES = 5


@contextmanager
def quiet(logger: str | None = None) -> Iterator[None]:
    """Silence the warnings of a logger, by default of the root logger, to which the tools of ONNX write."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


class Session:
    """One loaded extractor."""

    def __init__(self, payload: bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        for key, value in SESSION.items():
            options.add_session_config_entry(key, value)
        self._session = onnxruntime.InferenceSession(payload, options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name

    def run(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features of an extractor's input x [N, ...], samples as `modalities.scaled` returns them."""
        features: NDArray[np.float32] = self._session.run(None, {self._input: x})[0]
        return features

    def features(self, x: Array) -> NDArray[np.float32]:
        """Features of samples x [N, ...] as they are stored, in batches."""
        starts = range(0, len(x), BATCH)
        return np.concatenate([self.run(scaled(x[start : start + BATCH])) for start in starts])

    def latency_ms(self, sample: Array) -> float:
        """The shortest of TRIES measurements for one sample [1, ...]."""
        x = scaled(sample)
        return 1000 * min(timeit.repeat(lambda: self.run(x), number=1, repeat=TRIES))
