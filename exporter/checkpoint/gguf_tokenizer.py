"""Tokenizers of GGUF files, with the rules of llama.cpp.

A file has a vocabulary, token types and, for byte-level BPE, merges. Everything else follows from
the names `tokenizer.ggml.model` and `tokenizer.ggml.pre`, as in llama.cpp's llama-vocab.cpp. Token
ids of every name below are compared with those of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizerFast

from specedge.errors import CheckpointError

SPACE = "\u2581"  # represents a space in SentencePiece vocabularies
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # types of tokens

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_HAN = (
    "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002ebef\uf900-\ufaff"
    "\U0002f800-\U0002fa1f"
)
_CASED_LETTERS = (  # of an older version of Unicode
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫ"
    "ᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭ"
    "ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟"
    "𞤀-𞥃"
)


def _words(numbers: str, letters: str = r"\p{L}", marks: str = "") -> str:
    return (
        rf"{_CONTRACTIONS}|{_BEFORE}{letters}+|{numbers}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_LINES}"
    )


def _cased_words(numbers: str, ending: str) -> str:
    return (
        rf"{_BEFORE}{_UPPER}*{_LOWER}+{ending}|{_BEFORE}{_UPPER}+{_LOWER}*{ending}"
        rf"|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
    )


def _any_words(letters: str, numbers: str) -> str:
    return rf"{_BEFORE}{letters}+{_CONTRACTIONS}?|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"


@dataclass(frozen=True)
class PreTokenizerRules:
    """Splits of a byte-level BPE tokenizer.

    Attributes:
        splits: Patterns that split text one after another; text between matches is kept.
        ignores_merges: True if pieces in the vocabulary are tokens without merges.
        adds_bos: True if BOS is prepended unless the file specifies otherwise.
    """

    splits: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


_DIGITS = PreTokenizerRules((r"\p{N}", _GPT2))
_PLAIN = PreTokenizerRules((_GPT2,))
_LLAMA3 = PreTokenizerRules((_words(r"\p{N}{1,3}"),), ignores_merges=True, adds_bos=True)
_QWEN2 = PreTokenizerRules((_words(r"\p{N}"),))
_GPT4O = PreTokenizerRules((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),))
_DEEPSEEK3 = PreTokenizerRules(
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _LINES,
    )
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
PRE_TOKENIZERS: Mapping[str, PreTokenizerRules] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "midm-2.0"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizerRules(_LLAMA3.splits)),
    "glm4": PreTokenizerRules(_LLAMA3.splits, ignores_merges=True),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _DIGITS,
    ),
    **dict.fromkeys(
        (
            "gpt-2", "phi-2", "mpt", "olmo", "exaone4", "jais", "trillion", "granite-docling",
            "a.x-4.0", "gigachat", "mellum",
        ),
        _PLAIN,
    ),
    **dict.fromkeys(
        (
            "qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "grok-2", "kormo",
            "solar-open",
        ),
        _QWEN2,
    ),
    "qwen35": PreTokenizerRules((_words(r"\p{N}", r"[\p{L}\p{M}]", r"\p{M}"),)),
    "tekken": PreTokenizerRules(
        (_cased_words(r"\p{N}", ""),), ignores_merges=True, adds_bos=True
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), _GPT4O),
    "tiny_aya": PreTokenizerRules(
        (  # digits are grouped from the right, the first group with the text before it
            r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
            _any_words(r"[\p{L}\p{M}]", r"\p{N}{1,3}"),
        )
    ),
    "youtu": PreTokenizerRules(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
            _any_words(r"[\p{L}\p{M}]", r"\p{N}"),
        ),
        ignores_merges=True,
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "deepseek-llm": PreTokenizerRules(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-\ud7ff]+",
            r"\p{N}+",
        )
    ),
    "kimi-k2": PreTokenizerRules(
        (
            rf"[{_HAN}]+|{_BEFORE}[\p{{L}}&&[^{_HAN}]]+{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}",
        )
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizerRules((_BLOOM,))),
    "viking": PreTokenizerRules((_BLOOM, r"\p{N}")),
    "superbpe": PreTokenizerRules((r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))")),
    "minicpm5": PreTokenizerRules(
        (r"\p{N}{1,3}", _words(r"\p{N}+")), ignores_merges=True
    ),
    "exaone-moe": PreTokenizerRules(
        (
            rf"{_CONTRACTIONS}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "jais-2": PreTokenizerRules(
        (
            _words(r"\p{N}{1,3}").removesuffix(r"\s+(?!\S)|\s+")
            + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
            + r"|\s",
        )
    ),
    "deepseek-coder": PreTokenizerRules(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
    ),
    "falcon": PreTokenizerRules(
        (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
    ),
    "default": PreTokenizerRules(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
    ),
    "seed-coder": PreTokenizerRules(
        (
            rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",
        )
    ),
}  # fmt: skip
# Tokens that are control tokens regardless of their type: end of text, and fill-in-the-middle.
_END_NAMES = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
}  # fmt: skip
_INFILL_NAMES = {
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
}  # fmt: skip
_NORMAL_END_MARKERS = {"<|tool_response>", "<|plamo:eos|>"}  # with these </s> is a normal token


def build_tokenizer(where: str, fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Build the tokenizer that a GGUF file's header describes. Raises CheckpointError.

    Args:
        where: Role and name, as in error messages.
        fields: Values of the header's fields.
    """
    vocabulary = _Vocabulary.read(where, fields)
    model = fields.get("tokenizer.ggml.model")
    if model == "gpt2":
        name = fields.get("tokenizer.ggml.pre") or "default"
        if name not in PRE_TOKENIZERS:
            raise CheckpointError(
                f"{where}: its pre-tokenizer '{str(name)[:40]}' is not supported; specify the "
                "original checkpoint"
            )
        rules = PRE_TOKENIZERS[name]
        tokenizer = _byte_level_tokenizer(vocabulary, rules)
        adds_bos = rules.adds_bos
    elif model == "llama":
        adds_bos = True
        tokenizer = _sentencepiece_tokenizer(
            vocabulary, bool(fields.get("tokenizer.ggml.add_space_prefix", True))
        )
    else:
        raise CheckpointError(
            f"{where}: its tokenizer '{str(model)[:40]}' is not supported; specify the "
            "original checkpoint"
        )
    adds_bos = bool(fields.get("tokenizer.ggml.add_bos_token", adds_bos))
    adds_eos = bool(fields.get("tokenizer.ggml.add_eos_token", False))
    _add_special_tokens(tokenizer, vocabulary, str(fields.get("general.name", "")).lower())
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    pieces = [bos if adds_bos else None, "$A", eos if adds_eos else None]
    named = {t: vocabulary.ids[t] for t in (pieces[0], pieces[2]) if t is not None}
    if named:
        template = [piece for piece in pieces if piece is not None]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, pair=[*template, "$B"], special_tokens=list(named.items())
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        unk_token=vocabulary.special("unknown"),
        pad_token=vocabulary.special("padding"),
        chat_template=chat_template(fields),
        clean_up_tokenization_spaces=False,
    )


