"""The pair that serves: extractor and head together, compared with another, over HTTP, or as one ONNX model."""
