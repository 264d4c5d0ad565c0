"""One cell of `tools.study.backbones`: features of a device's pictures from one kind of extractor, and the personal heads on them."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from edge_fl import heads, metrics, models
from edge_fl.config import MethodConfig, MethodSpec, ModelConfig
from edge_fl.data.samples import Array, Dataset, Indices
from edge_fl.files import atomic
from edge_fl.inputs import InputSpec
from edge_fl.methods import PRETRAINED, build_method
from edge_fl.methods.contract import steps
from edge_fl.modalities import pictures
from edge_fl.seeds import generator
from edge_fl_lab.research import run
from edge_fl_server.release.export import export
from edge_fl_server.release.onnx_session import Session
from edge_fl_server.training.engines.processes import threads

HEADS = {"pixels": "logistic", "cnn": "logistic", "frozen": "cosine", "lora": "logistic", "all": "logistic"}
"""Rows of the table: what the features are (all: of a backbone that is fine-tuned as a whole), and the head that devices fit by default."""
KINDS = ("logistic", "cosine")
LABELS = {"1": 1, "5": 5, "20": 20, "all": 0}
PIXELS, SMALL = InputSpec((3, 16, 16)), InputSpec((3, 32, 32))
TEST, BLOCK = 300, 512
Extract = Callable[[Indices], Array]  # rows of the dataset -> features [n, d]
Split = dict[str, tuple[Indices, Indices]]  # domain -> rows for training, rows for testing


@dataclass(frozen=True)
class Training:
    """FedAvg of the four devices; with all labels `rounds_of_all`, and on at most `most` pictures of a device (0: no limit)."""

    rounds: int
    rounds_of_all: int
    epochs: int
    optimiser: str
    lr: float
    most: int = 0


TRAINING = {
    "cnn": Training(20, 5, 2, "sgd", 0.01),
    "lora": Training(5, 5, 1, "adam", 3e-3, most=140),
    "all": Training(5, 5, 1, "adam", 1e-4, most=140),
}


class Cell(msgspec.Struct, frozen=True):
    """Test accuracy by kind of head and domain, and processor seconds."""

    accuracy: dict[str, dict[str, float]]
    seconds: float

    def mean(self, kind: str) -> float:
        return 100 * float(np.mean([*self.accuracy[kind].values()]))


@dataclass(frozen=True)
class Study:
    """The dataset, the folder of the cells, and the backbone."""

    data: Dataset
    out: Path
    backbone: ModelConfig

    def cell(self, row: str, labels: str, seed: int, training: Training | None, until: float) -> Cell | None:
        """The stored result of a cell, or run it; None when the time is over."""
        if training and labels == "all":
            training = replace(training, rounds=training.rounds_of_all)
        elif training:
            training = replace(training, most=0)
        path = (
            self.out / f"{row}-{labels}-{seed}-{self._digest(row, TEST, training and astuple(training))}.json"
        )
        if path.is_file():
            return msgspec.json.decode(path.read_bytes(), type=Cell)
        if time.monotonic() > until:
            return None
        began_s = time.process_time()
        with threads(1), threadpool_limits(1):
            split = self.split(LABELS[labels], seed)
            extract = self.trained(row, split, seed, training) if training else self.fixed(row)
            accuracy = self.accuracy(extract, split, seed)
        cell = Cell(accuracy, time.process_time() - began_s)
        atomic.write(path, msgspec.json.encode(cell))
        return cell

    def split(self, labels: int, seed: int) -> Split:
        """The test pictures are the same for every number of labels; fewer labels are a part of more."""
        found = {}
        for number, domain in enumerate(self.data.domain_names):
            rows = np.flatnonzero(self.data.domains == number)
            test, train = np.split(generator(seed, "backbones", client=domain).permutation(rows), [TEST])
            y = self.data.samples.y[train]
            few = [np.flatnonzero(y == label)[: labels or None] for label in np.unique(y)]
            found[domain] = train[np.sort(np.concatenate(few))], test
        return found

    def accuracy(self, extract: Extract, split: Split, seed: int) -> dict[str, dict[str, float]]:
        """Test accuracy of each device's personal head, by kind and domain."""
        y, found = self.data.samples.y, {kind: dict[str, float]() for kind in KINDS}
        for domain, (train, test) in split.items():
            z, unseen = extract(train), extract(test)
            for kind in KINDS:
                head = heads.fit(kind, z, y[train], len(self.data.classes), unit_norm=False, seed=seed)
                found[kind][domain] = metrics.accuracy(head.predict(unseen), y[test])
        return found

    def fixed(self, row: str) -> Extract:
        """Pixels, or features of the frozen backbone, which are computed once for all pictures."""
        if row == "pixels":
            return lambda rows: self._pictures(rows, PIXELS).reshape(len(rows), -1) / 255
        path = self.out / f"frozen-{self._digest(row)}.npy"
        if not path.is_file():
            model, input = self._backbone("none")
            method = build_method(
                MethodSpec(model, input, [*self.data.classes], MethodConfig(PRETRAINED), seed=0)
            )
            extract = self._released(export(method, steps.start(method)).onnx, input)
            np.save(path, extract(np.arange(len(self.data.samples))))
        z: Array = np.load(path)
        return lambda rows: z[rows]

    def trained(self, row: str, split: Split, seed: int, training: Training) -> Extract:
        """Train with FedAvg -> features of the released extractor. The run tests one picture of each device, which is not used."""
        model, input = (ModelConfig("cnn2-bn"), SMALL) if row == "cnn" else self._backbone(row)
        train = {domain: rows[: training.most or None] for domain, (rows, _) in split.items()}
        rows, test = np.concatenate([*train.values()]), np.array([rows[0] for _, rows in split.values()])
        y = self.data.samples.y
        result = run(
            "fedavg",
            self._pictures(rows, input),
            y[rows],
            clients=np.repeat([*train], [len(each) for each in train.values()]),
            test=(self._pictures(test, input), y[test], np.array([*train])),
            rounds=training.rounds,
            seed=seed,
            engine="sequential",
            settings={
                "model": msgspec.to_builtins(model),
                "method.epochs": training.epochs,
                "method.batch_size": 16,
                "method.optimiser": {"name": training.optimiser, "lr": training.lr},
                "data.validation_fraction": 0,
                "evaluate_every": 0,
                "device": "cpu",
            },
        ).trained
        return self._released(export(result.method, result.shared).onnx, input)

    def _digest(self, row: str, *settings: object) -> str:
        """The settings of a row, for the names of files."""
        model = self.backbone
        own = {"pixels": PIXELS, "cnn": SMALL, "lora": model}.get(
            row, (model.name, model.options, model.weights)
        )
        return hashlib.sha256(repr((own, *settings)).encode()).hexdigest()[:8]

    def _backbone(self, train: str) -> tuple[ModelConfig, InputSpec]:
        model = msgspec.structs.replace(self.backbone, train=train)
        return model, models.backbone_input(model) or PIXELS

    def _released(self, onnx: bytes, input: InputSpec) -> Extract:
        """The features of an extractor as a device computes them, with onnxruntime."""
        session = Session(onnx)

        def extract(rows: Indices) -> Array:
            blocks = np.split(rows, range(BLOCK, len(rows), BLOCK))
            return np.concatenate([session.features(self._pictures(block, input)) for block in blocks])

        return extract

    def _pictures(self, rows: Indices, input: InputSpec) -> Array:
        return pictures.fit(self.data.samples.x[rows], input)
