"""Benchmarks: every figure side by side with a plain loop as the field writes it, in one run, with proof that both computed the same.

`python -m tests.bench` is the quick run, `--full` the long one, `--gpu` the one for accelerators. A figure is "not comparable" when the
two sides do not agree.
"""
