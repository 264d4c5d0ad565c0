"""`--once-more`: tests that failed run once more at the end, each alone; what then passes is named as flaky, and the run passes.

A flaky test is a defect with a cause: tests/flaky.md lists those that are known. A plugin of pytest, loaded by `tests/conftest.py`.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AT_MOST = 10
"""More failures than these are no accident: none of them runs again."""
LAST_LINES = 12
DEADLINE_S = 1800.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--once-more", action="store_true", help="run failed tests once more at the end, each alone"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--once-more") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(OnceMore(config))


class OnceMore:
    """Collects the failures of a run, in the process that reports them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: dict[str, str] = {}
        self._flaky: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.setdefault(report.nodeid, report.longreprtext)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Run them again after the workers have ended. Interrupted and broken runs stay as they are."""
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not 0 < len(self._failed) <= AT_MOST:
            return
        for name, text in self._failed.items():
            if self._passes(name):
                self._flaky[name] = text
        if self._flaky.keys() == self._failed.keys():
            session.exitstatus = pytest.ExitCode.OK

    def _passes(self, name: str) -> bool:
        profile = self._config.getoption("--hypothesis-profile", None)
        options = [f"--hypothesis-profile={profile}"] if profile else []
        command = [sys.executable, "-m", "pytest", *options, name]
        try:
            done = subprocess.run(
                command, cwd=Path(self._config.rootpath), capture_output=True, text=True, timeout=DEADLINE_S
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print a line `flaky: NAME` for each, with the end of its failure, and count it as flaky instead of failed."""
        reports = terminalreporter.stats
        for kind in ("failed", "error"):
            found = reports.pop(kind, [])
            flaky = [report for report in found if getattr(report, "nodeid", "") in self._flaky]
            if left := [report for report in found if report not in flaky]:
                reports[kind] = left
            if flaky:
                reports.setdefault("flaky", []).extend(flaky)
        for name, text in self._flaky.items():
            terminalreporter.write_line(f"flaky: {name}")
            for line in text.strip().splitlines()[-LAST_LINES:]:
                terminalreporter.write_line(f"    {line}")
