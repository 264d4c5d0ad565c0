"""From pictures to features, by onnxruntime in a child process, and whether what is seen now is what was seen before."""
