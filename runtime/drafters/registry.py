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


class Drafters:
    """What can draft for a bundle. Tables are read once and again when their file has changed."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
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
        chosen = self._choose(request, model)
        if not isinstance(chosen, Chain):
            # A caller's own may have a name of ours.
            return {f"own {chosen.name}" if isinstance(chosen, Checked) else chosen.name: chosen}
        lookup, draft = chosen.drafters
        if request.drafter == DrafterName.CHAIN:
            return {chosen.name: chosen, lookup.name: lookup}
        return {one.name: one for one in (draft, lookup, chosen)}

    def _choose(self, request: Request, model: LanguageModel) -> Drafter:
        name, vocab_size = request.drafter, self._bundle.target.vocab_size
        if not isinstance(name, str):
            return Checked(name, vocab_size)
        draft = DraftModel(
            model,
            context_length=self._bundle.draft.context_length,
            vocab_size=self._bundle.draft.vocab_size,
        )
        match name:
            case DrafterName.MODEL:
                return draft
            case DrafterName.LOOKUP:
                return _lookup(request)
            case DrafterName.AUTO | DrafterName.CHAIN:
                return Chain(_lookup(request), draft)
            case DrafterName.BLOCK:
                return Block(draft)
            case DrafterName.RANDOM:
                return Random(vocab_size)
        assert name.startswith(NGRAM), name  # a Request has no other names
        return NGrams(self._read(name.removeprefix(NGRAM)))

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
