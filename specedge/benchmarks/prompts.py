"""Built-in prompts of `specedge bench`: code, prose, and text to repeat.

Each has fewer than 200 tokens for a tokenizer of 2,000 entries, which leaves room in a context of
512.
"""

from __future__ import annotations

_CODE = (
    '''import os


class Inventory:
    """Counts what is on the shelves."""

    def __init__(self, path):
        self.path = path
        self.items = {}

    def add(self, name, count=1):
        if count < 0:
            raise ValueError("count must not be negative")
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count=1):
''',
    '''def parse_line(line):
    """Split a line of settings into a key and a value."""
    line = line.strip()
    if not line or line.startswith("#"):
        return None
    key, sep, value = line.partition("=")
    if not sep:
        raise ValueError("no '=' in %r" % line)
    return key.strip(), value.strip()


def parse_file(path):
''',
    """class Queue:
    def __init__(self, maxsize=0):
        self.maxsize = maxsize
        self.values = []

    def put(self, value):
        if self.maxsize and len(self.values) >= self.maxsize:
            raise OverflowError("the queue is full")
        self.values.append(value)

    def get(self):
""",
    """import unittest


class TestWords(unittest.TestCase):

    def test_empty(self):
        self.assertEqual(count_words(""), {})

    def test_one(self):
        self.assertEqual(count_words("tree"), {"tree": 1})

    def test_repeated(self):
""",
    '''def bisect(values, x, lo=0, hi=None):
    """Return where x belongs in the sorted list."""
    if lo < 0:
        raise ValueError("lo must not be negative")
    if hi is None:
        hi = len(values)
    while lo < hi:
        mid = (lo + hi) // 2
''',
    """def main(argv=None):
    parser = argparse.ArgumentParser(description="Rename the files of a folder.")
    parser.add_argument("folder", help="where the files are")
    parser.add_argument("--prefix", default="", help="what the new names begin with")
    parser.add_argument("--dry-run", action="store_true",
                        help="say what would be done")
    args = parser.parse_args(argv)
    for name in sorted(os.listdir(args.folder)):
""",
)

_PROSE = (
    "The lighthouse had been dark for eleven years when the letter came. It was addressed to the"
    " keeper, and since there was no keeper any more, the postman gave it to the woman who sold"
    " fish at the harbour. She read it twice, and then",
    "A river does not cut its valley evenly. Most of the work is done in a few days of the year,"
    " when the water is high and carries stones along its bed; in the months between",
    "Dear neighbours, as some of you have noticed, the old chestnut in the yard has lost two large"
    " branches this winter. We asked a gardener to look at it, and he said that",
    "To make bread without kneading it, mix the flour, the water, a little yeast and the salt in"
    " the evening, cover the bowl and leave it overnight. In the morning the dough",
    "The committee met on Tuesday to discuss the bridge. Three of its members wanted to repair it,"
    " two to build another, and one, who lived on the far side, said that",
    "There are two ways to learn a city. The first is to take a map and follow the large streets"
    " from one square to the next. The second is",
)

_SOURCES = (
    """class Shape:
    sides = 0
    colour = "grey"

    def describe(self):
        return "%s with %d sides" % (self.colour, self.sides)


class Triangle(Shape):
    sides = 3
    colour = "red"
""",
    """    def read(self, size=-1):
        if self.closed:
            raise ValueError("I/O operation on closed file")
        return self.raw.read(size)

    def write(self, data):
        if self.closed:
            raise ValueError("I/O operation on closed file")
        return self.raw.write(data)
""",
    """        self.assertEqual(f(1, 2), 3)
        self.assertEqual(f(2, 2), 4)
        self.assertEqual(f(3, 4), 7)
        self.assertEqual(f(5, 0), 5)
        self.assertEqual(f(8, 8), 16)
""",
    """    parser.add_argument("--name", help="the name of the file")
    parser.add_argument("--size", type=int, help="the size of the file")
    parser.add_argument("--force", action="store_true")
""",
    """    try:
        data = file.read()
    except OSError as err:
        print("cannot read", err)
        return None
    finally:
        file.close()
""",
    """        if self.name is None:
            return None
        if self.size < 0:
            raise ValueError("size must be positive")
        for key, value in self.items():
            self.write(key)
""",
)


def _to_repeat(text: str) -> str:
    """Return a text twice and its first third again, up to the end of a line."""
    end = text.index("\n", len(text) // 3)
    return f"{text}\n{text}\n{text[:end]}"


SETS = {
    "code": tuple(text.rstrip() for text in _CODE),
    "prose": _PROSE,
    "extraction": tuple(map(_to_repeat, _SOURCES)),
}
