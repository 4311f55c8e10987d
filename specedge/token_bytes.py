"""Bytes that a token's name spells, in byte-level BPE and in SentencePiece's byte fallback."""

from __future__ import annotations

import re

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
# Bytes that byte-level BPE spells by their Latin-1 characters (GPT-2); the others follow U+0100.
_LATIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _LATIN]
_BYTE_OF = {chr(byte): byte for byte in _LATIN} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


def spelled_bytes(name: str, text: str) -> bytes | None:
    """Return the bytes that a token's name spells; None if its text is whole characters.

    Args:
        name: Name of the token in the vocabulary.
        text: Text of the token by itself, in which incomplete characters are U+FFFD.
    """
    if REPLACEMENT not in text:
        return None
    candidates = []
    if match := FALLBACK.fullmatch(name):
        candidates.append(bytes([int(match[1], 16)]))
    if _BYTE_OF.keys() >= set(name):
        candidates.append(bytes(_BYTE_OF[character] for character in name))
    return next((raw for raw in candidates if raw.decode("utf-8", "replace") == text), None)
