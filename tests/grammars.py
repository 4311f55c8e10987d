"""Small grammars, with allowed tokens derived by enumerating all their texts."""

from __future__ import annotations

from functools import partial

from specedge.runtime.text.grammars import GrammarConstraint, compiled

TOKENS = [b"a", b"b", b"c", b"<end>"]
END = 3


class _Few:
    """Tokenizer interface of llguidance."""

    eos_token_id, bos_token_id, special_token_ids = END, None, (END,)

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, text):
        text = text if isinstance(text, bytes) else text.encode()
        return [self.tokens.index(bytes([letter])) for letter in text]


def constraint(kind, text, tokens=TOKENS, ends=(END,)):
    """Build a grammar of a type over a few tokens."""
    import llguidance

    known = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Few(tokens)), n_vocab=len(tokens), eos_token=list(ends)
    )
    renew = partial(compiled, known, kind, text)
    return GrammarConstraint(renew(), len(tokens), ends, renew)


def allowed_of(texts, new):
    """The tokens that may follow new ones, where a grammar has these texts of tokens."""
    if END in new:
        return [END]
    longer = [text for text in texts if len(text) > len(new) and text[: len(new)] == new]
    going_on = {text[len(new)] for text in longer}
    return sorted(going_on | ({END} if new in texts else set()))


def texts_of(*words):
    return {tuple(b"abc".index(letter) for letter in word.encode()) for word in words}
