"""The embedded pair through the public API: exactness, ends, counts, reuse."""

import dataclasses
import os
import subprocess
import sys
import threading
import time
from itertools import product

import numpy as np
import pytest

import specedge
from specedge import ContextLengthError, DeviceError, PromptError, SpecEdgeError, store
from specedge.options import Sampling
from specedge.runtime.pipeline import Pipeline
from specedge.runtime.sampling import probabilities

PROMPTS = ("def read_config(path):", "class Parser:\n    def __init__(self", "import ")


def with_end_tokens(pipeline, *tokens):
    """The same pair, for which other tokens end a text."""
    bundle = dataclasses.replace(pipeline.bundle, end_tokens=tokens)
    return Pipeline(bundle, pipeline.tokenizer, pipeline.target, pipeline.draft)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_equal_plain_decoding(pipeline, prompt, k):
    plain = pipeline.generate(prompt, 200, num_draft_tokens=0, ignore_eos=True)
    speculative = pipeline.generate(prompt, 200, num_draft_tokens=k, ignore_eos=True)
    assert speculative.tokens == plain.tokens
    assert speculative.text == plain.text
    assert speculative.stats.num_rounds < plain.stats.num_rounds == 200


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_rows_logits_do_not_depend_on_how_many_rows_share_its_pass(pipeline, role):
    model = getattr(pipeline, role)
    tokens = np.random.default_rng(0).integers(1, model.vocab_size, 140).tolist()

    def logits(length):
        model.truncate(0)
        parts = [
            model.forward(tokens[i : i + length]).copy() for i in range(0, len(tokens), length)
        ]
        return np.concatenate(parts)

    reference = logits(140)
    for length in (1, 2, 3, 5, 9, 64):
        assert np.array_equal(logits(length), reference), length


@pytest.mark.parametrize("role", ["target", "draft"])
def test_stale_rows_after_a_rollback_do_not_leak(pipeline, role):
    model = getattr(pipeline, role)
    model.truncate(0)
    model.prefill(range(1, 20))
    clean = model.forward([20, 21, 22]).copy()
    model.forward(range(30, 60))
    model.truncate(19)
    assert np.array_equal(model.forward([20, 21, 22]), clean)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_self_draft_gives_k_plus_one_tokens_every_round(self_draft, k, temperature):
    count = 200 // (k + 1) * (k + 1)
    one = self_draft.generate(
        PROMPTS[0], count, temperature, seed=3, num_draft_tokens=k, ignore_eos=True
    )
    assert [len(r.tokens) for r in one.rounds] == [k + 1] * (count // (k + 1))
    assert one.stats.num_draft_passes == k * one.stats.num_rounds


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 30])
def test_as_many_tokens_as_asked_for(pipeline, k, count):
    one = pipeline.generate(PROMPTS[0], count, num_draft_tokens=k, ignore_eos=True)
    assert (len(one.tokens), one.finish_reason) == (count, "length")
    assert one.stats.num_new_tokens == count


@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5, 11])
def test_an_end_token_inside_a_round_ends_the_text_there(pipeline, k, at):
    whole = pipeline.generate(PROMPTS[1], 40, num_draft_tokens=k, ignore_eos=True)
    end = whole.tokens[at]
    first = whole.tokens.index(end)
    one = with_end_tokens(pipeline, end).generate(PROMPTS[1], 40, num_draft_tokens=k)
    assert (one.tokens, one.finish_reason) == (whole.tokens[: first + 1], "end")
    before = pipeline.generate(PROMPTS[1], first or 1, num_draft_tokens=0, ignore_eos=True)
    assert one.text == (before.text if first else "")
    ignored = with_end_tokens(pipeline, end).generate(
        PROMPTS[1], 40, num_draft_tokens=k, ignore_eos=True
    )
    assert ignored.tokens == whole.tokens


@pytest.mark.parametrize("k", [0, 1, 4])
def test_a_stop_string_ends_the_text_before_it(pipeline, k):
    whole = pipeline.generate(PROMPTS[0], 60, num_draft_tokens=k, ignore_eos=True)
    for start, size in product((1, 9, 23), (1, 2, 9)):
        stop = whole.text[start : start + size]
        one = pipeline.generate(
            PROMPTS[0], 60, num_draft_tokens=k, stop=["never so", stop], ignore_eos=True
        )
        assert one.text == whole.text[: whole.text.index(stop)]
        assert one.finish_reason == "stop"
        assert one.tokens == whole.tokens[: len(one.tokens)]


def test_a_shorter_request_gives_the_beginning_of_a_longer_one(pipeline):
    longest = pipeline.generate(PROMPTS[2], 40, 1.0, seed=5, ignore_eos=True)
    for count in (1, 2, 3, 5, 17):
        one = pipeline.generate(PROMPTS[2], count, 1.0, seed=5, ignore_eos=True)
        assert one.tokens == longest.tokens[:count]


