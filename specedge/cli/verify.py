"""Command `specedge verify`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specedge.bundle import MANIFEST, Bundle
from specedge.cli import options, terminal
from specedge.cli.panics import hidden_panics
from specedge.cli.terminal import sanitize
from specedge.errors import BundleError

if TYPE_CHECKING:
    from specedge.verification.audit import ExecutionSettings, SelfTest
    from specedge.verification.budget import Budget
    from specedge.verification.report import AuditReport


@click.command()
@options.bundle
@options.device
@options.draft_device
@click.option(
    "--minutes",
    type=options.FiniteRange(0, 24 * 60, min_open=True),
    help="Approximate duration; longer runs detect smaller deviations.  [default: 2, longer for "
    "slow models; 5 with --self-test]",
)
@click.option(
    "--strict", is_flag=True, help="Also exit 1 if a check is incomplete for lack of time."
)
@click.option("--prompts", metavar="FILE", help="File of additional prompts; `-` is stdin.")
@options.prompt_format
@options.request_option("special_tokens")
@click.option("--self-test", is_flag=True, help="Inject defects; exit 2 if one is not detected.")
@options.threads
@options.ops
@options.as_json
def verify(
    minutes: float | None,
    strict: bool,
    prompts: str | None,
    form: str | None,
    special_tokens: bool,
    self_test: bool,
    as_json: bool,
    bundle: str | None,
    **models: Any,
) -> None:
    """Audit a bundle on this machine.

    Checks the bundle's files and graphs, and that speculative decoding is lossless. The exit status
    is 1 if a check fails.
    """
    from specedge.bundle import store
    from specedge.cli.prompts import read_prompt_texts
    from specedge.runtime.requests.loader import devices_of
    from specedge.verification.audit import ExecutionSettings

    if form and not prompts:
        raise click.UsageError("--format requires --prompts")
    if self_test and prompts:
        raise click.UsageError("--self-test excludes --prompts")
    additional = [] if prompts is None else read_prompt_texts(prompts, form)

    def settings_for(bundle: Bundle) -> ExecutionSettings:
        """Return devices and graph variants that share one thread pool."""
        on = devices_of(bundle, share_threads=True, **models)
        return ExecutionSettings(on["target"], models["ops"], on["draft"])

    folder = store.find_bundle(bundle)
    if self_test:
        manifest = Bundle.read(folder)
        _test_self(manifest, settings_for(manifest), minutes or 5.0, as_json)
        return
    report = _audit(folder, settings_for, minutes, additional, special_tokens)
    click.echo(json.dumps(report.as_dict(), indent=1) if as_json else sanitize(report.text()))
    if report.result == "FAILED" or (strict and report.result != "PASSED"):
        raise click.exceptions.Exit(1)


def _audit(
    folder: Path,
    settings_for: Callable[[Bundle], ExecutionSettings],
    minutes: float | None,
    prompts: Sequence[Any],
    special_tokens: bool,
) -> AuditReport:
    from specedge.verification.audit import PASSES, audit, unreadable

    with _timed(minutes or 2.0) as (budget, on_progress):
        try:
            bundle = Bundle.read(folder)
        except BundleError as error:
            if not (folder / MANIFEST).is_file():
                raise
            return unreadable(folder, error, budget)
        with hidden_panics():
            return audit(
                bundle,
                settings_for(bundle),
                prompts,
                budget,
                on_progress,
                special_tokens,
                passes=0 if minutes else PASSES,
                on_first_verdict=lambda report: click.echo(
                    _first_verdict(report, budget), err=True
                ),
            )


def _first_verdict(report: AuditReport, budget: Budget) -> str:
    """Return the result of the first checks, before the statistical tests."""
    checks = ", ".join(finding.check for finding in report.findings)
    result = {"PASSED": "no check failed", "INCOMPLETE": "no check failed so far"}
    return (
        f"first verdict after {report.seconds:.0f} s: {result.get(report.result, report.result)}"
        f" ({checks}); statistical tests continue for {max(budget.left, 0) / 60:.1f} minutes"
    )


def _test_self(bundle: Bundle, settings: ExecutionSettings, minutes: float, as_json: bool) -> None:
    from specedge.verification.audit import (
        built_in_prompts,
        make_audited_pair,
        make_batched_check,
        self_test,
    )

    with _timed(minutes) as (budget, on_progress):
        prompts = built_in_prompts(bundle)
        pair = make_audited_pair(bundle, settings, prompts)
        batched = make_batched_check(bundle, settings, prompts)
        result = self_test(pair, budget, on_progress, batched)
    document = _as_dict(result)
    click.echo(json.dumps(document, indent=1) if as_json else "\n".join(_lines(result)))
    if result.false_alarms:
        click.echo(
            "specedge: checks failed without injected defects; run 'specedge verify' without "
            "--self-test",
            err=True,
        )
        raise click.exceptions.Exit(1)
    if result.num_caught < len(result.results):
        raise click.exceptions.Exit(2)


def _lines(result: SelfTest) -> Iterator[str]:
    from specedge.verification.report import SKIPPED

    yield f"no defect: {_alarms(result)}"
    for finding in result.control:
        if finding.status == SKIPPED:
            yield f"{finding.check}: {finding.status}: {finding.summary}"
    for defect, checks in result.caught:
        outcome = f"detected by {', '.join(checks)}" if checks else "MISSED"
        yield f"{defect.name}: {outcome} ({defect.description})"
    yield f"detected {result.num_caught} of {len(result.results)}"


def _alarms(result: SelfTest) -> str:
    from specedge.verification.report import SHORT

    alarms = [f"{finding.check}: {finding.summary}" for finding in result.false_alarms]
    if alarms:
        return f"FALSE ALARM: {'; '.join(alarms)}"
    short = [finding.check for finding in result.control if finding.status == SHORT]
    return f"incomplete: {', '.join(short)}; increase --minutes" if short else "no alarm"


def _as_dict(result: SelfTest) -> dict[str, Any]:
    return {
        "caught": result.num_caught,
        "planted": len(result.results),
        "false_alarms": [finding.check for finding in result.false_alarms],
        "defects": [
            {"name": defect.name, "what": defect.description, "caught_by": checks}
            for defect, checks in result.caught
        ],
        "findings": {
            defect.name: {f.check: {"status": f.status, "summary": f.summary} for f in findings}
            for defect, findings in result.results
        },
    }


@contextlib.contextmanager
def _timed(minutes: float) -> Iterator[tuple[Budget, Callable[[str], None]]]:
    """Yield a time budget and a function that reports the current check."""
    from specedge.verification.budget import Budget, Clock

    with terminal.progress_reports("loading") as report:
        clock = Clock(watch=lambda used: report(used / budget.end))
        budget = Budget(60 * minutes, clock)
        yield budget, lambda check: report(next_=check)
