"""Research from Python, in scripts and notebooks: run a method on your own arrays, get every client's metrics as arrays and rows.

    from edge_fl_lab.research import run

    result = run("fedrep", images, labels, clients=10, rounds=10, engine="pool")
    print(result.accuracy)  # one value per client

The functions do what `edge-fl simulate` and `edge-fl compare` do, with the same code and the same numbers.
"""

from __future__ import annotations

from edge_fl.console import extras

try:
    from edge_fl_lab.research.calls import Comparison, Result, compare, run
except ModuleNotFoundError as error:
    raise ImportError(f"edge_fl_lab.research {extras.hint(error) or error}") from error

__all__ = ["Comparison", "Result", "compare", "run"]
