"""Pairs of two architectures, vocabularies, contexts or tokenizers, exported and run."""

import pytest

import specedge
from cases import exhaustive, slow
from checkpoints import MARKERS, make_checkpoint, make_instruct_pair, make_tokenizer
from specedge.exporter import Progress, export

CONTEXT = 128


def make_mixed(folder):
    """A gpt2 draft for a llama target, each with another padding of the vocabulary."""
    tokenizer = make_tokenizer(folder / "tokenizer")
    draft = make_checkpoint(
        folder / "draft", "gpt2", tokenizer, vocab_size=640, context=CONTEXT, layers=1
    )
    target = make_checkpoint(
        folder / "target", "llama", tokenizer, 1, vocab_size=520, context=CONTEXT, layers=1
    )
    return draft, target


def make_base_and_instruct(folder):
    """A draft of 48 positions and 512 tokens for a target of 128 and 515."""
    return make_instruct_pair(folder, draft_context=48, context=CONTEXT, noise=0.01, layers=1)


class Made:
    def __init__(self, folder, make):
        progress = Progress()
        self.bundle = export(*make(folder), folder / "bundle", ops="gqa", progress=progress)
        self.notes = [
            note for note in progress.notes if "bitwise" not in note and "license" not in note
        ]
        self.pipeline = specedge.load(self.bundle.folder)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("mixed"), make_mixed)


@pytest.fixture(scope="module")
def instruct(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("instruct"), make_base_and_instruct)


@pytest.fixture(params=[slow("mixed"), exhaustive("instruct")])
def made(request):
    return request.getfixturevalue(request.param)


def prompt(made):
    marked = [512, 40, 513] if made.bundle.target.vocab_size > 512 else [40]
    return [*marked, *range(41, 50)]


@pytest.mark.parametrize("k", [4])
def test_greedy_tokens_equal_plain_decoding_to_last_position(made, k):
    text = prompt(made)
    plain = made.pipeline.generate(text, CONTEXT, num_draft_tokens=0, ignore_eos=True)
    one = made.pipeline.generate(text, CONTEXT, num_draft_tokens=k, ignore_eos=True)
    assert one.tokens == plain.tokens
    assert one.finish_reason == plain.finish_reason == "context"
    assert len(one.tokens) == CONTEXT - len(text)
    assert len(set(one.tokens)) > 10


def test_same_seed_yields_same_text_if_streamed_or_truncated(made):
    options = {"temperature": 0.9, "top_k": 40, "seed": 3, "num_draft_tokens": 4}
    text = prompt(made)
    whole = made.pipeline.generate(text, CONTEXT, ignore_eos=True, **options)
    stream = made.pipeline.stream(text, CONTEXT, ignore_eos=True, **options)
    assert "".join(stream) == whole.text
    assert stream.generation.tokens == whole.tokens
    for count in (1, 35, 36, 37, 60):
        one = made.pipeline.generate(text, count, ignore_eos=True, **options)
        assert one.tokens == whole.tokens[:count]


@pytest.mark.slow
def test_no_id_beyond_tokenizer_is_drafted_or_emitted(mixed):
    for model, columns in ((mixed.bundle.draft, 640), (mixed.bundle.target, 520)):
        assert (model.vocab_size, model.padded_vocab_size) == (512, columns)
    assert [note for note in mixed.notes if "acceptance rate" not in note] == [
        "texts end at <|endoftext|> (0)"
    ]
    assert mixed.pipeline.draft.forward([1, 2]).array().shape == (2, 512)
    one = mixed.pipeline.generate([40, 41], 100, 50.0, seed=1, ignore_eos=True)
    assert max(one.tokens) < 512
    assert len(set(one.tokens)) > 60


@pytest.mark.slow
def test_every_token_of_target_can_be_emitted_though_draft_lacks_some(instruct):
    assert (instruct.bundle.target.vocab_size, instruct.bundle.draft.vocab_size) == (515, 512)
    greedy = instruct.pipeline.generate(prompt(instruct), 100, ignore_eos=True)
    assert max(greedy.tokens) >= 512
    one = instruct.pipeline.generate(prompt(instruct), 100, 0.9, seed=1, ignore_eos=True)
    assert max(one.tokens) >= 512


@pytest.mark.slow
def test_targets_tokenizer_and_template_are_shipped(instruct):
    assert instruct.pipeline.tokenizer.encode(f"{MARKERS[1]}a").ids[0] == 513
    assert "im_start" in instruct.bundle.chat_template
    said = (
        "added tokens differ", "chat template", "48 positions", "512 of the target's 515",
        "acceptance rate", "texts end at",
    )  # fmt: skip
    assert all(word in note for word, note in zip(said, instruct.notes, strict=True))


@pytest.mark.slow
def test_draft_continues_beyond_its_context(instruct):
    """Acceptance decreases there, because the draft sees less context, but drafting continues."""
    one = instruct.pipeline.generate(prompt(instruct), CONTEXT, num_draft_tokens=4, ignore_eos=True)
    length, late = len(prompt(instruct)), []
    for round_ in one.rounds:
        if length > 48:
            late.append(round_)
        length += len(round_.tokens)
    assert length == CONTEXT
    assert sum(round_.num_accepted for round_ in late) > 0
    assert sum(round_.num_drafted for round_ in late) > 2 * len(late)


@pytest.mark.slow
def test_prompt_longer_than_draft_context_is_accepted(instruct):
    text = [40 + i % 50 for i in range(100)]
    plain = instruct.pipeline.generate(text, 20, num_draft_tokens=0, ignore_eos=True)
    one = instruct.pipeline.generate(text, 20, num_draft_tokens=4, ignore_eos=True)
    assert one.tokens == plain.tokens
    assert one.stats.num_drafted > 0
