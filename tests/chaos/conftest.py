"""Number of runs: 20, or 200 with the nightly profile (`make nightly`)."""

from __future__ import annotations

from collections import Counter

import pytest

RUNS = {"ci": 20, "nightly": 200}
QUICK_RUNS = 1  # without the marker slow
HEADS_EVERY = 5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per seed."""
    if "chaos_seed" in metafunc.fixturenames:
        count = RUNS.get(metafunc.config.getoption("--hypothesis-profile") or "ci", RUNS["ci"])
        seeds = [
            pytest.param(seed, marks=() if seed < QUICK_RUNS else pytest.mark.slow) for seed in range(count)
        ]
        metafunc.parametrize("chaos_seed", seeds)


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
