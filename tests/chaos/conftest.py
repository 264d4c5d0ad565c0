"""Number of runs: 6, or 200 in `make nightly`."""

from collections import Counter

import pytest

RUNS = 200
CI_RUNS = 6  # without the marker nightly
QUICK_RUNS = 1  # without the marker slow
HEADS_EVERY = 5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per seed."""
    if "chaos_seed" in metafunc.fixturenames:
        marks = [*[()] * QUICK_RUNS, *[(pytest.mark.slow,)] * (CI_RUNS - QUICK_RUNS)]
        marks += [(pytest.mark.slow, pytest.mark.nightly)] * (RUNS - CI_RUNS)
        metafunc.parametrize("chaos_seed", [pytest.param(seed, marks=marks[seed]) for seed in range(RUNS)])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how the runs ended: a fleet that always fails would pass the tests as well."""
    ended = Counter(
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "chaos" and report.when == "call"
    )
    if ended:
        words = ", ".join(f"{count} {state}" for state, count in ended.most_common())
        terminalreporter.write_line(f"chaos: {ended.total()} runs ended: {words}")
