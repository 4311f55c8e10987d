"""What proposes tokens for the target to judge: the protocol, the draft model, and chains."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Protocol

from specedge.errors import DrafterError, OptionError
from specedge.options import Sampling

from .distribution import Distribution, Floats, Ids
from .model import LanguageModel
from .past import Past
from .sampling import Draft, draw

STAND_IN = 0


class Drafter(Protocol):
    """Proposes tokens that may follow a text.

    Whatever it proposes, the text keeps the target's law, as long as each token comes with the
    distribution that it was drawn from, given all that came before it. A token that follows from
    what came before without chance is certain.
    """

    @property
    def name(self) -> str:
        """What statistics call its tokens."""
        ...

    def propose(self, past: Past, max_tokens: int, sampling: Sampling, uniforms: Floats) -> Draft:
        """Guess 0 to `max_tokens` tokens that follow `past`; uniforms [max_tokens or more].

        With a smaller `max_tokens` it must be the beginning of the same guess, so that a seed's
        text does not depend on where a request ends. Token i is drawn with uniform i.
        """
        ...

    def truncate(self, length: int) -> None:
        """Forget every token past `length`: the target rejected them. 0 begins another text."""
        ...


def sources(drafter: Drafter, draft: Draft) -> tuple[str, ...]:
    """The drafter's name of each token of its draft. -> [n]"""
    return tuple(draft.sources) or (drafter.name,) * len(draft.tokens)


