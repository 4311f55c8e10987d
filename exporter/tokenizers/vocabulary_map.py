"""Map between the vocabularies of a target and of a draft model with another tokenizer.

Tokens are equal if they add the same bytes to a text, whatever their names are: names differ in
space marks, byte-level spellings and byte fallback. Special tokens add none, so they are never
equal to ordinary text; they are equal by name, and the end tokens by their function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from specedge.bundle.token_readings import TokenReadings
from specedge.errors import PairError
from specedge.token_bytes import FALLBACK, spelled_bytes

_NO_TEXT = 0  # reading of ids without a token
MIN_COVERAGE = 0.3  # share of a text's tokens; drafts that are accepted less often do not pay


@dataclass(frozen=True)
class VocabularyMap:
    """Tokens that target and draft share, and the draft's tokens for each of the target's.

    Attributes:
        target_ids: Shared tokens, ascending. [N]
        draft_ids: The draft's ids of these tokens. [N]
        readings: The draft's tokens for each token of the target.
    """

    target_ids: Sequence[int]
    draft_ids: Sequence[int]
    readings: TokenReadings

    def restricted(self, target_ids: Sequence[int]) -> VocabularyMap:
        """Return the map with some of the shared tokens only."""
        draft_id = dict(zip(self.target_ids, self.draft_ids, strict=True))
        return VocabularyMap(target_ids, [draft_id[t] for t in target_ids], self.readings)

    def describe_coverage(self, tokens: Sequence[int], text_name: str) -> str:
        """Return a description of the overlap on a text's tokens, which are the target's.

        Raises:
            PairError: The draft could propose too few of them.
        """
        if not tokens:
            raise PairError(f"{text_name} has no tokens to compare vocabularies by")
        coverage = float(np.isin(tokens, self.target_ids).mean())
        overlap = (
            f"it can draft {len(self.target_ids)} of the target's {len(self.readings)} tokens, "
            f"which cover {coverage:.1%} of {text_name}"
        )
        if coverage < MIN_COVERAGE:
            raise PairError(
                f"the draft has another tokenizer, and {overlap}; at least {MIN_COVERAGE:.0%} are "
                "required, as others are never accepted; specify another draft"
            )
        return f"the draft has another tokenizer; {overlap}"


def map_vocabularies(
    target: Tokenizer,
    draft: Tokenizer,
    num_tokens: tuple[int, int],
    equal_tokens: Mapping[int, int],
) -> VocabularyMap:
    """Return the map of two tokenizers.

    Of several tokens with the same bytes, the first is shared that is no byte of the byte fallback,
    which encodes other text. A token that the draft lacks is read as the longest tokens that spell
    its bytes, a special token as its name.

    Args:
        target: The target's tokenizer.
        draft: The draft's tokenizer.
        num_tokens: Number of ids of each model.
        equal_tokens: The draft's special tokens that have the function of one of the target's,
            unless there is one of its name.

    Raises:
        PairError: No token is shared.
    """
    of_target, of_draft = map(_Vocabulary.read, (target, draft), num_tokens)
    special = {
        token: of_draft.special[name]
        for name, token in of_target.special.items()
        if name in of_draft.special
    }
    shared = {
        token: of_draft.token_of[text]
        for text, token in of_target.token_of.items()
        if text in of_draft.token_of
    } | special
    for token, draft_token in equal_tokens.items():
        if special.setdefault(token, draft_token) not in shared.values():
            shared[token] = draft_token
    if not shared:
        raise PairError("draft and target have no token in common; specify another draft")
    names = {token: name.encode() for name, token in of_target.special.items()}
    texts = names | of_target.texts
    longest = max(map(len, of_draft.token_of), default=0)
    readings = [
        [special[token]]
        if token in special
        else _encode(texts.get(token, b""), of_draft.token_of, longest) or [_NO_TEXT]
        for token in range(num_tokens[0])
    ]
    target_ids = sorted(shared)
    return VocabularyMap(
        target_ids,
        [shared[token] for token in target_ids],
        TokenReadings.from_lists(readings, added_prefix(draft)),
    )


def added_prefix(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that a tokenizer adds at the beginning of a text."""
    encoding = tokenizer.encode("a")
    return list(encoding.ids[: encoding.special_tokens_mask.index(0)])


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens of a tokenizer.

    Attributes:
        texts: Bytes that each token adds to a text; special tokens and unknown text have none.
        token_of: Token of each string of bytes.
        special: Tokens without bytes by name.
    """

    texts: dict[int, bytes]
    token_of: dict[bytes, int]
    special: dict[str, int]

    @classmethod
    def read(cls, tokenizer: Tokenizer, num_tokens: int) -> _Vocabulary:
        """Return the first `num_tokens` ids of a tokenizer."""
        model: Any = tokenizer.model
        unknown = getattr(model, "unk_token", None)
        hidden = {getattr(model, "unk_id", None), unknown and tokenizer.token_to_id(unknown)}
        added = tokenizer.get_added_tokens_decoder()
        hidden |= {token for token, properties in added.items() if properties.special}
        candidates = {token: tokenizer.id_to_token(token) for token in range(num_tokens)}
        names = {token: name for token, name in candidates.items() if name is not None}
        ordinary = [token for token in names if token not in hidden]
        alone = tokenizer.decode_batch([[token] for token in ordinary])
        # A decoder may remove a space at the beginning of a text.
        repeated = tokenizer.decode_batch([[token, token] for token in ordinary])
        texts = dict[int, bytes]()
        for token, text, twice in zip(ordinary, alone, repeated, strict=True):
            spelled = spelled_bytes(names[token], text)
            raw = twice[len(text) :].encode() if spelled is None else spelled
            if raw:
                texts[token] = raw
        is_fallback = {token: bool(FALLBACK.fullmatch(names[token])) for token in texts}
        token_of = dict[bytes, int]()
        for token in sorted(texts, key=is_fallback.__getitem__):
            token_of.setdefault(texts[token], token)
        special = {name: token for token, name in names.items() if token not in texts}
        return cls(texts, token_of, special)


def _encode(raw: bytes, token_of: Mapping[bytes, int], longest: int) -> list[int]:
    """Return the longest tokens that spell bytes, from left to right, without bytes of no token."""
    tokens, at = list[int](), 0
    while at < len(raw):
        for end in range(min(len(raw), at + longest), at, -1):
            token = token_of.get(raw[at:end])
            if token is not None:
                tokens.append(token)
                break
        at = end
    return tokens