@pytest.mark.parametrize("k", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("left", [1, 2, 5, 13])
def test_the_context_fills_to_its_last_position(pipeline, k, left):
    context = pipeline.bundle.context_length
    prompt = (pipeline.tokenizer.encode(PROMPTS[1]).ids * context)[: context - left]
    one = pipeline.generate(prompt, 10 * left, num_draft_tokens=k, ignore_eos=True)
    plain = pipeline.generate(prompt, 10 * left, num_draft_tokens=0, ignore_eos=True)
    assert (len(one.tokens), one.finish_reason) == (left, "context")
    assert one.tokens == plain.tokens


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_runs(pipeline):
    context = pipeline.bundle.context_length
    for length in (context, context + 7):
        with pytest.raises(ContextLengthError, match=f"{length} tokens.*{context}.*shorten"):
            pipeline.stream([5] * length)


def test_a_prompt_of_one_token_works_and_an_empty_one_does_not(pipeline):
    assert len(pipeline.generate([7], 5, ignore_eos=True).tokens) == 5
    for empty in ("", []):
        with pytest.raises(PromptError, match="empty"):
            pipeline.generate(empty)


@pytest.mark.parametrize("prompt", [b"def", [1.5], ["def"], "a\udcff"])
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(pipeline, prompt):
    with pytest.raises(PromptError, match="prompt"):
        pipeline.generate(prompt)


@pytest.mark.parametrize("token", [-1, 10**9])
def test_a_token_outside_the_vocabulary_is_refused(pipeline, token):
    with pytest.raises(PromptError, match=str(token)):
        pipeline.generate([1, token])


def test_a_prompt_may_be_text_or_ids(pipeline):
    ids = pipeline.tokenizer.encode(PROMPTS[0]).ids
    by_ids = pipeline.generate(ids, 20)
    assert by_ids.text == pipeline.generate(PROMPTS[0], 20).text
    assert by_ids.text == pipeline.generate(np.array(ids), 20).text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streamed_pieces_join_to_the_text_and_the_same_seed_gives_the_same(pipeline, temperature):
    options = {"temperature": temperature, "seed": 11, "max_new_tokens": 80}
    stream = pipeline.stream(PROMPTS[0], **options)
    pieces = list(stream)
    whole = pipeline.generate(PROMPTS[0], **options)
    assert "".join(pieces) == stream.generation.text == whole.text
    assert stream.generation.tokens == whole.tokens
    assert len(pieces) > 5


def test_without_a_seed_a_fresh_one_is_taken_and_told(pipeline):
    one = pipeline.generate(PROMPTS[0], 30, 1.0)
    two = pipeline.generate(PROMPTS[0], 30, 1.0)
    assert one.seed != two.seed
    assert pipeline.generate(PROMPTS[0], 30, 1.0, seed=one.seed).tokens == one.tokens


def test_a_stream_may_be_left_and_the_pipeline_used_again(pipeline):
    whole = pipeline.generate(PROMPTS[0], 60)
    with pipeline.stream(PROMPTS[0], 60) as left:
        first = next(left)
    assert list(left) == []
    assert left.generation.finish_reason == "unfinished"
    assert left.generation.text == first == whole.text[: len(first)]
    assert pipeline.generate(PROMPTS[0], 60).tokens == whole.tokens


def test_a_new_request_ends_an_unfinished_stream_with_an_error(pipeline):
    left = pipeline.stream(PROMPTS[0], 60)
    next(left)
    whole = pipeline.generate(PROMPTS[1], 60)
    with pytest.raises(SpecEdgeError, match="began another request"):
        next(left)
    assert pipeline.generate(PROMPTS[1], 60).tokens == whole.tokens


def test_two_pipelines_run_in_two_threads(pipeline):
    other = specedge.load(store.embedded())
    expected = [pipeline.generate(p, 100, ignore_eos=True).tokens for p in PROMPTS[:2]]
    found = [None, None]

    def run(i, one):
        found[i] = [one.generate(PROMPTS[i], 100, ignore_eos=True).tokens for _ in range(3)]

    threads = [threading.Thread(target=run, args=(i, p)) for i, p in enumerate((pipeline, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[tokens] * 3 for tokens in expected]


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0, top_k=5), Sampling(0.8, top_p=0.8), Sampling(1.2, min_p=0.2)]
)
def test_the_first_tokens_follow_the_targets_own_law(pipeline, sampling):
    """Chi-square of the joint law of two tokens against the target's rows, rare cells pooled."""
    scipy_stats = pytest.importorskip("scipy.stats")
    prompt, runs = pipeline.tokenizer.encode(PROMPTS[2]).ids, 800
    options = dataclasses.asdict(sampling)
    counts = {}
    for seed in range(runs):
        one = pipeline.generate(prompt, 2, seed=seed, ignore_eos=True, **options)
        counts[tuple(one.tokens)] = counts.get(tuple(one.tokens), 0) + 1

    def row(*tokens):
        pipeline.target.truncate(0)
        return probabilities(pipeline.target.forward([*prompt, *tokens])[-1], sampling)

    expected = {}
    for first, p in ((int(t), float(row()[t])) for t in np.flatnonzero(row())):
        second = row(first)
        for t in np.flatnonzero(second):
            expected[first, int(t)] = runs * p * float(second[t])
    assert set(counts) <= set(expected)
    cells = [(counts.get(c, 0), e) for c, e in expected.items() if e >= 5]
    rest = (runs - sum(n for n, _ in cells), runs - sum(e for _, e in cells))
    cells += [rest] if rest[1] > 1 else []
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    assert len(cells) >= 4
    assert scipy_stats.chi2.sf(statistic, len(cells) - 1) > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"num_draft_tokens": 65}, "num_draft_tokens must be between 0 and 64"),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be between 0 and 64"),
        ({"stop": [""]}, "stop string must not be empty"),
        ({"stop": [1]}, "stop must be text"),
        ({"stop": b"x"}, "stop must be text"),
        ({"temperature": "1"}, "temperature must be a number"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"top_p": None}, "top_p must be a number"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number"),
        ({"num_draft_tokens": 2.0}, "num_draft_tokens must be a whole number"),
        ({"top_k": 2.0}, "top_k must be a whole number"),
        ({"seed": 1.5}, "seed must be a whole number"),
    ],
)
def test_a_bad_option_is_refused_before_anything_runs(pipeline, options, message):
    with pytest.raises(ValueError, match=message):
        pipeline.stream(PROMPTS[0], **options)


