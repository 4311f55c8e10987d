"""An incompatible draft is rejected with an example of the difference."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from transformers import LlamaConfig

from checkpoints import make_tokenizer
from specedge.errors import ExportError, PairError
from specedge.exporter.checkpoint import checkpoints
from specedge.exporter.progress import Progress
from specedge.exporter.tokenizers import compatibility, pair
from specedge.sampling_options import DecodingDefaults, RecommendedSampling


def edit(path, change):
    value = json.loads(path.read_text("utf-8"))
    change(value)
    path.write_text(json.dumps(value), "utf-8")


@pytest.fixture
def both(pairs, tmp_path):
    """Folders of a draft and a target to damage."""
    return [
        shutil.copytree(source, tmp_path / name)
        for name, source in zip(("draft", "target"), pairs.checkpoint("gpt2"), strict=True)
    ]


def fit(both):
    found = [
        checkpoints.find(r, str(f), None) for r, f in zip(("draft", "target"), both, strict=True)
    ]
    progress = Progress()
    return pair.check_pair(*found, progress), progress.notes, found[1]


def swap_tokens(value):
    vocab = value["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def swap_merges(value):
    merges = value["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]


def prefix_space(value):
    value["pre_tokenizer"]["add_prefix_space"] = True


def lowercase(value):
    value["normalizer"] = {"type": "Lowercase"}


def fall_back(value):
    value["model"]["byte_fallback"] = True


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swap_tokens, "vocabularies: 'a' is"),
        (swap_merges, "merges: number"),
        (prefix_space, "pre-tokenizer"),
        (lowercase, "normalizer"),
        (fall_back, "byte_fallback"),
    ],
)
def test_different_tokenizer_is_noted_and_mapped(both, change, said):
    edit(both[0] / "tokenizer.json", change)
    text, notes, _ = fit(both)
    assert said in notes[0]
    assert text.vocabulary is not None
    assert json.loads(text.draft) != json.loads(text.tokenizer)


def test_swapped_tokens_are_mapped_by_their_bytes(both):
    edit(both[0] / "tokenizer.json", swap_tokens)
    text, _, target = fit(both)
    a, b = (target.tokenizer.get_vocab()[token] for token in "ab")
    mapped = dict(zip(text.vocabulary.target_ids, text.vocabulary.draft_ids, strict=True))
    assert mapped == {i: i for i in range(512)} | {a: b, b: a}


def test_another_tokenizer_of_an_encoder_decoder_is_refused(both):
    edit(both[0] / "tokenizer.json", swap_tokens)
    config = SimpleNamespace(is_encoder_decoder=True)
    found = [
        replace(checkpoints.find(role, str(folder), None), config=config)
        for role, folder in zip(("draft", "target"), both, strict=True)
    ]
    with pytest.raises(PairError, match="the draft of an encoder-decoder must have its tokenizer"):
        pair.check_pair(*found, Progress())


def added(id_, content, **flags):
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": id_, "content": content} | dict.fromkeys(names, False) | flags


def markers(value):
    for i, content in enumerate(("<|im_start|>", "<|im_end|>", "<|tool|>")):
        value["added_tokens"].append(added(512 + i, content, special=True))


def reserved(value):
    value["added_tokens"].append(added(512, "<|reserved_0|>", special=True))


def python_tag(value):
    value["added_tokens"].append(added(512, "<|python_tag|>", special=True))


def flags(value):
    value["added_tokens"][0]["lstrip"] = True


def nothing(value):
    pass


def offsets(value):
    value["pre_tokenizer"]["trim_offsets"] = not value["pre_tokenizer"]["trim_offsets"]
    value["model"]["continuing_subword_prefix"] = ""


def a_piece_becomes_a_marker(value):
    vocab = value["model"]["vocab"]
    vocab["<|tool|>"] = vocab.pop(next(t for t, i in vocab.items() if i == 511))
    value["added_tokens"].append(added(511, "<|tool|>", special=True))


@pytest.mark.parametrize(
    ("draft", "target", "said"),
    [
        (nothing, markers, "3 only in the target's (such as 512 <|im_start|>)"),
        (markers, nothing, "3 only in the draft's (such as 512 <|im_start|>)"),
        (reserved, python_tag, "1 with another name (such as 512 <|python_tag|> in the target's "),
        (flags, nothing, "1 with other flags (such as 0 <|endoftext|>)"),
        (nothing, offsets, None),
    ],
)
def test_different_added_tokens_are_accepted_with_note(both, draft, target, said):
    """Nor does it matter how tokens are placed in the text, or whether "" or null says nothing."""
    for folder, change in zip(both, (draft, target), strict=True):
        edit(folder / "tokenizer.json", change)
    text, notes, found = fit(both)
    assert len(notes) == (said is not None)
    assert all(said in note and "affects speed only" in note for note in notes)
    assert (
        json.loads(text.tokenizer)["added_tokens"]
        == (json.loads(found.tokenizer.backend_tokenizer.to_str())["added_tokens"])
    )


def test_regular_token_replaced_by_special_token_is_accepted(both):
    edit(both[1] / "tokenizer.json", lambda value: value["model"]["merges"].pop())
    edit(both[0] / "tokenizer.json", lambda value: value["model"]["merges"].pop())
    edit(both[1] / "tokenizer.json", a_piece_becomes_a_marker)
    _, notes, _ = fit(both)
    assert "1 with another name (such as 511 <|tool|>" in notes[0]


def test_scores_of_unigram_pieces_must_agree():
    def settings(score):
        vocab = [["<unk>", 0.0], ["a", -1.0], ["b", score]]
        return {"model": {"type": "Unigram", "unk_id": 0, "vocab": vocab}, "added_tokens": []}

    assert compatibility.compare(settings(-2.0), settings(-2.0)) == []
    with pytest.raises(PairError, match=r"'b' is 2 with score -2\.0 in the target's"):
        compatibility.compare(settings(-2.0), settings(-3.0))


def test_different_post_processor_and_decoder_are_noted(both):
    def change(value):
        value["post_processor"] = {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        }
        value["decoder"] = {"type": "Fuse"}

    edit(both[0] / "tokenizer.json", change)
    _, notes, _ = fit(both)
    assert all(word in note for word, note in zip(("special", "decodes"), notes, strict=True))


@pytest.mark.parametrize(
    ("num_tokens", "target", "draft", "sizes", "noted"),
    [
        (512, 512, 512, (512, 512), 0),
        (512, 520, 640, (512, 512), 0),
        (515, 520, 512, (515, 512), 1),
        (515, 512, 640, (512, 512), 1),
        (515, 513, 512, (513, 512), 2),
    ],
)
def test_vocabulary_size_is_limited_by_embedding_rows(num_tokens, target, draft, sizes, noted):
    progress = Progress()
    assert pair.vocab_sizes(num_tokens, [target, draft], progress) == [*sizes]
    assert len(progress.notes) == noted


@pytest.mark.parametrize(
    ("target", "draft", "lengths", "noted"),
    [(128, 128, (128, 128), 0), (128, 48, (128, 48), 1), (48, 128, (48, 48), 0)],
)
def test_draft_has_no_more_positions_than_its_target(both, target, draft, lengths, noted):
    for folder, length in zip(both, (draft, target), strict=True):
        edit(folder / "config.json", lambda value, n=length: value.update(n_positions=n))
    found = [checkpoints.find(r, str(f), None) for r, f in zip("dt", both, strict=True)]
    progress = Progress()
    assert pair.context_lengths(found[1], found[0], None, progress) == lengths
    assert len(progress.notes) == noted


def test_padding_and_truncation_settings_are_dropped(both, tmp_path):
    settings = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    edit(both[1] / "tokenizer.json", lambda value: value.update(truncation=settings))
    text, notes, target = fit(both)
    assert notes == []
    pair.write_tokenizer(text, target, tmp_path)
    shipped = Tokenizer.from_file(str(tmp_path / pair.TOKENIZER_FILE))
    assert len(shipped.encode("one two three four five").ids) > 3


def test_other_end_tokens_and_chat_templates_are_noted(both):
    edit(both[0] / "generation_config.json", lambda value: value.update(eos_token_id=[0, 7]))
    (both[0] / "chat_template.jinja").write_text("{{ messages }}", "utf-8")
    _, notes, _ = fit(both)
    assert all(word in note for word, note in zip(("ends at", "template"), notes, strict=True))


CHATML = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def end_tokens(folder):
    """End tokens of a checkpoint, and the note that an export prints of them."""
    checkpoint, progress = checkpoints.find("target", str(folder), None), Progress()
    ends = pair.end_tokens(checkpoint)
    pair.note_end_tokens(checkpoint, ends, progress)
    (note,) = progress.notes
    return ends, note


def test_end_tokens_come_from_generation_config_then_config(both):
    folder = both[1]
    edit(folder / "generation_config.json", lambda value: value.update(eos_token_id=[5, 0, 5]))
    ends, note = end_tokens(folder)
    assert ends == (5, 0)
    assert note.startswith("texts end at ")
    assert note.endswith(" (5) or <|endoftext|> (0)")
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", lambda value: value.update(eos_token_id=[0, 9]))
    assert end_tokens(folder)[0] == (0, 9)


def remove_end_tokens(folder):
    for name in ("config.json", "generation_config.json"):
        edit(folder / name, lambda value: value.update(eos_token_id=None))


@pytest.mark.parametrize("stated", [None, 9, 0])
def test_end_tokens_of_tokenizer_and_chat_template_are_added(both, stated):
    """By the names that GGUF files are searched for."""
    folder = both[1]
    edit(folder / "tokenizer.json", markers)
    (folder / "chat_template.jinja").write_text(CHATML, "utf-8")
    remove_end_tokens(folder)
    if stated is not None:
        edit(folder / "config.json", lambda value: value.update(eos_token_id=stated))
    ends, note = end_tokens(folder)
    assert ends == tuple(dict.fromkeys([*([] if stated is None else [stated]), 0, 513]))
    assert "<|im_end|> (513)" in note
    assert "of which its config lacks " in note


def test_end_tokens_of_complete_config_are_all(both):
    """Another token with an end token's name does not end texts if no template uses it."""
    edit(both[1] / "tokenizer.json", markers)
    assert end_tokens(both[1])[0] == (0,)


