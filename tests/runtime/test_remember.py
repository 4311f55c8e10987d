"""Drafting from remembered outputs does not change greedy text."""

import threading

import pytest

PROMPT = "def read_config(path):"


@pytest.fixture(autouse=True)
def forgetful(pipeline):
    pipeline.forget()
    yield
    pipeline.forget()


def sizes(pipeline):
    return [index.num_tokens for index in pipeline.drafters.earlier.indexes]


@pytest.mark.parametrize("drafter", ["suffix", "auto"])
def test_greedy_text_does_not_depend_on_remembered_outputs(pipeline, drafter):
    plain = pipeline.generate(PROMPT, 40, num_draft_tokens=0, ignore_eos=True).tokens
    options = {"drafter": drafter, "remember": True, "ignore_eos": True}
    rounds = []
    for _ in range(3):
        made = pipeline.generate(PROMPT, 40, **options)
        assert made.tokens == plain
        rounds.append(made.stats.num_rounds)
    assert rounds[1] < rounds[0] or drafter != "suffix"
    assert pipeline.generate(PROMPT, 40, ignore_eos=True).tokens == plain


def test_only_requests_with_remember_are_remembered(pipeline):
    pipeline.generate(PROMPT, 20, drafter="suffix", ignore_eos=True)
    assert sizes(pipeline) == [0, 0]
    alone = pipeline.generate(PROMPT, 20, drafter="suffix", ignore_eos=True).rounds
    made = pipeline.generate(PROMPT, 20, num_draft_tokens=0, remember=True, ignore_eos=True)
    assert sizes(pipeline) == [len(made.tokens), 0]
    again = pipeline.generate(PROMPT, 20, drafter="suffix", ignore_eos=True)
    assert again.rounds == alone
    asked = pipeline.generate(PROMPT, 20, drafter="suffix", ignore_eos=True, remember=True)
    assert asked.stats.num_rounds < again.stats.num_rounds


def test_unfinished_texts_are_not_remembered(pipeline):
    stream = pipeline.stream(PROMPT, 40, remember=True, ignore_eos=True)
    next(stream)
    stream.close()
    assert sizes(pipeline) == [0, 0]


def test_whole_output_is_remembered(pipeline):
    made = pipeline.generate(PROMPT, 7, drafter="suffix", remember=True, ignore_eos=True)
    assert sizes(pipeline) == [len(made.tokens), 0] == [7, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_requests_in_the_same_order_give_the_same_texts(pipeline, temperature):
    def run():
        pipeline.forget()
        options = {"num_draft_tokens": 4, "drafter": "suffix", "remember": True}
        return [
            pipeline.generate(PROMPT, 20, temperature, seed=seed, **options).rounds
            for seed in (1, 2, 1)
        ]

    assert run() == run()


def test_waiting_request_drafts_from_output_of_preceding_request(pipeline):
    options = {"drafter": "suffix", "remember": True, "ignore_eos": True}
    alone = pipeline.generate(PROMPT, 40, **options).stats.num_rounds
    pipeline.forget()
    stream = pipeline.stream(PROMPT, 40, **options)
    next(stream)
    made = []
    waiting = threading.Thread(target=lambda: made.append(pipeline.generate(PROMPT, 40, **options)))
    waiting.start()
    for _ in stream:
        pass
    waiting.join()
    assert made[0].stats.num_rounds < alone
