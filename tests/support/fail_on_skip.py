"""Makes a run fail if it skips a test, as in CI."""

from __future__ import annotations

import pytest


class FailOnSkip:
    """A pytest plugin that collects skips."""

    def __init__(self) -> None:
        self._skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "wasxfail"):
            self.pytest_collectreport(report)

    def pytest_collectreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            self._skipped.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name in self._skipped:
            terminalreporter.write_line(f"SKIPPED, which fails this run: {name}. Install what it needs.", red=True)
