"""Which parts of a large model are enough to run its files in every way they are used.

Layers that differ in nothing but their weights compute alike: the same kernels on the same shapes.
So one of each form is run in full, and all of them in a single pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .partition import Split


@dataclass(frozen=True)
class Shorter:
    """The parts to run: all before `end`, and from `start` on."""

    end: int
    start: int
    # Of each file: which value made before `end` stands for one that was made before `start`.
    names: Mapping[str, Mapping[str, str]]

    def has(self, index: int) -> bool:
        return self.end <= index < self.start


def shorten(splits: Mapping[str, Split]) -> Shorter | None:
    """Leave out parts in the middle that have forms of others; None if that cannot be done.

    `splits` are the files of one op set, the decoder first, all cut at the same places.
    """
    count = len(next(iter(splits.values())).parts)
    forms = [_form(splits, index) for index in range(count)]
    for end in range(1, count):
        for start in range(count - 1, end, -1):
            if forms[end - 1] != forms[start - 1]:
                continue
            if {*forms[end:start]} <= {*forms[:end], *forms[start:]}:
                found = {file: _names(split, end, start) for file, split in splits.items()}
                names = {file: given for file, given in found.items() if given is not None}
                if names.keys() == found.keys():
                    return Shorter(end, start, names)
    return None


def _form(splits: Mapping[str, Split], index: int) -> tuple[object, ...]:
    """A part's form in every file; one that reads other weights than the decoder's has its own."""
    found: list[object] = []
    (decoder, *_) = splits.values()
    for split in splits.values():
        if index < len(split.parts):
            weights, wanted = split.weights(index), decoder.weights(index)
            found.append((split.form(index)[0], weights if weights != wanted else None))
        else:
            found.append(None)
    return tuple(found)


def _names(split: Split, end: int, start: int) -> dict[str, str] | None:
    """What parts from `start` on read of those left out, and what stands for it."""
    if start >= len(split.parts):
        return {}
    left_out = {name for part in split.parts[end:start] for name in part.outputs}
    wanted = {name for part in split.parts[start:] for name in part.inputs} & left_out
    given, made = (split.form(index - 1)[1] for index in (end, start))
    if not wanted <= {*made}:
        return None
    return {name: given[made.index(name)] for name in wanted}
