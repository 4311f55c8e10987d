"""How often which token followed each run of 1, 2, 4, 8 and 16 tokens.

Runs of other lengths told nothing more on the built-in texts. A run is named by the names of its
two halves (Karp, Miller, Rosenberg 1972): so a token costs five steps, and no hash stands for the
tokens of a run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

HALVES = (1, 2, 4, 8)  # of the runs of more than one token
NUM_LENGTHS = 1 + len(HALVES)
NUM_SHARES = 4  # classes of followers by how often they followed, of all that did

Names = list[int]  # of the runs that end at a place, the shortest first


class Index:
    """Counts of followers; of each run, the most frequent is known, the latest among equals.

    A token adds at most five names and as many counts, some 700 bytes.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._names: dict[int, int] = {}  # a token, or a pair of names, to the name of the run
        self._best = array("q", [0])  # by name, from 1: the most frequent follower,
        self._count = array("q", [0])  # how often it followed,
        self._total = array("q", [0])  # and how often any did
        self._others: dict[int, int] = {}  # a name and another follower, to how often it followed

    def names(self, recent: Sequence[Names], token: int) -> Names:
        """The names of the runs that end with a token, as far as they have occurred.

        `recent` are the names at the places before it, at least those of the last 8.
        """
        found: Names = []
        key = token
        while (name := self._names.get(key)) is not None:
            found.append(name)
            place = len(found) - 1
            if place == len(HALVES) or not (first := _first_half(recent, place)):
                break
            key = first << 32 | name
        return found

    def add(self, recent: Sequence[Names], token: int) -> Names:
        """As `names`, where a token comes to a text of the index: each run has occurred now."""
        if recent:
            self._follow(recent[-1], token)
        self.num_tokens += 1
        names, size, count = self._names, len(self._total), len(recent)
        found: Names = []
        key, place = token, 0
        while True:
            name = names.setdefault(key, size)
            size += name == size
            found.append(name)
            if place == len(HALVES) or (half := HALVES[place]) > count:
                break
            if place >= len(first := recent[-half]):
                break
            key = first[place] << 32 | name
            place += 1
        zeros = bytes(8 * (size - len(self._total)))
        for values in (self._best, self._count, self._total):
            values.frombytes(zeros)
        return found

    def follower(self, names: Names) -> tuple[int, int] | None:
        """What most often followed the longest run that something followed, and its kind.

        The kind is NUM_SHARES times the place of the run's length, and the share's class.
        """
        total = self._total
        for place in range(len(names) - 1, -1, -1):
            name = names[place]
            if times := total[name]:
                share = NUM_SHARES * self._count[name] // (times + 1)
                return self._best[name], NUM_SHARES * place + share
        return None

    def _follow(self, names: Names, token: int) -> None:
        best, counts, total, others = self._best, self._count, self._total, self._others
        for name in names:
            if not total[name]:
                total[name], best[name], counts[name] = 1, token, 1
                continue
            total[name] += 1
            if best[name] == token:
                counts[name] += 1
                continue
            key = name << 32 | token
            count = others.pop(key, 0) + 1
            if count < counts[name]:
                others[key] = count
                continue
            if counts[name]:
                others[name << 32 | best[name]] = counts[name]
            best[name], counts[name] = token, count


def _first_half(recent: Sequence[Names], place: int) -> int:
    """The name of the first half of the run at `place` + 1; 0 if there is none."""
    half = HALVES[place]
    return recent[-half][place] if half <= len(recent) and place < len(recent[-half]) else 0
