"""An extractor in 8-bit whole numbers beside the one in 32-bit floats: static QDQ per channel by onnxruntime, calibrated, and measured.

Weights and activations are rounded to 256 steps whose size follows from images that the server has: from the extremes of each batch,
averaged, because the one extreme of all of them makes every step too coarse for the many. How far features turn (their cosine)
and what that costs heads in accuracy is measured on clients' validation images before anybody gets it: what misses the gate is not
published. Dynamic quantisation is not offered, because it is slower than floats on convolutions.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from edge_fl import heads
from edge_fl.config import QuantiseConfig
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import ArtefactError
from edge_fl.release.manifest import scale
from edge_fl.seeds import generator
from server.release.export import QuantisedExtractor, Quantiser
from server.release.onnx_session import Session

INPUT = "image"
BATCH = 16
OPERATORS = ["Conv", "MatMul", "Gemm", "Add", "MaxPool", "AveragePool", "GlobalAveragePool", "Relu", "Clip"]


@dataclass(frozen=True)
class Figures:
    """int8 against fp32: mean cosine of features, accuracy of heads on each (mean over clients), bytes, milliseconds an image here."""

    cosine: float
    accuracy: float
    accuracy_int8: float
    bytes: int
    bytes_int8: int
    latency_ms: float
    latency_int8_ms: float

    @property
    def loss(self) -> float:
        return self.accuracy - self.accuracy_int8

    def __str__(self) -> str:
        return (
            f"{self.bytes_int8 / 1024:.0f} instead of {self.bytes / 1024:.0f} KiB, {self.latency_int8_ms:.2f} instead of"
            f" {self.latency_ms:.2f} ms an image, cosine {self.cosine:.4f}, accuracy {100 * self.accuracy_int8:.1f} instead of"
            f" {100 * self.accuracy:.1f} %"
        )


class _Images(CalibrationDataReader):
    """Calibration images, a few at a time."""

    def __init__(self, images: NDArray[np.float32]) -> None:
        self._batches = iter([images[start : start + BATCH] for start in range(0, len(images), BATCH)])

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        batch = next(self._batches, None)
        return None if batch is None else {INPUT: batch}


def quantise(payload: bytes, images: NDArray[np.uint8]) -> bytes:
    """The int8 version of an ONNX extractor, calibrated on images [N, C, H, W]. Raises ArtefactError."""
    with tempfile.TemporaryDirectory(prefix="edge-fl-int8-") as folder, _quiet():
        whole, prepared, small = (Path(folder, name) for name in ("fp32.onnx", "prepared.onnx", "int8.onnx"))
        whole.write_bytes(payload)
        try:
            quant_pre_process(whole, prepared, skip_symbolic_shape=True)
            quantize_static(
                prepared,
                small,
                _Images(scale(images)),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=OPERATORS,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                reduce_range=False,
                extra_options={"CalibMovingAverage": True},
            )
        except Exception as error:  # onnxruntime's tools raise what they like
            raise ArtefactError(
                f"int8: {type(error).__name__}: {str(error)[:200]}", consequence="not released"
            ) from error
        return small.read_bytes()


def sample(clients: Sequence[ClientData], count: int, seed: int) -> NDArray[np.uint8]:
    """So many training images, drawn evenly from the clients, to calibrate on."""
    each = -(-count // max(len(clients), 1))
    rng = generator(seed, "release.calibration")
    return np.concatenate([c.train.x[rng.permutation(len(c.train))[:each]] for c in clients])[:count]


def compare(
    payload: bytes, small: bytes, clients: Sequence[ClientData], classes: int, unit_norm: bool
) -> Figures:
    """Both extractors on clients' data: heads are fitted on training images, judged on validation (or test) images."""
    whole, int8 = Session(payload), Session(small)
    cosines: list[float] = []
    right: list[tuple[float, float]] = []
    for client in clients:
        held_out = client.validation if len(client.validation) else client.test
        if not len(held_out) or not len(client.train):
            continue
        pairs = [
            [session.features(samples.x) for samples in (client.train, held_out)] for session in (whole, int8)
        ]
        cosines.append(_cosine(pairs[0][1], pairs[1][1]))
        as_floats, as_int8 = (_accuracy(z, client.train, held_out, classes, unit_norm) for z in pairs)
        right.append((as_floats, as_int8))
    if not right:
        raise ArtefactError("int8: no client has held-out images to judge it on", consequence="not released")
    accuracy, accuracy_int8 = np.mean(right, axis=0)
    image = clients[0].train.x[:1]
    return Figures(
        float(np.mean(cosines)),
        float(accuracy),
        float(accuracy_int8),
        len(payload),
        len(small),
        whole.latency_ms(image),
        int8.latency_ms(image),
    )


def flaw(figures: Figures, gate: QuantiseConfig) -> str:
    """Why an int8 extractor may not be published; empty when it may."""
    if not figures.cosine >= gate.min_cosine:
        return f"cosine {figures.cosine:.4f}, at least {gate.min_cosine:g}"
    if not figures.loss <= gate.max_loss:
        return f"{100 * figures.loss:.1f} points of accuracy lost, at most {100 * gate.max_loss:g}"
    return ""


def quantiser(
    clients: Sequence[ClientData], gate: QuantiseConfig, seed: int, tell: Callable[[str], None]
) -> Quantiser:
    """What makes int8 variants calibrated and judged on these clients' data, and says how each came out."""

    def make(onnx: bytes, classes: int, unit_norm: bool) -> QuantisedExtractor | None:
        int8 = quantise(onnx, sample(clients, gate.images, seed))
        figures = compare(onnx, int8, clients, classes, unit_norm)
        if why := flaw(figures, gate):
            tell(f"int8 is not published: {why}")
            return None
        tell(f"int8: {figures}")
        return QuantisedExtractor(int8, figures.cosine, figures.loss)

    return make


def _cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(np.mean((a * b).sum(axis=1) / np.maximum(norms, 1e-12)))


def _accuracy(
    z: Sequence[NDArray[np.float32]], train: Samples, held_out: Samples, classes: int, unit_norm: bool
) -> float:
    head = heads.fit("nearest", z[0], train.y, classes, unit_norm=unit_norm)
    return float((head.predict(z[1]) == held_out.y).mean())


@contextmanager
def _quiet() -> Iterator[None]:
    """The tools log through the root logger what only their authors need."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
