"""What extensions add to `server run` and `server up`: services that run next to them, and what is done with a finished run.

A service is a context manager registered in the entry point group "edge_fl.services", called with a `FleetAccess` and what the command's
options say; it runs while its block does. A function in "edge_fl.finished_runs" is called with the results of every finished run.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from edge_fl import plugins
from edge_fl.errors import ConfigError
from edge_fl_server.orchestrate.serving import FleetAccess
from edge_fl_server.runs.results import Results

SERVICES, FINISHED_RUNS = "edge_fl.services", "edge_fl.finished_runs"


@contextmanager
def running(access: FleetAccess, *, dashboard: int | None, devices: bool = True) -> Iterator[None]:
    """Run all services while the block runs: with `dashboard` a port to serve it on, with `devices` what needs devices.

    Raises ConfigError if a dashboard is asked for and no installed extension has one.
    """
    found = plugins.all_registered(SERVICES)
    if dashboard is not None and "dashboard" not in found:
        raise ConfigError("--dashboard: the extension edge_fl_console is not installed, which serves it")
    with ExitStack() as stack:
        for service in found.values():
            stack.enter_context(service(access, dashboard=dashboard, devices=devices))
        yield


def finished(results: Results) -> None:
    """Hand a finished run to the extensions, which for example write its report."""
    for function in plugins.all_registered(FINISHED_RUNS).values():
        function(results)
