"""Deterministic lines of prose, code, digits, accents, emoji and white space for tokenizers.

They need nothing but Python, whose own random numbers may differ between versions.
"""

from __future__ import annotations

from collections.abc import Sequence

COUNT = 10_000
_WORDS = [
    "the", "of", "and", "to", "in", "speculative", "decoding", "Model", "HTTPServer", "don't",
    "WE'LL", "they're", "it's", "I'M", "naive", "co-operate", "x", "y", "foo_bar", "camelCase",
    "SCREAMING_CASE", "e.g.", "i.e.", "U.S.A",
]  # fmt: skip
_ACCENTS = [
    "Grüße", "naïve", "café", "Ångström", "Český", "žluťoučký", "résumé", "привет", "Мир",
    "Ελληνικά", "שלום", "مرحبا", "हिन्दी", "ไทย", "你好", "世界", "日本語", "ひらがな", "カタカナ",
    "한국어", "e\u0301", "ﬁn", "ǅ", "İstanbul", "ß", "ẞ",
]  # fmt: skip
_SYMBOLS = [
    "😀", "👩‍🚀", "🏳️‍🌈", "🇩🇪", "❤️", "👍🏽", "∑", "≠", "→", "½", "①", "²", "—", "…", "“", "”",
    "\u00a0", "\u200b", "\u2028", "﷽",
]  # fmt: skip
_CODE = [
    "def f(x):", "    return x[1:]", "if (a && b) {", "\tfor (int i=0;i<10;++i)", "};",
    "#include <stdio.h>", "self.x += 1", "lambda: None", "'it''s'", '"str"', '<div class="a">',
    "</div>", "$HOME", "a<=b", "x**2", "//", "/* c */", "->", "::", "!=", "```py", "\\n", "{{x}}",
    "[[1,2],[3,4]]", "@property", "0x1F", "1e-5", "a|b", "~a", "^", "`id`",
]  # fmt: skip
_SPACES = [
    " ", "  ", "   ", "    ", "        ", "\t", "\t\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\t ",
    "\u3000", "\u2003",
]  # fmt: skip
_MARKERS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|user|>", "[INST]", "<unk>",
    "<0x0A>", "<think>",
]  # fmt: skip
_BETWEEN = [",", ".", "!", "?", ";", ":", "'", '"', "(", ")", "-"]


class _Generator:
    """Linear congruential generator."""

    def __init__(self) -> None:
        self._state = 1

    def below(self, limit: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 33) % limit

    def choice(self, values: Sequence[str]) -> str:
        return values[self.below(len(values))]


def lines(count: int = COUNT) -> list[str]:
    random = _Generator()
    return ["".join(_parts(random)) for _ in range(count)]


def _parts(random: _Generator) -> list[str]:
    parts = []
    for _ in range(1 + random.below(9)):
        which = random.below(16)
        if which in (8, 9):
            parts.append(_number(random))
        else:
            pools = [*[_WORDS] * 5, *[_ACCENTS] * 2, _SYMBOLS, *[_CODE] * 5, _MARKERS, _SPACES]
            pool = pools[which if which < 8 else which - 2 if which < 15 else 14]
            parts.append(random.choice(pool))
        between = [" ", " ", " ", "", random.choice(_SPACES), random.choice(_BETWEEN)]
        parts.append(random.choice(between))
    return parts


def _number(random: _Generator) -> str:
    form = random.below(5)
    if form == 0:
        return str(random.below(10 ** (1 + random.below(9))))
    if form == 1:
        return f"{random.below(10000)},{random.below(1000):03}.{random.below(100)}"
    if form == 2:
        return f"{random.below(24)}:{random.below(60):02}"
    if form == 3:
        return "٣٤٥६७"[random.below(5)] * (1 + random.below(4))
    return "1234567890" * (1 + random.below(3))
