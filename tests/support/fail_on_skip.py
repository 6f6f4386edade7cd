"""Makes a run fail if it skips a test that is not allowed to be skipped, as in CI."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

EXPECTED: Mapping[str, str] = {}
"""Tests that CI may skip, by the beginning of their node id, with a reason for each; currently none."""


class FailOnSkip:
    """A pytest plugin that collects skips."""

    def __init__(self, expected: Mapping[str, str] = EXPECTED) -> None:
        self._expected = tuple(expected)
        self._unexpected: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "wasxfail"):
            self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._add(report)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not report.nodeid.startswith(self._expected):
            self._unexpected.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name in self._unexpected:
            terminalreporter.write_line(
                f"SKIPPED, which fails this run: {name}. Install what it needs, or list it with its reason in "
                "tests/support/fail_on_skip.py.",
                red=True,
            )
