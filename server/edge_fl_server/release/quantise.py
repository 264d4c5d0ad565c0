"""Quantise an extractor to int8: static, per channel, QDQ format (onnxruntime), calibrated and measured.

Weights and activations are rounded to 256 steps. Their size is calibrated on samples of the server, from the averaged extremes of batches:
the extremes of all samples would make the steps too coarse. The cosine between int8 and fp32 features and the loss of head accuracy are
measured on clients' validation samples; a variant that misses the gate is not published. Dynamic quantisation is not offered: it is slower
than fp32 on convolutions.

In networks with attention, the products of two activations and the sums of the residual stream stay fp32: their values have outliers, next
to which 256 steps leave nothing of the rest (DINOv2: cosine 0.84 with them, 1.00 without). Releases without a run are calibrated on
files in a folder per class; without any, on synthetic samples (`edge_fl.modalities`).
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from edge_fl import heads, modalities
from edge_fl.console import units
from edge_fl.data.samples import Array, ClientData, Samples
from edge_fl.errors import ArtefactError, DataError
from edge_fl.files.paths import composed, text
from edge_fl.inputs import InputSpec
from edge_fl.modalities import ABOUT, scaled
from edge_fl.release.onnx_form import IMAGE
from edge_fl.seeds import generator
from edge_fl_server import sample_folders
from edge_fl_server.recipes.recipe import QuantiseConfig
from edge_fl_server.release.export import QuantisedExtractor, Quantiser
from edge_fl_server.release.onnx_session import Session, quiet

BATCH = 16
SYNTHETIC = 32  # samples
OPERATORS = ["Conv", "MatMul", "Gemm", "Add", "MaxPool", "AveragePool", "GlobalAveragePool", "Relu", "Clip"]
MOST_PER_CLASS = 64
HELD_OUT = 4  # every fourth sample of a class, as two forms of one network are compared, not heads


@dataclass(frozen=True)
class Figures:
    """int8 compared with fp32: mean cosine of features, head accuracy (mean over clients), bytes, milliseconds per sample here."""

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
            f"{units.size(self.bytes_int8)} instead of {units.size(self.bytes)}, {self.latency_int8_ms:.2f} instead of"
            f" {self.latency_ms:.2f} ms per sample, cosine {self.cosine:.4f}, accuracy {units.percent(self.accuracy_int8)}"
            f" instead of {units.percent(self.accuracy)}"
        )


class _Batches(CalibrationDataReader):
    """Calibration samples in batches."""

    def __init__(self, x: NDArray[np.float32]) -> None:
        self._batches = iter([x[start : start + BATCH] for start in range(0, len(x), BATCH)])

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        batch = next(self._batches, None)
        return None if batch is None else {IMAGE: batch}


def quantise(payload: bytes, x: Array) -> bytes:
    """The int8 version of an ONNX extractor, calibrated on samples x [N, ...]. Raises ArtefactError."""
    with tempfile.TemporaryDirectory(prefix="edge-fl-int8-") as folder, quiet():
        original, prepared, quantised = (
            Path(folder, name) for name in ("fp32.onnx", "prepared.onnx", "int8.onnx")
        )
        original.write_bytes(payload)
        try:
            quant_pre_process(original, prepared, skip_symbolic_shape=True)
            operators, excluded = _quantisable(onnx.load(prepared, load_external_data=False).graph)
            quantize_static(
                prepared,
                quantised,
                _Batches(scaled(x)),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=operators,
                nodes_to_exclude=excluded,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                reduce_range=False,
                extra_options={"CalibMovingAverage": True},
            )
        except Exception as error:  # onnxruntime's tools raise various types
            raise ArtefactError(
                f"int8: {type(error).__name__}: {str(error)[:200]}", consequence="not released"
            ) from error
        return quantised.read_bytes()


def _quantisable(graph: onnx.GraphProto) -> tuple[list[str], list[str]]:
    """The operator types to quantise, and the names of nodes that are left out."""
    constants = {tensor.name for tensor in graph.initializer}
    products = [n for n in graph.node if n.op_type == "MatMul" and not constants.intersection(n.input)]
    attention = any(node.op_type == "LayerNormalization" for node in graph.node)
    operators = [each for each in OPERATORS if each != "Add" or not attention]
    return operators, [node.name for node in products] + _before_logarithm(graph)


def _before_logarithm(graph: onnx.GraphProto) -> list[str]:
    """The names of nodes that lead to a logarithm, as a log-mel spectrogram has: it would show the rounding of quiet bands."""
    makers = {output: node for node in graph.node for output in node.output}
    seen, wanted = set[str](), [node.output[0] for node in graph.node if node.op_type == "Log"]
    while wanted:
        if (value := wanted.pop()) in makers and value not in seen:
            seen.add(value)
            wanted += makers[value].input
    return sorted({makers[value].name for value in seen} - {""})


def sample(clients: Sequence[ClientData], count: int, seed: int) -> Array:
    """Draw `count` training samples evenly from the clients, for calibration."""
    each = -(-count // max(len(clients), 1))
    rng = generator(seed, "release.calibration")
    return np.concatenate([c.train.x[rng.permutation(len(c.train))[:each]] for c in clients])[:count]


def compare(
    payload: bytes, payload_int8: bytes, clients: Sequence[ClientData], classes: int, unit_norm: bool
) -> Figures:
    """Compare both extractors on clients' data: heads are fitted on training, evaluated on validation (or test) samples."""
    fp32, int8 = Session(payload), Session(payload_int8)
    cosines: list[float] = []
    accuracies: list[tuple[float, float]] = []
    for client in clients:
        held_out = client.validation if len(client.validation) else client.test
        if not len(held_out) or not len(client.train):
            continue
        features = [
            [session.features(samples.x) for samples in (client.train, held_out)] for session in (fp32, int8)
        ]
        cosines.append(_cosine(features[0][1], features[1][1]))
        accuracy, accuracy_int8 = (_accuracy(z, client.train, held_out, classes, unit_norm) for z in features)
        accuracies.append((accuracy, accuracy_int8))
    if not accuracies:
        raise ArtefactError(
            "int8: no client has held-out samples to evaluate it on", consequence="not released"
        )
    mean, mean_int8 = np.mean(accuracies, axis=0)
    first = clients[0].train.x[:1]
    return Figures(
        cosine=float(np.mean(cosines)),
        accuracy=float(mean),
        accuracy_int8=float(mean_int8),
        bytes=len(payload),
        bytes_int8=len(payload_int8),
        latency_ms=fp32.latency_ms(first),
        latency_int8_ms=int8.latency_ms(first),
    )


