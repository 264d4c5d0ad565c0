"""From shared parts to an ONNX extractor that any device can run, checked against torch before anybody sees it.

Opset and IR version are pinned low (17 and 10), so that older runtimes on devices load the graph; raw 0..1 pixels go in, features
come out, normalisation and unit length are inside (METHODS.md 6.1).
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from edge_fl.errors import ArtefactError, MethodError
from edge_fl.learn.tree import Parts, to_device
from edge_fl.methods import steps
from edge_fl.methods.method import Method

OPSET = 18
IR_VERSION = 10
PARITY = 1e-4  # largest absolute difference allowed between onnxruntime and torch


@dataclass(frozen=True)
class Exported:
    """The ONNX bytes, the feature size, and the largest difference from torch on the check batch."""

    onnx: bytes
    feature_dim: int
    difference: float


class _Graph(nn.Module):
    """A method's exported features as a module; the shared parts become its constants."""

    def __init__(self, method: Method, shared: Parts) -> None:
        super().__init__()
        self._method, self._shared = method, shared

    def forward(self, image: Tensor) -> Tensor:
        return steps.exported_features(self._method, self._shared, image)
