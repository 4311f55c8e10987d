"""What tests on a GPU found, for the file that is sent back: `--gpu-report FILE`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_report import Report


class Reporting:
    """A pytest plugin that notes how each test ended, and what it measured."""

    def __init__(self, path: Path) -> None:
        self._report = Report(path)
        self._tests: dict[str, dict[str, object]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        if "gpu" not in report.keywords:
            return
        if report.skipped and isinstance(report.longrepr, tuple):
            why = str(report.longrepr[2])
        else:
            why = "" if report.passed else str(report.longreprtext)
        self._tests[report.nodeid] = {
            "outcome": report.outcome,
            "seconds": round(report.duration, 3),
            "measured": dict(report.user_properties),
            "why": why,
        }

    def pytest_sessionfinish(self) -> None:
        self._report.put("tests", self._tests)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        count = len(self._tests)
        terminalreporter.write_line(f"{count} tests on a GPU are in {self._report.path}")
