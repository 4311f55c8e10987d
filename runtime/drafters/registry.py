"""From a drafter's name, or a caller's own, to what drafts for one request."""

from __future__ import annotations

import os
from pathlib import Path

from specedge.bundle import Bundle
from specedge.errors import DrafterError
from specedge.request import NGRAM, DrafterName, Request

from ..loop.model import LanguageModel
from ..loop.round import Drafter
from . import ngram_files
from .baselines import Block, Random
from .chain import Chain
from .checked import Checked
from .draft_model import DraftModel
from .ngrams import NGrams, Tables
from .prompt_lookup import MIN_MATCH, Lookup
from .suffix import Remembered, Suffix


class Drafters:
    """What can draft for a bundle. Tables are read once and again when their file has changed."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self.remembered = Remembered()
        self._tables: dict[str, tuple[tuple[int, ...], Tables]] = {}

    def check(self, drafter: object) -> None:
        """DrafterError if the file that a drafter's name names cannot be used."""
        if isinstance(drafter, str) and drafter.startswith(NGRAM):
            self._read(drafter.removeprefix(NGRAM))

    def offered(self, request: Request, model: LanguageModel) -> dict[str, Drafter]:
        """The drafters that a request may use, by name, the one that it names first.

        `model` is the bundle's draft. Raises DrafterError, and ValueError for match lengths that
        contradict each other.
        """
        name, sizes = request.drafter, self._bundle.draft
        if not isinstance(name, str):
            own = Checked(name, self._bundle.target.vocab_size)
            return {f"own {own.name}": own}  # its name may be one of ours
        draft = DraftModel(model, context_length=sizes.context_length, vocab_size=sizes.vocab_size)
        found: list[Drafter]
        match name:
            case DrafterName.MODEL:
                found = [draft]
            case DrafterName.SUFFIX:
                found = [self._suffix(request)]
            case DrafterName.LOOKUP:
                found = [_lookup(request)]
            case DrafterName.AUTO:
                copier = self._copier(request)
                found = [draft, copier, Chain(copier, draft)]
            case DrafterName.CHAIN:
                copier = self._copier(request)
                found = [Chain(copier, draft), copier]
            case DrafterName.BLOCK:
                found = [Block(draft)]
            case DrafterName.RANDOM:
                found = [Random(self._bundle.target.vocab_size)]
            case _:
                assert name.startswith(NGRAM), name  # a Request has no other names
                found = [NGrams(self._read(name.removeprefix(NGRAM)))]
        return {one.name: one for one in found}

    def _copier(self, request: Request) -> Drafter:
        """What copies beside the model: lookup if lengths of matches are given, which it has."""
        if request.lookup_min or request.lookup_max:
            return _lookup(request)
        return self._suffix(request, before_model=True)

    def _suffix(self, request: Request, before_model: bool = False) -> Suffix:
        return Suffix(self.remembered if request.remember else None, before_model)

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


def _lookup(request: Request) -> Lookup:
    """A lookup of the lengths asked for; of one alone given, the other gives way."""
    shortest, longest = request.lookup_min, request.lookup_max
    if shortest is None:
        shortest = MIN_MATCH if longest is None else min(MIN_MATCH, longest)
    return Lookup(shortest, longest)
