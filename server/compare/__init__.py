"""Methods compared honestly: the same clients, the same seeds, every number by its name, and beside the paper's where there is one.

`grid` says which runs a comparison is made of, `cell` runs one and keeps it in a file, `jobs` runs many in child processes, `table` sums
them up, `paper` puts the papers' figures beside them, `render` writes text, CSV, Markdown and LaTeX.
"""
