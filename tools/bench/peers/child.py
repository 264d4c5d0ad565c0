"""`python -m tools.bench.peers.child SIDE FOLDER [PFLLIB]`: one side of the comparison, which runs a round whenever it is asked to."""

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from tools.bench.peers.turns import Turns

MODULES = {
    "edge-fl": "ours:edge",
    "plain": "ours:plain_loop",
    "pfllib": "pfllib:run",
    "flower": "flower:run",
    "pfl-research": "pfl_research:run",
}


def main(side: str, folder: str, *checkout: str) -> None:
    """Run a side until the end of its input."""
    turns = Turns()
    from tools.bench.peers.job import Job  # after redirecting the output

    module, _, name = MODULES[side].partition(":")
    run: Callable[..., None] = getattr(importlib.import_module(f"tools.bench.peers.{module}"), name)
    try:
        run(Job(Path(folder)), turns, *map(Path, checkout))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a library's threads may still wait


if __name__ == "__main__":
    main(*sys.argv[1:])
