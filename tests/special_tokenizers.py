"""Small tokenizers with control tokens, of the kinds that models are published with."""

from functools import partial

from tokenizers import (
    AddedToken,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from corpus import train_tokenizer

SPELT = " {0}a {1}\n{0}{1} <think> {2}b {0} "
CONTROLS = {
    "ChatML": ["<|im_start|>", "<|im_end|>"],
    "Llama 2": ["<s>", "</s>"],
    "Llama 3": ["<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "Zephyr": ["</s>", "<|user|>", "<|system|>", "<|assistant|>"],
    "Gemma": ["<s>", "<start_of_turn>", "<end_of_turn>"],
    "tools": ["<s>", "<pad>", "<|user|>", "<|system|>", "<|assistant|>"],
}
FLAGS = {
    "plain": {},
    "stripping": {"lstrip": True, "rstrip": True},
    "normalized": {"normalized": True},
    "single word": {"single_word": True},
}


def trained(*controls, **flags):
    """A small tokenizer with control tokens, `<think>`, and a token before a plain text."""
    made = train_tokenizer(["What is the question? <|user|> start_of_turn im_end"] * 3, 300)
    made.add_special_tokens([AddedToken(control, **flags) for control in controls])
    made.add_special_tokens(["[BOS]"])
    made.add_tokens(["<think>"])
    bos = [("[BOS]", made.token_to_id("[BOS]"))]
    made.post_processor = processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing("[BOS] $A", None, bos)]
    )
    return made


def llama_2(*controls):
    """With SentencePiece's space, as it was first published: control tokens are normalized too."""
    space = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return characters(controls, normalizers.Sequence(space), None, normalized=True)


def llama(*controls):
    """Tokenizer as published later, which adds a space before a text but not before its parts."""
    return characters(controls, None, pre_tokenizers.Metaspace(prepend_scheme="first"))


def gemma(*controls):
    return characters(controls, normalizers.Replace(" ", "▁"), None)


def characters(controls, normalizer, pre_tokenizer, **flags):
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizer or made.normalizer
    made.pre_tokenizer = pre_tokenizer or made.pre_tokenizer
    texts = ["<|im_start|> user <|im_end|> end_of_turn </s> <s> question "] * 9
    alphabet = ["\n", *map(chr, range(33, 127))]
    special = [AddedToken(control, **flags) for control in ["<unk>", *controls]]
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made


TOKENIZERS = {
    **{f"byte-level, {name}": partial(trained, **flags) for name, flags in FLAGS.items()},
    "Llama 2, first": llama_2,
    "Llama": llama,
    "Gemma": gemma,
}
# To these, a template's control tokens are text where they follow a letter, say.
CHOOSY = ("byte-level, single word", "Llama 2, first")


def spelling(name):
    """Chat whose messages contain the control tokens of its template."""
    first, *others = CONTROLS[name]
    text = SPELT.format(first, others[-1], others[0])
    roles = ("user", "assistant", "user")
    return [{"role": role, "content": f"{i}{text}{i}"} for i, role in enumerate(roles)]


def harmless(messages, name):
    """The same chat without a special token's text."""
    made = []
    for message in messages:
        content = message["content"]
        for control in CONTROLS[name]:
            content = content.replace(control, "x")
        made.append(message | {"content": content})
    return made
