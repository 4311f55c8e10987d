"""Annotations of generated text: outcomes of draft tokens and near-ties."""

from __future__ import annotations

import os
import sys
from itertools import groupby
from typing import TYPE_CHECKING

import click

from specedge.cli.terminal import pluralize

if TYPE_CHECKING:
    from specedge.runtime.requests.stream import Generation
    from specedge.runtime.text.detokenizer import TextSpan

_MAX_POSITIONS = 9
_MIN_REPORTED = 0.1  # seconds
_COLORS = {"accepted": "green", "recovered": "red", "bonus": "cyan"}
_BRACKETS = {"accepted": ("«", "»"), "recovered": ("⟨", "⟩"), "bonus": ("⟦", "⟧")}
_MEANINGS = {
    "accepted": "accepted draft token",
    "recovered": "recovered token after a rejection",
    "bonus": "bonus token after full acceptance",
}


def has_colors() -> bool:
    """Return True if stdout has colors, by NO_COLOR, FORCE_COLOR, or if it is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def legend(num_draft_tokens: int | str, colors: bool) -> str:
    """Return one line that explains the marks."""
    if not num_draft_tokens:
        return "trace: plain decoding, no token is marked"
    marks = (
        f"{click.style(_COLORS[outcome], _COLORS[outcome])}: {meaning}"
        if colors
        else _bracketed(meaning, outcome)
        for outcome, meaning in _MEANINGS.items()
    )
    return "trace: " + ", ".join(marks)


def mark(piece: list[TextSpan], colors: bool) -> str:
    """Return text with its outcomes as colors, or as brackets around equal neighbors."""
    if colors:
        return "".join(_styled(span) for span in piece)
    groups = groupby(piece, key=lambda span: span.outcome)
    return "".join(_bracketed("".join(s.text for s in spans), outcome) for outcome, spans in groups)


def _styled(span: TextSpan) -> str:
    color = _COLORS.get(span.outcome)
    return click.style(span.text, color) if color else span.text


def _bracketed(text: str, outcome: str) -> str:
    left, right = _BRACKETS.get(outcome, ("", ""))
    return f"{left}{text}{right}"


def near_tie_lines(generation: Generation, exact: bool) -> list[str]:
    """Return notes on near-ties and on the cost of resolving them."""
    ties, stats = generation.near_ties, generation.stats
    notes = []
    if stats.noise_seconds >= _MIN_REPORTED:
        notes.append(
            f"measuring this device's noise for K = {generation.num_draft_tokens} took"
            f" {stats.noise_seconds:.2f} s, once per process"
        )
    if not ties:
        return notes
    positions = ", ".join(str(tie.position) for tie in ties[:_MAX_POSITIONS])
    suffix = ", ..." if len(ties) > _MAX_POSITIONS else ""
    line = (
        f"{pluralize(len(ties), 'near-tie')} within the device's noise of {generation.noise:.0e}"
        f" (position{'' if len(ties) == 1 else 's'} {positions}{suffix})"
    )
    if not exact:
        return [*notes, f"{line}: plain decoding may differ; --exact resolves them"]
    passes, seconds = stats.num_exact_passes, stats.exact_seconds
    outcome = f"resolved exactly by {passes} more passes in {seconds:.2f} s"
    return [*notes, f"{line}, {outcome}"]