class DraftModel:
    """Drafts with a smaller language model.

    After a full acceptance its cache is two tokens behind, otherwise one: the first pass of the
    next round feeds both, so a round of n tokens always costs n passes. Where others drafted
    meanwhile it is further behind, and reads what it missed as it reads a prompt.

    The model may know less than the target. A token that it lacks is fed as `STAND_IN`: with none
    there, all that follow would have other positions. When its context is full, it reads a little
    more than the last half of that again from position 0. That depends on the length of the text
    alone, not on `max_tokens`, so a seed's text does not depend on where a request ends.
    """

    name = "model"

    def __init__(
        self,
        model: LanguageModel,
        *,
        context_length: int = sys.maxsize,
        vocab_size: int = sys.maxsize,
    ) -> None:
        self.model = model
        self.context_length = context_length
        self.vocab_size = vocab_size
        self._start = 0  # the place in the text of the cache's first token

    def propose(self, past: Past, max_tokens: int, sampling: Sampling, uniforms: Floats) -> Draft:
        if not max_tokens:
            return Draft([])
        feed, room = self.catch_up(past)
        drafted: list[int] = []
        probs: list[Distribution] = []
        for i in range(min(max_tokens, room)):
            logits = self.model.forward(feed)[-1]
            text = past.then(drafted)
            try:
                token, distribution = draw(logits, sampling, text, float(uniforms[i]))
            except OptionError:  # what the options allow are tokens that the draft does not know
                break
            drafted.append(token)
            if distribution is not None:
                probs.append(distribution)
            feed = [token]
        return Draft(drafted, probs or None)

    def standing(self, length: int, read: int) -> tuple[int, int]:
        """Of a text of that length, how many tokens it has not read after it was asked at `read`
        of them, and how many it may draft.
        """
        start = self._window(length)
        held = read if self._window(read) == start else start
        return length - held, start + self.context_length - length + 1

    def truncate(self, length: int) -> None:
        if length < self._start:
            self._start = 0
            self.model.truncate(0)
        self.model.truncate(min(length - self._start, self.model.length))

    def catch_up(self, past: Past) -> tuple[list[int], int]:
        """Read a text up to its last token or two; these, to be fed, and how many may follow."""
        start = self._window(past.length)
        if start != self._start:
            self._start = start
            self.model.truncate(0)
        feed = self.known(past.last(past.length - start - self.model.length))
        if len(feed) > 2:
            self.model.prefill(feed[:-1])
            feed = feed[-1:]
        return feed, start + self.context_length - past.length + 1

    def _window(self, length: int) -> int:
        """The place of the first token that is read of a text of that length."""
        step = self.context_length - self.context_length // 2
        return max(0, -(-(length - self.context_length) // step) * step)

    def known(self, tokens: Sequence[int]) -> list[int]:
        """The tokens as the model can read them."""
        return [token if token < self.vocab_size else STAND_IN for token in tokens]


class Chain:
    """Asks each drafter in turn to go on where those before it stopped, for the same verify pass.

    The last goes on by one token and then it is the first's turn again: a copy may follow where a
    model has led to a match. One that is not asked in a round catches up when it next is.
    """

    name = "chain"

    def __init__(self, *drafters: Drafter) -> None:
        self.drafters = drafters

    def propose(self, past: Past, max_tokens: int, sampling: Sampling, uniforms: Floats) -> Draft:
        tokens: list[int] = []
        probs: list[Distribution | None] = []
        names: list[str] = []
        going = True
        while going and len(tokens) < max_tokens:
            for drafter in self.drafters:
                if len(tokens) == max_tokens:
                    break
                most = 1 if drafter is self.drafters[-1] else max_tokens - len(tokens)
                text = past.then(tokens) if tokens else past
                rest = uniforms[len(tokens) : max_tokens]
                part = drafter.propose(text, most, sampling, rest)
                tokens += part.tokens
                probs += part.probs or [None] * len(part.tokens)
                names += sources(drafter, part)
                going = bool(part.tokens)
        return Draft(tokens, probs, names)

    def truncate(self, length: int) -> None:
        for drafter in self.drafters:
            drafter.truncate(length)


class Checked:
    """A caller's drafter, whose drafts are checked: else a slip in it would change the law.

    Raises DrafterError.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter = drafter
        self.vocab_size = vocab_size

    @property
    def name(self) -> str:
        return self.drafter.name

    def propose(self, past: Past, max_tokens: int, sampling: Sampling, uniforms: Floats) -> Draft:
        draft = self.drafter.propose(past, max_tokens, sampling, uniforms)
        tokens = [self._token(token) for token in draft.tokens]
        if len(tokens) > max_tokens:
            raise self._error(f"proposed {len(tokens)} tokens, {max_tokens} were asked for")
        for what, values in (("distributions", draft.probs), ("sources", draft.sources)):
            if values and len(values) != len(tokens):
                raise self._error(f"proposed {len(tokens)} tokens and {len(values)} {what}")
        for i, token in enumerate(tokens):
            law = draft.law(i)
            if law is not None and not sampling.greedy:
                self._check_law(law, token)
        return Draft(tokens, draft.probs or None, draft.sources)

    def truncate(self, length: int) -> None:
        self.drafter.truncate(length)

    def _token(self, token: object) -> int:
        try:
            number = operator.index(token)  # type: ignore[arg-type]
        except TypeError:
            raise self._error(f"proposed {token!r}, which is no token") from None
        if not 0 <= number < self.vocab_size:
            raise self._error(
                f"proposed token {number}, which is not between 0 and {self.vocab_size - 1}"
            )
        return number

    def _check_law(self, law: Distribution, token: int) -> None:
        ids, size = law.ids, self.vocab_size
        if len(law.weights) > size if ids is None else len(ids) != len(law.weights):
            raise self._error(
                f"gave a distribution over {len(law.weights)} tokens, not over {size}"
            )
        if ids is not None and not _ascending(ids, size):
            raise self._error("gave a distribution whose ids do not ascend within the vocabulary")
        total = float(law.weights.sum(dtype=float))
        if not (0 < total < math.inf and (law.weights >= 0).all()):
            raise self._error(f"gave weights that are below 0 or add up to {total:g}")
        if not law.of(token) > 0:
            raise self._error(f"proposed token {token}, to which its distribution gives nothing")

    def _error(self, what: str) -> DrafterError:
        return DrafterError(f"the drafter '{self.name}' {what}")


def _ascending(ids: Ids, size: int) -> bool:
    inside = ((ids >= 0) & (ids < size)).all()
    return bool(inside and (ids[1:] > ids[:-1]).all())
