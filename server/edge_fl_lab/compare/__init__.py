"""Comparison of methods on the same clients and seeds, optionally with the papers' figures.

`grid` lists the runs of a comparison, `cell` executes one and stores its result, `jobs` executes many in child processes, `summary`
averages over seeds, `tables` lays out the tables, `paper` adds the papers' figures, `comparison` runs all of this and writes the files.
`tuning` searches for each method's settings, `paired` compares methods client by client, `tuned` lays out both.
"""
