"""Comparison with other simulators: edge-fl, PFLlib, Flower and pfl-research train the same clients, round by round in turns.

`python -m tools.bench.peers --pfllib DIR`. Each side is a process of its own (`child`), which runs a round for every line on its standard
input.
"""