def chat_template(fields: Mapping[str, Any]) -> str | None:
    """Return the chat template of a header: the unnamed one, or the first named one."""
    names = fields.get("tokenizer.chat_templates")
    keys = ["default", *(names if isinstance(names, list) else [])]
    candidates = [
        fields.get("tokenizer.chat_template"),
        *(fields.get(f"tokenizer.chat_template.{name}") for name in keys),
    ]
    return next((text for text in candidates if isinstance(text, str) and text), None)


def end_tokens(fields: Mapping[str, Any]) -> list[int]:
    """Return the end-of-generation tokens of llama.cpp, the file's EOS first."""
    tokens = fields.get("tokenizer.ggml.tokens") or []
    stated = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = [i for i in stated if isinstance(i, int) and i < len(tokens)]
    by_name = named_end_tokens({token: i for i, token in enumerate(tokens)})
    return list(dict.fromkeys([*ends, *by_name.values()]))


def named_end_tokens(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Return the tokens of a vocabulary that end a text by their names, ascending."""
    ids = sorted((i, token) for token, i in vocabulary.items() if token in _END_NAMES)
    by_name = {token: i for i, token in ids}
    if by_name.keys() >= {"<|return|>", "<|call|>"} or by_name.keys() >= {"<|calls|>", "<|flush|>"}:
        by_name.pop("<|end|>", None)
    if not _NORMAL_END_MARKERS.isdisjoint(vocabulary):
        by_name.pop("</s>", None)
    return by_name


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens by id with their types and scores, merges, and ids of named tokens."""

    tokens: Sequence[str]
    ids: Mapping[str, int]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    named: Mapping[str, int]

    @staticmethod
    def read(where: str, fields: Mapping[str, Any]) -> _Vocabulary:
        stored = fields.get("tokenizer.ggml.tokens")
        if not isinstance(stored, list) or not stored or not isinstance(stored[0], str):
            raise CheckpointError(f"{where} has no vocabulary; specify a complete GGUF file")
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(stored)]
        ids = {token: i for i, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            raise CheckpointError(f"{where} has a token twice in its vocabulary; download it again")
        types = list(fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens))
        scores = fields.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
        if min(len(types), len(scores)) < len(tokens):
            raise CheckpointError(f"{where} lacks types or scores of tokens; download it again")
        control = {ids[token] for token in (_END_NAMES | _INFILL_NAMES) & ids.keys()}
        if not _NORMAL_END_MARKERS.isdisjoint(ids):
            control.discard(ids.get("</s>", -1))
        for i in control:
            types[i] = _CONTROL
        names = ("bos", "eos", "unknown", "padding")
        values = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in names}
        named = {k: v for k, v in values.items() if isinstance(v, int) and 0 <= v < len(tokens)}
        merges = fields.get("tokenizer.ggml.merges") or []
        return _Vocabulary(tokens, ids, types, scores, merges, named)

    def special(self, name: str) -> str | None:
        """Return the token of a role such as "bos"; None if the file has none."""
        return self.tokens[self.named[name]] if name in self.named else None


