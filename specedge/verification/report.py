"""Report of an audit, as text and as plain values."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from dataclasses import dataclass, field
from typing import Any

from specedge.cpu_count import processor_name
from specedge.version import __version__

PASSED, FAILED, SHORT, SKIPPED = "passed", "FAILED", "too little time", "not run"


@dataclass(frozen=True)
class CheckResult:
    """Result of one check: status, one-line summary, further lines, and figures by name."""

    check: str
    status: str
    summary: str
    details: tuple[str, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AuditReport:
    """Report of an audit; `about` names the bundle, the machine and the versions."""

    about: dict[str, str]
    findings: tuple[CheckResult, ...]
    sureness: tuple[str, ...]
    seconds: float

    @property
    def result(self) -> str:
        """PASSED if every check that applies passed."""
        statuses = {finding.status for finding in self.findings}
        if FAILED in statuses:
            return "FAILED"
        return "INCOMPLETE" if SHORT in statuses else "PASSED"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "result": self.result,
            "about": self.about,
            "findings": [
                {
                    "check": finding.check,
                    "status": finding.status,
                    "summary": finding.summary,
                    "details": list(finding.details),
                    "facts": _plain(finding.figures),
                }
                for finding in self.findings
            ],
            "sureness": list(self.sureness),
            "seconds": round(self.seconds, 1),
        }

    def text(self) -> str:
        """Return the report as text."""
        lines = [f"specedge verify: {self.result}{_why(self)}", ""]
        lines += [f"{name:10} {text}" for name, text in self.about.items()]
        lines.append(f"{'time':10} {self.seconds:.0f} s")
        for finding in self.findings:
            lines += ["", f"{finding.check:10} {finding.status}: {finding.summary}"]
            lines += [f"           {line}" for line in finding.details]
        if self.sureness:
            lines += ["", "Confidence"]
            lines += [f"- {line}" for line in self.sureness]
        return "\n".join(lines)


def _plain(value: Any) -> Any:
    """Replace infinities, which JSON lacks, by text."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _why(report: AuditReport) -> str:
    failed = [f.check for f in report.findings if f.status == FAILED]
    if failed:
        return f" ({', '.join(failed)})"
    short = [f.check for f in report.findings if f.status == SHORT]
    if not short:
        return ""
    names = ", ".join(short)
    return f" (no check failed; too little time for {names}: increase --minutes)"


def machine() -> dict[str, str]:
    """Return this machine and the versions of the packages involved."""
    packages = ("onnxruntime", "onnxruntime-gpu", "numpy", "tokenizers", "scipy")
    versions = [f"specedge {__version__}", f"Python {platform.python_version()}"]
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "machine": f"{processor_name()}, {platform.platform(terse=True)}",
        "versions": ", ".join(versions),
    }