def objection(figures: Figures, gate: QuantiseConfig) -> str:
    """Why an int8 extractor misses the gate; "" if it passes."""
    if not figures.cosine >= gate.min_cosine:
        return f"cosine {figures.cosine:.4f}, at least {gate.min_cosine:g}"
    if not figures.loss <= gate.max_loss:
        return f"{100 * figures.loss:.1f} points of accuracy lost, at most {100 * gate.max_loss:g}"
    return ""


def quantiser(
    clients: Sequence[ClientData], gate: QuantiseConfig, seed: int, report: Callable[[str], None]
) -> Quantiser:
    """A quantiser calibrated and evaluated on these clients' data; `report` receives a line per result."""

    def make(onnx: bytes, classes: int, unit_norm: bool) -> QuantisedExtractor | None:
        int8 = quantise(onnx, sample(clients, gate.images, seed))
        figures = compare(onnx, int8, clients, classes, unit_norm)
        if why := objection(figures, gate):
            report(f"int8 is not published: {why}")
            return None
        report(f"int8: {figures}")
        return QuantisedExtractor(int8, figures.cosine, figures.loss)

    return make


def quantiser_without_data(
    input: InputSpec, gate: QuantiseConfig, seed: int, report: Callable[[str], None]
) -> Quantiser:
    """A quantiser calibrated on synthetic samples; the cosine is that on others of them, and the loss of accuracy is unknown (0)."""

    def make(onnx: bytes, classes: int, unit_norm: bool) -> QuantisedExtractor | None:
        x = modalities.of(input.kind).synthetic(input, SYNTHETIC + BATCH, seed)
        many = ABOUT[input.kind].samples
        int8 = quantise(onnx, x[:SYNTHETIC])
        cosine = _cosine(*(Session(each).features(x[SYNTHETIC:]) for each in (onnx, int8)))
        if not cosine >= gate.min_cosine:
            report(
                f"int8 is not published: cosine {cosine:.4f} on synthetic {many}, at least {gate.min_cosine:g}"
            )
            return None
        report(f"int8: calibrated without data, on synthetic {many}: cosine {cosine:.4f}, accuracy unknown")
        return QuantisedExtractor(int8, cosine, 0.0)

    return make


def _cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(np.mean((a * b).sum(axis=1) / np.maximum(norms, 1e-12)))


def _accuracy(
    z: Sequence[NDArray[np.float32]], train: Samples, held_out: Samples, classes: int, unit_norm: bool
) -> float:
    head = heads.fit("nearest", z[0], train.y, classes, unit_norm=unit_norm)
    return float((head.predict(z[1]) == held_out.y).mean())


def labelled(folder: Path, classes: Sequence[str], input: InputSpec, seed: int = 0) -> ClientData:
    """Samples of FOLDER/CLASS, at most MOST_PER_CLASS each, for training and validation. Raises DataError for fewer than two classes."""
    names = [composed(name) for name in classes]
    rng, files = generator(seed, "release.pictures"), []
    found = sample_folders.find(folder, input.kind).files
    for name in names:
        own = [file for file in found if file.class_name == name]
        files += [own[index] for index in sorted(rng.permutation(len(own))[:MOST_PER_CLASS])]
    x, words, *_ = sample_folders.read(files, input, MOST_PER_CLASS)
    y, held_out, kept = np.array([names.index(word) for word in words], np.int64), np.zeros(len(x), bool), []
    for label in np.unique(y):
        rows = np.flatnonzero(y == label)
        kept.append(np.sort(rng.permutation(rows)[:MOST_PER_CLASS]))
        held_out[kept[-1][HELD_OUT - 1 :: HELD_OUT]] = True
    if len(kept) < 2 or not held_out.any():
        raise DataError(
            f"{text(folder)}: {len(x)} {ABOUT[input.kind].samples} of {len(kept)} of the classes {', '.join(classes)};"
            f" expected at least {HELD_OUT} in each of two folders named after classes, to calibrate int8"
        )
    rows, samples = np.concatenate(kept), Samples(x, y)
    empty = samples.take(rows[:0])
    return ClientData(samples.take(rows[~held_out[rows]]), samples.take(rows[held_out[rows]]), empty)
