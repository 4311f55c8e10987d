"""Tables of a document that tests and tools write, between two comments."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


def lines_of(document: Path, title: str) -> list[str]:
    """The lines between a document's comments of that title."""
    return _split(document, title)[1].splitlines()


def put(document: Path, title: str, lines: list[str]) -> None:
    """Put lines between a document's comments of that title, for those that were there."""
    before, _, after = _split(document, title)
    document.write_text(before + "".join(f"{line}\n" for line in lines) + after, "utf-8")


def _split(document: Path, title: str) -> tuple[str, str, str]:
    start, end = f"<!-- {title} -->\n", f"<!-- end of {title} -->\n"
    before, found, rest = document.read_text("utf-8").partition(start)
    between, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{document} lacks {start.strip()} or {end.strip()} behind it")
    return before + start, between, end + after


@dataclass
class Table:
    """A block of rows for each case; `names` are its cases in order, `rows` what ran just now."""

    document: Path
    title: str
    columns: tuple[str, ...]
    names: tuple[str, ...]
    rows: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)

    def begin(self, name: str) -> None:
        """A case runs: what the document says of it no longer holds."""
        self.rows[name] = []

    def add(self, name: str, *cells: str) -> None:
        """One row of a case."""
        self.rows[name].append((name, *cells))

    def written(self) -> list[str]:
        """The cases that the document has rows of."""
        return list(self._found())

    def rows_of(self, name: str) -> list[str]:
        """Return the documented values of a case."""
        return self._found()[name]

    def write(self) -> None:
        """Put the rows of this session in their places; those of other cases stay."""
        if not self.rows:
            return
        found = self._found()
        for name, rows in self.rows.items():
            found[name] = [f"| {' | '.join(cells)} |" for cells in rows]
        lines = [f"| {' | '.join(self.columns)} |", "|---" * len(self.columns) + "|"]
        lines += [line for name in self.names for line in found.get(name, ())]
        put(self.document, self.title, lines)

    def _found(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for line in lines_of(self.document, self.title):
            name = line.split("|")[1].strip()
            if name in self.names:
                found.setdefault(name, []).append(line)
        return found
