"""The exact distribution of what the loop writes: every outcome of uniforms on a grid, in
fractions.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import product

from specedge.runtime.decoding import decoding
from specedge.sampling_options import Sampling

LENGTH = 3


def joint_distribution(make, monkeypatch, prompt=(0,), sampling=Sampling(1.0), length=LENGTH):  # noqa: B008
    """The probability of each prompt and 3 tokens that the decoder of `make()` writes after it."""
    end = len(prompt) + length

    def one_round(text):
        def run(uniforms):
            monkeypatch.setattr(decoding, "Uniforms", lambda seed: uniforms)
            left = end - len(text)
            return tuple(next(make().rounds(text, sampling, 0, left)).tokens[:left])

        return explore(run)

    distribution = {prompt: Fraction(1)}
    while any(len(text) < end for text in distribution):
        longer = Counter()
        for text, probability in distribution.items():
            if len(text) == end:
                longer[text] += probability
            else:
                for tokens, share in one_round(text).items():
                    longer[text + tokens] += probability * share
        distribution = longer
    return dict(distribution)


def distribution_of_strings(target_distribution, prompt=(0,), size=3, length=LENGTH):
    """Return the target's distribution of all strings, which `joint_distribution` must equal."""
    distribution = {}
    for string in product(range(size), repeat=length):
        probability = Fraction(1)
        for i in range(length):
            probability *= Fraction(target_distribution((*prompt, *string[:i]))[string[i]])
        if probability:
            distribution[*prompt, *string] = probability
    return distribution


class GridUniforms:
    """Uniforms on a grid of midpoints, chosen when first read; `explore` tries them all."""

    def __init__(self, script, size):
        self.script, self.size, self.read = script, size, {}

    def take(self, count):
        """All of them, for the one round that there is."""
        self.count = count
        return self

    def __getitem__(self, index):
        if isinstance(index, slice):
            start, stop, _ = index.indices(self.count)
            return _Window(self, range(start, stop))
        index %= self.count
        if index not in self.read:
            at = len(self.read)
            self.read[index] = self.script[at] if at < len(self.script) else 0
        return (self.read[index] + 0.5) / self.size


class _Window:
    def __init__(self, parent, indices):
        self.parent, self.indices = parent, indices

    def __getitem__(self, i):
        if isinstance(i, slice):
            return _Window(self.parent, self.indices[i])
        return self.parent[self.indices[i]]


def explore(run, size=4):
    """Every outcome of `run(uniforms)` with its exact probability."""
    outcomes = Counter()
    script = []
    while True:
        uniforms = GridUniforms(script, size)
        outcome = run(uniforms)
        choices = list(uniforms.read.values())
        outcomes[outcome] += Fraction(1, size ** len(choices))
        while choices and choices[-1] == size - 1:
            choices.pop()
        if not choices:
            return outcomes
        script = [*choices[:-1], choices[-1] + 1]
