"""Benchmark for a GPU (`make bench-gpu`). Without a GPU every item runs on the CPU at tiny sizes and states what it would measure."""
