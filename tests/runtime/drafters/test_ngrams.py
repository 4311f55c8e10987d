"""N-gram tables: counts and distributions by hand, true distributions, files that are what they
say.
"""

import contextlib
import io
import zipfile
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specedge.errors import DrafterError
from specedge.runtime.drafters import ngram_files
from specedge.runtime.drafters.ngrams import NGramDrafter, NGramTables, count
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling

TEXTS = [[0, 1, 2, 0, 1, 3, 0, 1, 2], [4], []]


def row(tables, *before):
    return tables.distribution(before).row(tables.vocab_size).tolist()


def test_distributions_equal_hand_computed_counts():
    tables = count(TEXTS, 6)
    assert tables.unigrams.tolist() == [3, 3, 2, 1, 1, 0]
    assert row(tables) == row(tables, 5) == row(tables, 4) == [0.3, 0.3, 0.2, 0.1, 0.1, 0]
    assert row(tables, 1) == row(tables, 5, 1) == [0, 0, 2 / 3, 1 / 3, 0, 0]
    # Triples 0 1 2 (twice) and 0 1 3: 3 tokens, 2 different, so they weigh 3/5, and agree.
    assert np.allclose(row(tables, 0, 1), [0, 0, 2 / 3, 1 / 3, 0, 0])
    # 2 0 1 once: half its weight is the pair's, which is sure too.
    assert row(tables, 2, 0) == [0, 1, 0, 0, 0, 0]


def test_trigrams_use_witten_bell_smoothing():
    tables = count([[0, 1, 2], [0, 1, 2], [3, 1, 3], [3, 1, 2]], 4)
    # The pair 1 2 has 3 of 4. After 0 1: 2 tokens, 1 different, so 2/3 triple and 1/3 pair.
    assert np.allclose(row(tables, 0, 1), [0, 0, 2 / 3 + 1 / 3 * 3 / 4, 1 / 3 * 1 / 4])
    assert np.allclose(row(tables, 3, 1), [0, 0, 1 / 2 * 1 / 2 + 1 / 2 * 3 / 4, 1 / 4 + 1 / 8])


@pytest.mark.parametrize("order", [1, 2, 3])
def test_tables_of_an_order_have_no_longer_n_grams(order):
    tables = count(TEXTS, 6, order)
    assert (len(tables.pair_tokens) > 0) == (order > 1)
    assert (len(tables.triple_tokens) > 0) == (order > 2)
    assert np.isclose(sum(row(tables, 0, 1)), 1)


@given(st.lists(st.lists(st.integers(0, 4), max_size=12), min_size=1, max_size=4))
def test_distributions_sum_to_one_over_observed_followers(texts):
    if not any(texts):
        return
    tables = count(texts, 6)
    pairs = Counter(pair for text in texts for pair in pairwise(text))
    for a in range(6):
        for b in range(6):
            distribution = row(tables, a, b)
            assert abs(sum(distribution) - 1) < 1e-12
            seen = {y for x, y in pairs if x == b} or {t for text in texts for t in text}
            assert {token for token, p in enumerate(distribution) if p > 0} == seen


def test_distribution_cost_is_bounded_by_successors_of_last_token():
    rng = np.random.default_rng(0)
    tables = count([rng.integers(0, 5000, 20000), [7, 1, 7, 2]], 5000)
    assert len(tables.distribution([3, 7]).probs) == len(set(tables.distribution([3, 7]).ids)) < 20


def test_vocabulary_too_large_for_trigram_keys_is_rejected():
    with pytest.raises(ValueError, match="at most 2097152 vocabulary entries"):
        count([[1]], 2**21 + 1)
    tables = count([[2**21 - 1] * 3], 2**21)
    assert tables.distribution([2**21 - 1] * 2).of(2**21 - 1) == 1


def test_texts_without_tokens_are_rejected():
    with pytest.raises(ValueError, match="have no tokens"):
        count([[], []], 5)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.5, top_k=1), Sampling(2.0)])
def test_drafts_have_the_distribution_they_were_sampled_from(sampling):
    drafter = NGramDrafter(count([[0, 1, 2], [0, 1, 2], [0, 1, 3]], 4))
    found = Counter()
    uniforms = (np.arange(400) + 0.5) / 400
    for uniform in uniforms:
        draft = drafter.propose(History([0, 1]), 1, sampling, [uniform])
        found[draft.tokens[0]] += 1
    weights = np.array([2, 1]) ** (1 / sampling.temperature)
    expected = [1, 0] if sampling.top_k else weights / weights.sum()
    assert np.allclose([draft.distribution(0).of(2), draft.distribution(0).of(3)], expected)
    assert abs(found[2] / 400 - expected[0]) < 0.005


def test_greedy_drafts_are_deterministic():
    drafter = NGramDrafter(count([[0, 1, 2, 0, 1, 3, 0, 1, 2]], 4))
    draft = drafter.propose(History([3, 0]), 3, Sampling(), np.zeros(3))
    assert draft.tokens == [1, 2, 0]
    assert [draft.distribution(i) for i in range(3)] == [None] * 3


