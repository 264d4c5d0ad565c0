"""Benchmarks: each figure compares edge-fl with a plain training loop in the same run, after checking that both compute the same.

`python -m tools.bench` is the quick run, `--full` the long one, `--gpu` the one for accelerators. A figure is "not comparable" if the two
sides do not agree.
"""
