"""Comparison of methods on the same clients and seeds, optionally with the papers' figures.

`grid` lists the runs of a comparison, `cell_runs` executes one and stores its result, `sources` hashes the code that it depends on,
`estimate` says how long the missing ones take, `comparison` executes many and writes the files, `summary` averages over seeds and compares
methods client by client, `tuning` searches for each method's settings, `tables` lays out the tables, `paper` adds the papers' figures.
"""
