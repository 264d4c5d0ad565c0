"""The services of the console next to `server run` and `server up` (`edge_fl_server.services`): the dashboard and the alerts.

The dashboard is a child process, so that it does not slow down training; the alerts are threads.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from edge_fl.console.output import print_status
from edge_fl_console.alerts import watcher
from edge_fl_server.children import CommandProcess
from edge_fl_server.orchestrate.serving import FleetAccess
from edge_fl_server.registry import Database


@contextmanager
def dashboard(access: FleetAccess, *, dashboard: int | None, devices: bool) -> Iterator[None]:
    """Serve the dashboard on a loopback port, if one is given. Raises ConfigError for an unusable registry."""
    if dashboard is None:
        yield
        return
    Database.open(access.registry).close()  # create it: the dashboard does not
    options = ["--database", access.registry, "--fleet", access.fleet, "--home", os.fspath(access.home)]
    ending = threading.Event()  # what it prints then is that it was ended

    def show(line: str) -> None:
        if not ending.is_set():
            print_status(f"dashboard: {line}")

    child = CommandProcess("dashboard", ["server", "dashboard", *options, "--port", str(dashboard)], show, {})
    try:
        yield
    finally:
        ending.set()
        child.end()


def alerts(access: FleetAccess, *, dashboard: int | None, devices: bool) -> AbstractContextManager[None]:
    """Watch the fleet and send alerts, where there are devices. Raises ConfigError for unusable settings."""
    if not devices:
        return nullcontext()
    return watcher.watching(access.registry, access.fleet, access.home, access.identity)
