"""The served model (extractor and head): prediction, HTTP service, ONNX export, comparison with a new one."""
