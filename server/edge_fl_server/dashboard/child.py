"""Serve the dashboard during a run, in a child process so that it does not slow down training."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_fl.console.output import print_status
from edge_fl_server.children import Child
from edge_fl_server.registry import Database


@contextmanager
def dashboard(port: int | None, registry: str, fleet: str, home: Path) -> Iterator[None]:
    """Serve on a loopback port while the block runs; do nothing if `port` is None. Raises ConfigError for an unusable registry."""
    if port is None:
        yield
        return
    Database.open(registry).close()  # create it: the dashboard does not
    options = ["--database", registry, "--fleet", fleet, "--home", os.fspath(home), "--port", str(port)]
    ending = threading.Event()  # what it prints then is that it was ended

    def show(line: str) -> None:
        if not ending.is_set():
            print_status(f"dashboard: {line}")

    child = Child("dashboard", ["server", "dashboard", *options], show, {})
    try:
        yield
    finally:
        ending.set()
        child.end()
