"""How `specedge generate --trace` shows what became of each token."""

from __future__ import annotations

import os
import sys
from itertools import groupby
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from specedge.runtime.text.spans import Span

_COLOURS = {"accepted": "green", "recovered": "red", "bonus": "cyan"}
_BRACKETS = {"accepted": ("«", "»"), "recovered": ("⟨", "⟩"), "bonus": ("⟦", "⟧")}
_MEANINGS = {
    "accepted": "drafted and accepted",
    "recovered": "recovered after a rejection",
    "bonus": "bonus after full acceptance",
}


def coloured() -> bool:
    """Whether stdout gets colours: by NO_COLOR, else by FORCE_COLOR, else if it is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def legend(num_draft_tokens: int | str, colours: bool) -> str:
    """One line that explains the marks."""
    if not num_draft_tokens:
        return "trace: nothing is drafted, so no token is marked"
    marks = (
        f"{click.style(_COLOURS[fate], _COLOURS[fate])}: {meaning}"
        if colours
        else _bracketed(meaning, fate)
        for fate, meaning in _MEANINGS.items()
    )
    return "trace: " + ", ".join(marks)


def marked(piece: list[Span], colours: bool) -> str:
    """A piece of text with its marks: colours, else brackets around neighbours of one fate."""
    if colours:
        return "".join(_styled(span) for span in piece)
    groups = groupby(piece, key=lambda span: span.fate)
    return "".join(_bracketed("".join(s.text for s in spans), fate) for fate, spans in groups)


def _styled(span: Span) -> str:
    colour = _COLOURS.get(span.fate)
    return click.style(span.text, colour) if colour else span.text


def _bracketed(text: str, fate: str) -> str:
    left, right = _BRACKETS.get(fate, ("", ""))
    return f"{left}{text}{right}"
