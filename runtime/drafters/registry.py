"""From a drafter's name, or a caller's own, to what drafts for one request."""

from __future__ import annotations

import os
from pathlib import Path

from specedge.bundle import Bundle
from specedge.errors import DrafterError
from specedge.request import NGRAM, DrafterName, GenerationRequest

from ..decoding.protocols import Drafter, LanguageModel
from . import ngram_files
from .baselines import Block, Random
from .chain import Chain
from .checked import Checked
from .draft_model import DraftModel
from .ngrams import NGrams, Tables
from .prompt_lookup import MIN_MATCH, Lookup
from .suffix import Remembered, Suffix

NEEDS_MODEL = (DrafterName.MODEL, DrafterName.CHAIN, DrafterName.BLOCK)


class Drafters:
    """What can draft for a bundle. Tables are read once and again when their file has changed."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self.remembered = Remembered()
        self._tables: dict[str, tuple[tuple[int, ...], Tables]] = {}

    def check(self, drafter: object) -> None:
        """Raise DrafterError for a drafter whose draft model or file is not there."""
        if self._bundle.draft is None and drafter in NEEDS_MODEL:
            raise DrafterError(
                f"drafter '{drafter}' needs a draft model, which this bundle does not have; take "
                "auto or suffix, or export the target again with --draft"
            )
        if isinstance(drafter, str) and drafter.startswith(NGRAM):
            self._read(drafter.removeprefix(NGRAM))

    def offered(
        self, request: GenerationRequest, model: LanguageModel | None
    ) -> dict[str, Drafter]:
        """Return the drafters that a request may use, by name, the one that it names first.

        `model` is the bundle's draft model, None where it has none. Raises DrafterError, also for a
        drafter that needs a draft model where there is none, and ValueError for match lengths that
        contradict each other.
        """
        name, sizes = request.drafter, self._bundle.draft
        if not isinstance(name, str):
            own = Checked(name, self._bundle.target.vocab_size)
            return {f"own {own.name}": own}  # its name may be one of ours
        if model is None or sizes is None:
            return {one.name: one for one in self._without_model(name, request)}
        draft = DraftModel(model, context_length=sizes.context_length, vocab_size=sizes.vocab_size)
        found: list[Drafter]
        match name:
            case DrafterName.MODEL:
                found = [draft]
            case DrafterName.AUTO:
                copier, before_model = self._copiers(request)
                found = [draft, copier, Chain(before_model, draft)]
            case DrafterName.CHAIN:
                copier, before_model = self._copiers(request)
                found = [Chain(before_model, draft), copier]
            case DrafterName.BLOCK:
                found = [Block(draft)]
            case _:
                found = self._without_model(name, request)
        return {one.name: one for one in found}

    def _without_model(self, name: str, request: GenerationRequest) -> list[Drafter]:
        """Return the drafters of a name that need no draft model. Raises DrafterError."""
        match name:
            case DrafterName.SUFFIX:
                return [self._suffix(request)]
            case DrafterName.LOOKUP:
                return [_lookup(request)]
            case DrafterName.AUTO:
                return [self._copiers(request)[0]]
            case DrafterName.RANDOM:
                return [Random(self._bundle.target.vocab_size)]
        self.check(name)
        assert name.startswith(NGRAM), name  # a Request has no other names
        return [NGrams(self._read(name.removeprefix(NGRAM)))]

    def _copiers(self, request: GenerationRequest) -> tuple[Drafter, Drafter]:
        """Return what copies alone and before the model: lookup if lengths of matches are given,
        which it has.
        """
        if request.lookup_min or request.lookup_max:
            lookup = _lookup(request)
            return lookup, lookup
        suffix = self._suffix(request)
        return suffix, suffix.for_chain()

    def _suffix(self, request: GenerationRequest) -> Suffix:
        return Suffix(self.remembered if request.remember else None)

    def _read(self, name: str) -> Tables:
        path = Path(name)
        try:
            facts = path.stat()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DrafterError(
                f"{name}: {reason}; name a file made by 'specedge ngram build'"
            ) from error
        identity = (facts.st_size, facts.st_mtime_ns, facts.st_ino)
        where = os.path.abspath(path)
        if where not in self._tables or self._tables[where][0] != identity:
            self._tables[where] = identity, ngram_files.read(path, self._bundle)
        return self._tables[where][1]


def _lookup(request: GenerationRequest) -> Lookup:
    """A lookup of the lengths asked for; of one alone given, the other gives way."""
    shortest, longest = request.lookup_min, request.lookup_max
    if shortest is None:
        shortest = MIN_MATCH if longest is None else min(MIN_MATCH, longest)
    return Lookup(shortest, longest)
