"""Pytest plugin that writes outcomes of GPU tests to a report file (`--gpu-report FILE`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_report import Report

# Not "gpu": the folder's name is a keyword of every test in it.
ON_A_GPU = "is marked gpu"


class Reporting:
    """Plugin that writes each GPU test's outcome and properties before the next test begins.

    A driver may end the process.
    """

    def __init__(self, path: Path) -> None:
        self._report = Report(path)
        self._report.put("tests", {})
        self._names: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        if ON_A_GPU not in report.keywords:
            return
        if report.skipped and isinstance(report.longrepr, tuple):
            why = str(report.longrepr[2])
        else:
            why = "" if report.passed else str(report.longreprtext)
        entry = {
            "outcome": report.outcome,
            "seconds": round(report.duration, 3),
            "measured": dict(report.user_properties),
            "why": why,
        }
        self._report.put("tests", {report.nodeid: entry})
        self._names.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        count = len(self._names)
        terminalreporter.write_line(f"{count} tests on a GPU are in {self._report.path}")
