"""The constant head: predicts the most frequent class. Any kind becomes this one for a client with a single class."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self, final

import numpy as np
from numpy.typing import NDArray

from edge_fl.heads.graph import Graph
from edge_fl.heads.head import Features, Head, TrainingSet


@final
@dataclass(frozen=True, eq=False)
class Constant(Head):
    """The most frequent class, for clients with a single class.

    present int64 [1]; accepts features of any width.
    """

    present: NDArray[np.int64]

    kind: ClassVar[str] = "constant"
    shapes: ClassVar[Mapping[str, tuple[str, ...]]] = {"present": ("one",)}

    @classmethod
    def fit(cls, data: TrainingSet) -> Self:
        return cls(data.classes, data.extractor, np.array([np.bincount(data.y).argmax()], np.int64))

    def logits(self, z: Features) -> Features:
        logits = np.full((len(z), self.classes), -np.inf, np.float32)
        logits[:, self.present] = 0
        return logits

    def graph(self, graph: Graph, z: str) -> str:
        return graph.scattered(z, np.zeros(graph.dim), np.zeros(1), self.present, self.classes)
