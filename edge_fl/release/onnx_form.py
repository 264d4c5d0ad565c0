"""The form of ONNX files: versions, names of inputs and outputs, and how far results may differ. No package onnx."""

OPSET = 18
"""Of the standard operators, for extractors that are exported here."""
OLDEST_OPSET = 7
"""The oldest that onnxruntime loads."""
IR_VERSION = 9
"""The newest that onnxruntime 1.17 loads, the oldest supported one."""

IMAGE = "image"
"""The input of every graph: pixels 0..1 [n, C, H, W]."""
FEATURES = "features"
"""The output of an extractor: float32 [n, d]."""
LOGITS, PROBABILITIES = "logits", "probabilities"
"""The outputs of an extractor with its head: float32 [n, classes]."""
ROWS = "n"
"""The name of the free first axis."""

PARITY = 1e-4
"""Largest difference between a graph and what it was made from: of features relative to the largest one, of probabilities as they are."""

SESSION = {"session.x64quantprecision": "1"}
"""Settings of an onnxruntime session, so that int8 has the same features on every processor.

Without it an x86 processor that lacks VNNI sums products in 16 bits, which overflow: the cosine to fp32 features of EfficientNet-Lite0 is
0.92 instead of 0.99.
"""
