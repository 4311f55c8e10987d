"""Grammar whose lexer has reached its state limit."""

import threading
import time
from contextlib import suppress

import numpy as np
import pytest

import specedge
from specedge.bundle import store
from specedge.errors import OptionError, SpecEdgeError
from specedge.request import GenerationRequest
from specedge.runtime.sampling.history import History
from specedge.runtime.text import compilation, grammars
from specedge.runtime.text.grammars import Grammars
from threads import in_threads

FULL = "(.*[ae].{30}){2}.*"  # a text of 30 tokens takes some 1,500 states of the lexer
FEW_STATES = {**grammars._LIMITS, "max_lexer_states": 3000}


def test_shared_lexer_state_does_not_truncate_text(pipeline, monkeypatch):
    limits = {**grammars._LIMITS, "max_lexer_states": 6000}
    monkeypatch.setattr(grammars, "_LIMITS", limits)
    for seed in range(8):  # each takes some 1,500 of these states
        given = {"seed": seed, "num_draft_tokens": 4 * (seed % 2), "drafter": "model"}
        found = pipeline.generate("a", 30, 1.0, regex=FULL, **given)
        assert len(found.tokens) == 30


def walk(one, text, seed, length=30):
    """A text that goes on by tokens that the grammar allows, as far as its lexer goes."""
    rng, found = np.random.default_rng(seed), []
    with suppress(OptionError):
        for _ in range(length):
            found.append(int(rng.choice(np.flatnonzero(~one.banned(text.then(found))))))
    return found


def test_a_full_lexer_is_not_reported_as_a_grammar_violation(pipeline, monkeypatch):
    """It refuses a token without a word, also one that no mask was asked for."""
    kept = Grammars(pipeline.bundle, pipeline.tokenizer)
    text = walk(kept.constraint(GenerationRequest(regex=FULL)), History([7]), 0)
    monkeypatch.setattr(grammars, "_LIMITS", FEW_STATES)
    kept = Grammars(pipeline.bundle, pipeline.tokenizer)
    one = kept.constraint(GenerationRequest(regex=FULL))
    full = one._fresh
    monkeypatch.setattr(one, "_renew", lambda: full)
    for seed in range(1, 9):
        walk(one, History([7]), seed)
    with pytest.raises(OptionError, match="cannot be applied to this text: lexer error: too many"):
        one.banned(History([7], text))


def test_drafts_that_fill_the_lexer_do_not_end_a_text(pipeline, monkeypatch):
    monkeypatch.setattr(grammars, "_LIMITS", FEW_STATES)
    monkeypatch.setattr(grammars, "MAX_RENEWALS", 2)
    one = Grammars(pipeline.bundle, pipeline.tokenizer).constraint(GenerationRequest(regex=FULL))
    text, drafted = History([7]), []
    for step in range(24):
        next_token = int(np.flatnonzero(~one.banned(text))[step])
        drafted.append(max(len(walk(one, text, seed)) for seed in range(2)))
        text.extend([next_token])
    assert drafted[0] > 1
    assert drafted[-1] == 1  # by the text's own mask; they are followed no more


FILLING = {"temperature": 1.0, "seed": 3, "num_draft_tokens": 4, "regex": FULL}


@pytest.fixture(scope="module")
def pair():
    return specedge.load(store.embedded_folder(), slots=2)


@pytest.fixture
def compiling_again(pair, monkeypatch):
    """Let few states fit into a lexer, and call a function before a grammar is compiled again."""

    def compile_again(before, pair=pair):
        monkeypatch.setattr(grammars, "_LIMITS", {**grammars._LIMITS, "max_lexer_states": 2500})
        monkeypatch.setattr(pair, "grammars", Grammars(pair.bundle, pair.tokenizer))
        compiled, texts = grammars.compiled, []

        def compiling(tokens, name, text):
            if text in texts:
                before()
            texts.append(text)
            return compiled(tokens, name, text)

        monkeypatch.setattr(grammars, "compiled", compiling)

    return compile_again


def test_recompilation_does_not_block_other_requests(pair, compiling_again):
    wanted = pair.generate("a", 30, **FILLING)
    begun, ended, had_turns, found = threading.Event(), threading.Event(), [], []

    def before():
        begun.set()
        had_turns.append(ended.wait(10))

    def beside():
        assert begun.wait(20)
        pair.generate("b", 8)
        ended.set()

    compiling_again(before)
    in_threads(beside, lambda: found.append(pair.generate("a", 30, **FILLING)))
    assert had_turns
    assert all(had_turns)
    assert found[0].tokens == wanted.tokens


def test_recompilation_allows_two_reading_threads(pair, compiling_again):
    expected = pair.generate("a", 30, **FILLING)
    readers = []

    def before():
        """Let the second thread ask for the next piece, then a request of another slot pass it."""
        if not readers:
            readers.append(threading.Thread(target=lambda: list(stream), daemon=True))
            readers[0].start()
            time.sleep(0.05)
        in_threads(lambda: pair.generate("b", 2))

    compiling_again(before)
    stream = pair.stream("a", 30, **FILLING)
    in_threads(lambda: list(stream))
    readers[0].join(60)
    assert not readers[0].is_alive()
    assert stream.generation.tokens == expected.tokens


def test_closing_a_pipeline_ends_a_recompiling_stream(compiling_again):
    closing = specedge.load(store.embedded_folder())
    compiling_again(closing.close, closing)
    with pytest.raises(SpecEdgeError, match="this pipeline is closed"):
        closing.generate("a", 30, **FILLING)


def test_recompilation_has_a_budget(pair, compiling_again, monkeypatch):
    ended = threading.Event()
    compiling_again(lambda: ended.wait(60))
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.5)
    with pytest.raises(OptionError, match=r"regex takes more than 0\.5 seconds") as caught:
        pair.generate("a", 30, **FILLING | {"num_draft_tokens": 0})
    ended.set()
    assert caught.value.option == "regex"


def test_an_abandoned_grammar_is_not_compiled(pair, monkeypatch):
    """Otherwise other requests would wait for the compilation."""
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.05)
    compiled, begun, ended = grammars.compiled, [], threading.Event()

    def compiling(tokens, name, text):
        begun.append(text)
        assert not text.startswith("slow") or ended.wait(60)
        return compiled(tokens, name, text)

    monkeypatch.setattr(grammars, "compiled", compiling)
    kept = Grammars(pair.bundle, pair.tokenizer)
    slow = [f"slow{i}" for i in range(compilation.MAX_CONCURRENT)]
    for text in [*slow, "left"]:
        with pytest.raises(OptionError, match="seconds to compile"):
            kept.constraint(GenerationRequest(regex=text))
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 60)
    results = []
    waiting = threading.Thread(
        target=lambda: results.append(kept.constraint(GenerationRequest(regex="wanted")))
    )
    waiting.start()
    ended.set()
    waiting.join(60)
    assert results
    assert kept.constraint(GenerationRequest(regex="slow0"))  # was ready after all
    assert sorted(begun) == [*slow, "wanted"]
    assert kept.constraint(GenerationRequest(regex="left"))
    assert begun[-1] == "left"
