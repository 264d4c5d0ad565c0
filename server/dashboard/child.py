"""The dashboard beside a run: a process of its own, so that looking takes nothing from training, ended with the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_fl.console.output import print_status
from server.children import Child


@contextmanager
def dashboard(port: int | None, registry: str, fleet: str, home: Path) -> Iterator[None]:
    """Serves on a loopback port while the block runs; without a port, nothing."""
    if port is None:
        yield
        return
    options = ["--database", registry, "--fleet", fleet, "--home", str(home), "--port", str(port)]
    child = Child(
        "dashboard", ["server", "dashboard", *options], lambda line: print_status(f"dashboard: {line}"), {}
    )
    try:
        yield
    finally:
        child.end()