def test_an_unknown_option_is_an_error(pipeline):
    with pytest.raises(TypeError, match="temprature"):
        pipeline.generate(PROMPTS[0], temprature=1)


def test_seconds_add_up_and_passes_are_counted(pipeline):
    start = time.perf_counter()
    one = pipeline.generate(PROMPTS[0], 50, ignore_eos=True)
    elapsed = time.perf_counter() - start
    stats = one.stats
    assert stats.num_target_passes == stats.num_rounds == len(one.rounds)
    assert stats.num_draft_passes == stats.num_drafted
    parts = (stats.draft_seconds, stats.verify_seconds, stats.sampling_seconds)
    assert all(part > 0 for part in parts)
    assert stats.decode_seconds == sum(parts) + stats.other_seconds
    assert stats.decode_seconds + stats.prefill_seconds <= elapsed
    assert stats.num_tested == sum(stats.tested_by_position)


def test_a_graph_that_is_not_what_the_manifest_says_is_refused(pipeline):
    from specedge.runtime.ort import OrtModel

    bundle, model = pipeline.bundle, pipeline.bundle.draft
    wrong = (
        dataclasses.replace(model, padded_vocab_size=model.padded_vocab_size + 1),
        dataclasses.replace(
            model, cache=dataclasses.replace(model.cache, layers=model.cache.layers[:1])
        ),
    )
    for one in wrong:
        with pytest.raises(specedge.BundleError, match=r"decoder\.onnx: .* wants"):
            OrtModel(bundle, one, "cpu", None, True)


def test_an_unknown_device_and_another_number_of_threads_are_clear_errors(pipeline):
    with pytest.raises(DeviceError, match="'abacus'"):
        specedge.load(store.embedded(), device="abacus")
    for threads in (0, 10**6, 1.5, "2"):
        with pytest.raises(DeviceError, match="threads must be"):
            specedge.load(store.embedded(), threads=threads)
    with pytest.raises(DeviceError, match="new process"):
        specedge.load(store.embedded(), threads=1)


def test_a_prompt_too_long_for_any_tokenizer_is_refused_without_tokenising_it(pipeline):
    with pytest.raises(ContextLengthError, match=r"characters.*shorten it"):
        pipeline.stream("x" * 10_000_000)


def test_onnxruntime_collects_no_telemetry(tmp_path):
    environment = os.environ | {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    code = "import specedge; specedge.load().generate('x', 3)"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["specedge"])


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_missing_onnxruntime_names_the_pip_command():
    code = "import sys; sys.modules['onnxruntime'] = None; import specedge; specedge.load()"
    assert "pip install 'specedge[cpu]'" in run_python(code).stderr


def test_pools_of_their_own_give_the_same_tokens_and_leave_other_sessions_alone(pipeline):
    tokens = pipeline.generate(PROMPTS[0], 30).tokens
    code = (
        "import specedge, onnxruntime as ort\n"
        "pipeline = specedge.load(share_threads=False, threads=1)\n"
        f"print(pipeline.generate({PROMPTS[0]!r}, 30).tokens)\n"
        "bundle = pipeline.bundle\n"
        "path = bundle.path(bundle.draft.graph('decoder').file)\n"
        "ort.InferenceSession(str(path), providers=['CPUExecutionProvider'])\n"
    )
    result = run_python(code)
    assert (result.stderr, result.stdout.strip()) == ("", str(tokens))
