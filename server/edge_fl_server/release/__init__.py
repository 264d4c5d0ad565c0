"""From shared parts to a published release: ONNX export, its parity gate, and publication."""