@pytest.fixture
def file(tmp_path, pipeline):
    path = tmp_path / "tables.npz"
    tables = count([[0, 1, 2, 0, 1, 3]], pipeline.bundle.target.vocab_size)
    ngram_files.write(tables, pipeline.bundle, path)
    return path


def test_tables_survive_a_round_trip(file, pipeline, tmp_path):
    read = ngram_files.read(file, pipeline.bundle)
    again = tmp_path / "again.npz"
    ngram_files.write(read, pipeline.bundle, again)
    assert again.read_bytes() == file.read_bytes()
    assert read.distribution([0, 1]).of(2) == 0.5
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["again.npz", "tables.npz"]


def change(file, **changes):
    """Write the file again with other arrays, or without those that are None."""
    with np.load(file) as arrays:
        held = {name: arrays[name] for name in arrays.files} | changes
    with file.open("wb") as out:
        np.savez_compressed(out, **{n: a for n, a in held.items() if a is not None})


U32 = np.uint32
DAMAGES = {
    "missing": ({"pair_tokens": None}, "does not contain n-gram tables"),
    "unknown": ({"more": np.zeros(1)}, "does not contain n-gram tables"),
    "format": ({"format": np.array([2])}, "format version is not 1"),
    "tokenizer": (
        {"tokenizer": np.zeros(32, np.uint8)},
        "it was built with another tokenizer than that of",
    ),
    "floats": ({"pair_counts": np.ones(4)}, "pair_counts is not an array of counts"),
    "matrix": ({"pair_counts": np.ones((4, 1), U32)}, "pair_counts is not an array of counts"),
    "vocabulary": ({"unigrams": np.ones(5, U32)}, "has 5 vocabulary entries, the target has 4096"),
    "no counts": ({"unigrams": np.zeros(4096, U32)}, "inconsistent"),
    "a count of 0": ({"pair_counts": np.array([2, 1, 0, 1], U32)}, "inconsistent"),
    "short": ({"pair_counts": np.ones(3, U32)}, "inconsistent"),
    "outside": ({"pair_tokens": np.array([1, 2, 4096, 0], np.uint16)}, "inconsistent"),
    "descending": ({"pair_tokens": np.array([1, 3, 2, 0], np.uint16)}, "inconsistent"),
    "twice": ({"pair_tokens": np.array([1, 2, 2, 0], np.uint16)}, "inconsistent"),
    "no pair": ({"triple_tokens": np.array([2, 3, 0, 2], np.uint16)}, "inconsistent"),
    "starts": ({"triple_starts": np.array([0, 2, 1, 3, 4], U32)}, "inconsistent"),
    "starts too far": ({"triple_starts": np.array([0, 2, 3, 3, 9], U32)}, "inconsistent"),
    "no starts": ({"triple_starts": np.zeros(0, U32)}, "inconsistent"),
    "objects": ({"pair_tokens": np.array([{}], object)}, "damaged or has another format"),
}


@pytest.mark.parametrize(("changes", "message"), DAMAGES.values(), ids=DAMAGES)
def test_inconsistent_file_is_one_line_error(file, pipeline, changes, message):
    change(file, **changes)
    with pytest.raises(DrafterError, match=rf"tables\.npz: .*{message}.*; build") as caught:
        ngram_files.read(file, pipeline.bundle)
    assert "\n" not in str(caught.value)


def test_unmodified_copy_is_accepted(file, pipeline):
    change(file)
    ngram_files.read(file, pipeline.bundle)


def test_damaged_files_raise_no_traceback(file, pipeline):
    whole = file.read_bytes()
    intact = ngram_files.read(file, pipeline.bundle)
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(whole[: rng.integers(len(whole))] if rng.random() < 0.3 else whole)
        for place in rng.integers(0, max(1, len(damaged)), 3):
            damaged[place : place + 1] = bytes(rng.integers(0, 256, 1, np.uint8))
        file.write_bytes(damaged)
        with contextlib.suppress(DrafterError):
            read = ngram_files.read(file, pipeline.bundle)
            assert all(np.array_equal(a, getattr(intact, n)) for n, a in vars(read).items())


def test_file_of_wrong_type_is_one_line_error(tmp_path, pipeline):
    path = tmp_path / "x"
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as out:
        for name in [*(f.name for f in NGramTables.__dataclass_fields__.values()), "format"]:
            out.writestr(f"{name}.npy", b"hello")
        out.writestr("tokenizer.npy", b"")
    for content in (b"", b"hello", b"PK\x03\x04", archive.getvalue()):
        path.write_bytes(content)
        with pytest.raises(DrafterError, match="build the tables again"):
            ngram_files.read(path, pipeline.bundle)
    with pytest.raises(DrafterError, match="it is not a file"):
        ngram_files.read(tmp_path, pipeline.bundle)


def test_a_failed_write_keeps_the_old_file(file, pipeline, monkeypatch):
    before = file.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    tables = count([[1]], pipeline.bundle.target.vocab_size)
    with pytest.raises(OSError, match="No space"):
        ngram_files.write(tables, pipeline.bundle, file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]