def test_tokenizer_without_end_token_is_noted(both):
    remove_end_tokens(both[1])
    for name in ("bos_token", "eos_token"):
        edit(both[1] / "tokenizer_config.json", lambda value, name=name: value.pop(name))
    edit(both[1] / "tokenizer.json", lambda value: rename(value, "<|endoftext|>", "<|start|>"))
    ends, note = end_tokens(both[1])
    assert ends == ()
    assert "no end token" in note


def rename(value, old, new):
    value["model"]["vocab"][new] = value["model"]["vocab"].pop(old)
    for token in value["added_tokens"]:
        token["content"] = new if token["content"] == old else token["content"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}, (0.7, 20, 0.8)),
        ({"temperature": 0.6, "top_p": 0.9}, (0.6, 0, 0.9)),
        ({"do_sample": False, "top_k": 20}, (1.0, 20)),
        ({"repetition_penalty": 1.1}, (1.0, 0, 1.0, 0.0, 1.1)),
        ({"temperature": None, "min_p": 0.1, "top_k": -1}, (1.0, 0, 1.0, 0.1)),
        ({"do_sample": True}, ()),
        ({"temperature": 0.0, "top_p": 0.9}, ()),
    ],
)
def test_default_sampling_is_generation_configs_as_in_vllm(both, config, expected):
    """Its `get_diff_sampling_param` does not read `do_sample`."""
    edit(both[1] / "generation_config.json", lambda value: value.update(config))
    checkpoint = checkpoints.find("target", str(both[1]), None)
    assert pair.default_sampling(checkpoint) == RecommendedSampling(*expected)


