"""Creation of a request's drafters by name, and validation of custom drafters."""

from __future__ import annotations

import math
import operator
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specedge.bundle import Bundle
from specedge.errors import DrafterError
from specedge.request import NGRAM, DrafterName, GenerationRequest
from specedge.sampling_options import Sampling

from ..decoding.protocols import Drafter, LanguageModel
from ..decoding.verification import Draft
from ..sampling.distribution import Distribution, Floats, Ids
from ..sampling.history import History
from . import ngram_files
from .chain import Chain
from .draft_head import create_drafter
from .ngrams import NGramDrafter, NGramTables
from .suffix import MAX_LENGTH, EarlierOutputs, Suffix, SuffixBeforeModel

NEEDS_MODEL = (DrafterName.MODEL, DrafterName.CHAIN)
LOOKUP_MIN, LOOKUP_MAX = 2, 4  # match lengths of prompt lookup


class DrafterRegistry:
    """Drafters for a bundle's requests. N-gram files are read once, and again when they change."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._readings = bundle.readings()
        self.earlier = EarlierOutputs()
        self._tables: dict[str, tuple[tuple[int, ...], NGramTables]] = {}

    def check(self, drafter: object) -> None:
        """Raise DrafterError if a drafter's draft model or file is missing."""
        if self._bundle.draft is None and drafter in NEEDS_MODEL:
            raise DrafterError(
                f"drafter '{drafter}' needs a draft model, which this bundle does not have; use "
                "auto or suffix, or export the target again with --draft"
            )
        if isinstance(drafter, str) and drafter.startswith(NGRAM):
            self._read(drafter.removeprefix(NGRAM))

    def create(self, request: GenerationRequest, model: LanguageModel | None) -> dict[str, Drafter]:
        """Return the drafters that a request may use, by name; the named one comes first.

        Args:
            request: Request with drafter and match lengths.
            model: Draft model of the bundle, None if it has none.

        Raises:
            DrafterError: The drafter's draft model or file is missing.
            ValueError: The match lengths contradict each other.
        """
        name, sizes = request.drafter, self._bundle.draft
        if not isinstance(name, str):
            custom = CustomDrafter(name, self._bundle.target.vocab_size)
            return {f"own {custom.name}": custom}  # its name may be that of a built-in drafter
        self.check(name)
        suffix = self._suffix(request)
        drafters: list[Drafter]
        match name:
            case DrafterName.SUFFIX | DrafterName.LOOKUP:
                drafters = [suffix]
            case DrafterName.RANDOM:
                drafters = [RandomDrafter(self._bundle.target.vocab_size)]
            case DrafterName.AUTO | DrafterName.MODEL | DrafterName.CHAIN:
                if model is None or sizes is None:
                    return {suffix.name: suffix}
                draft = create_drafter(model, sizes, self._readings)
                chain = Chain(SuffixBeforeModel(suffix), draft)
                by_name: dict[str, list[Drafter]] = {
                    DrafterName.AUTO: [draft, suffix, chain],
                    DrafterName.MODEL: [draft],
                    DrafterName.CHAIN: [chain, suffix],
                }
                drafters = by_name[name]
            case _:
                drafters = [NGramDrafter(self._read(name.removeprefix(NGRAM)))]
        return {drafter.name: drafter for drafter in drafters}

    def _suffix(self, request: GenerationRequest) -> Suffix:
        earlier = self.earlier if request.remember else None
        shortest, longest = request.lookup_min, request.lookup_max
        if request.drafter == DrafterName.LOOKUP or shortest or longest:
            shortest = shortest or min(LOOKUP_MIN, longest or LOOKUP_MIN)
            longest = longest or max(LOOKUP_MAX, shortest)
        return Suffix(earlier, min_match=shortest or 1, max_match=longest or MAX_LENGTH)

    def _read(self, name: str) -> NGramTables:
        path = Path(name)
        try:
            status = path.stat()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DrafterError(
                f"{name}: {reason}; specify a file written by 'specedge ngram build'"
            ) from error
        identity = (status.st_size, status.st_mtime_ns, status.st_ino)
        key = os.path.abspath(path)
        if key not in self._tables or self._tables[key][0] != identity:
            self._tables[key] = identity, ngram_files.read(path, self._bundle)
        return self._tables[key][1]


@dataclass(eq=False)
class CustomDrafter(Drafter):
    """Wrapper that validates the drafts of a custom drafter.

    An invalid draft would change the distribution of the text.

    Raises:
        DrafterError: A draft is invalid.
    """

    drafter: Drafter
    vocab_size: int

    @property
    def name(self) -> str:
        return self.drafter.name

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        draft = self.drafter.propose(history, max_tokens, sampling, uniforms)
        tokens = [self._token(token) for token in draft.tokens]
        if len(tokens) > max_tokens:
            raise self._error(f"proposed {len(tokens)} tokens, expected at most {max_tokens}")
        for field, values in (("distributions", draft.probs), ("sources", draft.sources)):
            if values and len(values) != len(tokens):
                raise self._error(f"proposed {len(tokens)} tokens and {len(values)} {field}")
        for i, token in enumerate(tokens):
            distribution = draft.distribution(i)
            if distribution is not None and not sampling.greedy:
                self._check_distribution(distribution, token)
        return Draft(tokens, draft.probs or None, draft.sources)

    def truncate(self, length: int) -> None:
        self.drafter.truncate(length)

    def _token(self, token: object) -> int:
        try:
            number = operator.index(token)  # type: ignore[arg-type]
        except TypeError:
            raise self._error(f"proposed {token!r}, which is not a token id") from None
        if not 0 <= number < self.vocab_size:
            raise self._error(
                f"proposed token {number}, which is not between 0 and {self.vocab_size - 1}"
            )
        return number

    def _check_distribution(self, distribution: Distribution, token: int) -> None:
        ids, size = distribution.ids, self.vocab_size
        count = len(distribution.weights)
        if count > size if ids is None else len(ids) != count:
            raise self._error(f"returned a distribution over {count} tokens, expected {size}")
        if ids is not None and not _ascend(ids, size):
            raise self._error(
                "returned a distribution whose ids do not ascend within the vocabulary"
            )
        total = float(distribution.weights.sum(dtype=float))
        if not (0 < total < math.inf and (distribution.weights >= 0).all()):
            raise self._error(f"returned weights that are negative or add up to {total:g}")
        if not distribution.of(token) > 0:
            raise self._error(f"proposed token {token}, whose probability in its distribution is 0")

    def _error(self, problem: str) -> DrafterError:
        return DrafterError(f"the drafter '{self.name}' {problem}")


def _ascend(ids: Ids, size: int) -> bool:
    is_inside = ((ids >= 0) & (ids < size)).all()
    return bool(is_inside and (ids[1:] > ids[:-1]).all())


class RandomDrafter(Drafter):
    """Drafter of uniformly distributed tokens, which shows the cost of rejected drafts."""

    name = DrafterName.RANDOM
    is_sampled = True

    def __init__(self, vocab_size: int) -> None:
        self._distribution = Distribution(np.full(vocab_size, 1 / vocab_size))

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        tokens = [self._distribution.pick(float(uniforms[i])) for i in range(max_tokens)]
        return Draft(tokens, [self._distribution] * max_tokens)
