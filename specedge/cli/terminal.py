"""Text for a terminal: what others wrote can neither steer it nor fill it."""

from __future__ import annotations

LONGEST = 2000  # characters of a message; what it quotes may be a megabyte


def one_line(text: str, longest: int = LONGEST) -> str:
    """One line of characters that only show: others, such as escapes and marks of direction, as
    Python writes them. The middle of a long one is left out.
    """
    if len(text) > longest:
        end = longest // 4
        text = f"{text[: longest - end]} [...] {text[-end:]}"
    return text if text.isprintable() else "".join(map(_visible, text))


def lines(text: str) -> str:
    """As `one_line` for each line of a text of any length."""
    return "\n".join(one_line(line, len(line)) for line in text.split("\n"))


def counted(number: int, what: str) -> str:
    """A number of things, one of them in the singular."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _visible(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]