def _byte_level_tokenizer(vocabulary: _Vocabulary, rules: PreTokenizerRules) -> Tokenizer:
    merges = []
    for merge in vocabulary.merges:
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at > 0 and all(part in vocabulary.ids for part in (left, right, left + right)):
            merges.append((left, right))
    tokenizer = Tokenizer(
        models.BPE(dict(vocabulary.ids), merges, ignore_merges=rules.ignores_merges)
    )
    splits = [pre.Split(Regex(pattern), "isolated") for pattern in rules.splits]
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_tokenizer(vocabulary: _Vocabulary, adds_space: bool) -> Tokenizer:
    """Build character BPE whose merges are ordered by the score of the merged token."""
    tokenizer = Tokenizer(
        models.BPE(
            dict(vocabulary.ids),
            list(_merges_by_score(vocabulary)),
            unk_token=vocabulary.special("unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend(SPACE)] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    stripped = [decoders.Strip(" ", 1, 0)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary) -> Iterator[tuple[str, str]]:
    excluded = (_CONTROL, _BYTE, _UNKNOWN)
    order = sorted(range(len(vocabulary.tokens)), key=lambda i: -vocabulary.scores[i])
    for i in order:
        token = vocabulary.tokens[i]
        if vocabulary.types[i] in excluded:
            continue
        for at in range(1, len(token)):
            if token[:at] in vocabulary.ids and token[at:] in vocabulary.ids:
                yield token[:at], token[at:]


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary, name: str) -> None:
    """Add the tokens that are matched before pre-tokenization."""
    strips = "phi-3" in name or "phi3" in name
    keeps_spaces = {"<unk>", "<s>", "<|endoftext|>"}
    added = []
    for token, type_ in zip(vocabulary.tokens, vocabulary.types, strict=False):
        if type_ in (_CONTROL, _USER_DEFINED, _UNKNOWN):
            added.append(
                AddedToken(
                    token,
                    special=type_ != _USER_DEFINED,
                    normalized=False,
                    rstrip=strips and token not in keeps_spaces,
                )
            )
    tokenizer.add_tokens(added)
