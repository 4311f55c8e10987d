"""Tables of a document that tests write: a block of rows for each case, between two comments."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Table:
    """One table; `names` are its cases in order, `rows` what has been run in this session."""

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
        """What the document says of a case."""
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
        before, _, after = self._split()
        self.document.write_text(before + "\n".join(lines) + "\n" + after, "utf-8")

    def _split(self) -> tuple[str, str, str]:
        start, end = f"<!-- {self.title} -->\n", f"<!-- end of {self.title} -->\n"
        before, _, rest = self.document.read_text("utf-8").partition(start)
        table, _, after = rest.partition(end)
        return before + start, table, end + after

    def _found(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for line in self._split()[1].splitlines():
            name = line.split("|")[1].strip()
            if name in self.names:
                found.setdefault(name, []).append(line)
        return found
