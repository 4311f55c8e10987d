"""Docstrings and class names of the product."""

import ast
import functools
from collections import Counter
from pathlib import Path

import specedge

ROOT = Path(specedge.__file__).parent
CLAUSE_OPENINGS = {
    "What", "Whether", "How", "Where", "Which", "Why", "Of", "As", "From", "Those", "Nothing",
    "Who", "When",
}  # fmt: skip


@functools.cache
def every_node():
    folders = (ROOT, *(folder for folder in ROOT.iterdir() if folder.is_symlink()))
    paths = sorted(path for folder in folders for path in folder.resolve().rglob("*.py"))
    return [
        (path.relative_to(ROOT.parent), node)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_no_docstring_opens_with_a_clause():
    docstrings = ((path, ast.get_docstring(node) or "-") for path, node in every_node())
    assert not [
        f"{path}: {text.splitlines()[0]}"
        for path, text in docstrings
        if text.split()[0].strip(",.:'") in CLAUSE_OPENINGS
    ]


def test_class_names_are_unique():
    names = Counter(
        node.name
        for path, node in every_node()
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in names.items() if count > 1]