def test_invalid_default_sampling_is_refused(both):
    edit(both[1] / "generation_config.json", lambda value: value.update(top_p=2))
    with pytest.raises(ExportError, match=r"generation_config\.json of .*: top_p must be"):
        pair.default_sampling(checkpoints.find("target", str(both[1]), None))


BART = {
    "num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "min_length": 56,
    "max_length": 142, "no_repeat_ngram_size": 3, "forced_bos_token_id": 0,
    "suppress_tokens": [1, 2, 99], "begin_suppress_tokens": None,
}  # fmt: skip


def encoder_decoder(**checkpoint):
    config = SimpleNamespace(is_encoder_decoder=True)
    return SimpleNamespace(config=config, name="bart", **checkpoint)


@pytest.mark.parametrize(("generation", "raw"), [(BART, {}), ({}, BART)])
def test_decoding_defaults_are_those_of_the_generation_config(generation, raw):
    notes = Progress()
    checkpoint = encoder_decoder(generation=generation, raw=raw)
    assert pair.decoding_defaults(checkpoint, 50, notes) == DecodingDefaults(3, (1, 2))
    assert [note.partition(";")[0] for note in notes.notes] == [
        "ignored values of the generation config: num_beams 4, length_penalty 2.0, "
        "early_stopping True, min_length 56"
    ]
    plain = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False, "min_length": 0}
    checkpoint = encoder_decoder(generation=plain, raw=BART)
    assert pair.decoding_defaults(checkpoint, 50, Progress()) == DecodingDefaults()
    assert len(notes.notes) == 1


