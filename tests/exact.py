"""The exact distribution of what the loop writes: every outcome of its uniforms, in fractions."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import product
from math import prod

from specedge.runtime.decoding import decoding
from specedge.runtime.sampling.distribution import Distribution
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling

LENGTH = 3
UNFILTERED = Sampling(1.0)


def joint_distribution(make, monkeypatch, prompt=(0,), sampling=UNFILTERED, length=LENGTH):
    """The probability of each prompt and 3 tokens that the decoder of `make()` writes after it."""
    end = len(prompt) + length

    def one_round(text):
        def run(uniforms):
            monkeypatch.setattr(decoding, "Uniforms", lambda seed: uniforms)
            left = end - len(text)
            return tuple(next(make().rounds(text, sampling, 0, left)).tokens[:left])

        return explore(run, monkeypatch)

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


class ContinuedText:
    """A decoder whose first round continues a text, with the states of all tokens but the last."""

    def __init__(self, decoder):
        self.decoder = decoder

    def rounds(self, text, sampling, seed, left):
        decoder, plan = self.decoder, self.decoder.plan
        history = History(text[:1], text[1:])
        observer = plan.begin(history)
        decoder.target.prefill(text[:-1])
        observer.begin(history, 0)
        observer.observe(0, decoder.target.hidden)
        decoder._observer = observer
        numbers = decoding.Uniforms(seed).take(2 * plan.max_draft_tokens + 1)
        steps = decoder._round(plan.next(history, left), history, sampling, numbers, left, None, 1)
        result = None
        while True:
            try:
                result = steps.send(result).run()
            except StopIteration as end:
                yield end.value
                return


class Branches:
    """Choices of one run, taken from a script and then the first possible one; see `explore`."""

    def __init__(self, script):
        self.script, self.taken, self.read = script, [], set()

    def take(self, count):
        """Return the uniforms of the one round that there is."""
        return _Window(self, range(count))

    def use(self, index):
        """Note that a uniform was used, for the first time."""
        assert index not in self.read, "a uniform is used twice"
        self.read.add(index)

    def choose(self, shares):
        """Return the index of an outcome; shares are the outcomes' probabilities."""
        shares = [fraction(share) for share in shares]
        assert sum(shares) == 1
        possible = [i for i, share in enumerate(shares) if share]
        at = len(self.taken)
        choice = self.script[at] if at < len(self.script) else 0
        self.taken.append((choice, len(possible), shares[possible[choice]]))
        return possible[choice]


def fraction(value):
    """Return the fraction that a rounded number stands for."""
    exact = Fraction(float(value)).limit_denominator(4096)
    assert abs(exact - Fraction(float(value))) < 1e-6, f"{value} is no simple fraction"
    return exact


class _Window:
    def __init__(self, branches, indices):
        self.branches, self.indices = branches, indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return _Window(self.branches, self.indices[i])
        return _Uniform(self.branches, self.indices[i])


class _Uniform:
    """Uniform number that is known by its outcomes only: of one comparison u f < b, or one draw."""

    def __init__(self, branches, index, factor=1.0):
        self.branches, self.index, self.factor = branches, index, factor

    def __mul__(self, factor):
        return _Uniform(self.branches, self.index, self.factor * factor)

    __rmul__ = __mul__

    def __lt__(self, bound):
        self.branches.use(self.index)
        share = min(1.0, bound / self.factor) if self.factor else float(bound > 0)
        return self.branches.choose([share, 1 - fraction(share)]) == 0

    def __float__(self):
        return float(self.index)  # by which `pick` knows it


def explore(run, monkeypatch):
    """Return every outcome of `run(uniforms)` with its exact probability."""
    outcomes, script = Counter(), []
    while True:
        branches = Branches(script)

        def pick(distribution, index, branches=branches):
            branches.use(int(index))
            at = branches.choose(distribution.weights / distribution.weights.sum())
            return at if distribution.ids is None else int(distribution.ids[at])

        monkeypatch.setattr(Distribution, "pick", pick)
        outcome = run(branches)
        outcomes[outcome] += prod((share for *_, share in branches.taken), start=Fraction(1))
        script = [choice for choice, *_ in branches.taken]
        while script and script[-1] == branches.taken[len(script) - 1][1] - 1:
            script.pop()
        if not script:
            return outcomes
        script[-1] += 1
