"""What tests on a GPU found, for the file that is sent back: `--gpu-report FILE`."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_report import Report

# "gpu" would be every test's of this folder, as a folder's name is a keyword, too.
ON_A_GPU = "is marked gpu"


class Reporting:
    """A pytest plugin that notes how each test on a GPU ended, and what it measured, before the
    next begins: a driver may end the process.
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
        found = {
            "outcome": report.outcome,
            "seconds": round(report.duration, 3),
            "measured": dict(report.user_properties),
            "why": why,
        }
        self._report.put("tests", {report.nodeid: found})
        self._names.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        count = len(self._names)
        terminalreporter.write_line(f"{count} tests on a GPU are in {self._report.path}")
