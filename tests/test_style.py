"""Docstrings and class names of the product."""

import functools
import re
from collections import Counter
from pathlib import Path

import specedge

ROOT = Path(specedge.__file__).parent
CLAUSE_OPENINGS = {
    "What", "Whether", "How", "Where", "Which", "Why", "Of", "As", "From", "Those", "Nothing",
    "Who", "When",
}  # fmt: skip


@functools.cache
def sources():
    folders = (ROOT, *(folder for folder in ROOT.iterdir() if folder.is_symlink()))
    paths = sorted(path for folder in folders for path in folder.resolve().rglob("*.py"))
    return {path.relative_to(ROOT.parent): path.read_text("utf-8") for path in paths}


def test_no_docstring_opens_with_a_clause():
    """Regular expressions take a twentieth of the parser's time, and see every long string."""
    docstrings = [
        (path, line.split())
        for path, text in sources().items()
        for line in re.findall(r'^ *[rf]*"""\s*(\S.*)', text, re.MULTILINE)
    ]
    assert len(docstrings) > 2000
    assert not [
        f"{path}: {' '.join(words)}"
        for path, words in docstrings
        if words[0].strip(",.:'") in CLAUSE_OPENINGS
    ]


def test_class_names_are_unique():
    pattern = re.compile(r"^ *class ([A-Za-z]\w*)", re.MULTILINE)
    names = Counter(name for text in sources().values() for name in pattern.findall(text))
    assert len(names) > 300
    assert not [name for name, count in names.items() if count > 1]
