"""Small tokenizers of each kind of model and decoder, and texts of whole characters in tokens."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from corpus import train_tokenizer

SHOWN, HIDDEN = "<think>", "<s>"
WORDS = ["▁", "▁def", "▁x", "x", "▁=", "1", "▁▁", "'t", "."]
CHARACTERS = "é한❤😀"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _strips_first_space():
    replace = decoders.Replace("▁", " ")
    parts = [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(parts)


def _byte_fallback(decoder):
    """SentencePiece BPE, whose unknown characters are bytes."""
    vocab = {token: i for i, token in enumerate([*_BYTES, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoder
    return tokenizer


def _unigram():
    pieces = ["<unk>", *_BYTES, *WORDS]
    model = models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def _word_piece():
    words = ["[UNK]", "def", "##x", "x", "=", "1", "'", "t", ".", "'t", "é", "##한"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _word_level():
    vocab = {word: i for i, word in enumerate(["<unk>", "def", "x", "=", "é"])}
    return Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))


def _with_special(tokenizer):
    tokenizer.add_special_tokens([AddedToken(SHOWN), AddedToken(HIDDEN)])
    return tokenizer


METASPACE = _with_special(_byte_fallback(_strips_first_space()))
KINDS = {
    "byte-level": _with_special(train_tokenizer(["def naïve café, x = 1 🎉 한국어"] * 3, 300)),
    "Llama 2": METASPACE,
    "Gemma": _with_special(
        _byte_fallback(
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            )
        )
    ),
    "T5": _with_special(_unigram()),
    "WordPiece": _with_special(_word_piece()),
    "words": _with_special(_word_level()),
}


def visible(name):
    return KINDS[name].token_to_id(SHOWN)


def units_of(name):
    """Token lists that are whole characters each: tokens, byte runs, hidden special tokens."""
    tokenizer = KINDS[name]
    hidden = tokenizer.token_to_id(HIDDEN)
    units = [[hidden], [tokenizer.token_to_id(SHOWN)]]
    texts = {i: tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())}
    units += [[i] for i, text in texts.items() if text and "\ufffd" not in text]
    if tokenizer.token_to_id(_BYTES[0]) is not None:
        units += [[tokenizer.token_to_id(f"<0x{b:02X}>") for b in c.encode()] for c in CHARACTERS]
    elif name == "byte-level":
        units += [tokenizer.encode(c).ids for c in CHARACTERS]
    return units + units[-4:] * 9  # characters of several tokens as often as others