@pytest.mark.parametrize("value", ["3", -1, 2.5])
def test_invalid_decoding_defaults_are_refused(value):
    checkpoint = encoder_decoder(generation={"no_repeat_ngram_size": value}, raw={})
    with pytest.raises(ExportError, match=r"generation config of bart: .*no_repeat_ngram_size"):
        pair.decoding_defaults(checkpoint, 50, Progress())


def test_long_context_is_cut_with_note(both):
    edit(both[1] / "config.json", lambda value: value.update(n_positions=9000))
    target, progress = checkpoints.find("target", str(both[1]), None), Progress()
    assert pair.context_length(target, 6000, progress) == 6000
    assert progress.notes == []
    assert pair.context_length(target, None, progress) == 4096
    assert "--max-length" in progress.notes[0]
    assert pair.context_length(target, 10000, progress) == 9000


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("rope", "own", "asked", "taken"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 4096, 6000, 6000),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096, 9000, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 2048, None, 2048),
        (YARN, 512, 9000, 2048),
        (YARN, 2048, 9000, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 4096, 6000, 4096),
    ],
)
def test_context_is_limited_by_rotary_scaling(rope, own, asked, taken):
    config = LlamaConfig(max_position_embeddings=own, rope_parameters={"rope_theta": 1e4, **rope})
    found = SimpleNamespace(config=config, name="x")
    assert pair.context_length(found, asked, Progress()) == taken


@pytest.mark.parametrize(
    ("template", "works"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", True),
        ("{{ messages[0]['content'][0]['text']['a'] }}", False),
    ],
)
def test_chat_template_without_plain_text_support_is_skipped_with_note(template, works, tmp_path):
    tokenizer, progress = make_tokenizer(tmp_path), Progress()
    tokenizer.chat_template = template
    render = pair.chat_writer(SimpleNamespace(tokenizer=tokenizer), progress)
    assert (render is not None) is works
    assert len(progress.notes) == (not works)
