"""Selection of the tokens of a reduced draft vocabulary."""

import json
from collections import Counter

import pytest
from tokenizers import Tokenizer

from checkpoints import MARKERS, make_tokenizer
from specedge.errors import ExportError
from specedge.exporter import Progress
from specedge.exporter.checkpoint.draft_vocabulary import most_frequent_tokens
from specedge.exporter.quantization import texts

TEXT = ("a text", "the then there " * 9 + "self.assertEqual(1, 2)\n" * 20)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    made = make_tokenizer(folder)
    made.add_special_tokens({"additional_special_tokens": list(MARKERS)})
    made.save_pretrained(folder)
    return folder / "tokenizer.json"


def kept(tokenizer, count, text=TEXT, ends=(0,), num_tokens=515):
    return most_frequent_tokens(count, text, tokenizer, ends, range(num_tokens), Progress())


BUILT_IN = texts.read_source(None)


@pytest.mark.parametrize("text", [TEXT, (BUILT_IN.name, BUILT_IN.text)], ids=["short", "built in"])
@pytest.mark.parametrize("count", [5, 30, 300, 514])
def test_most_frequent_tokens_of_text_are_kept(tokenizer, text, count):
    ids = kept(tokenizer, count, text)
    assert ids == sorted({*ids})
    assert len(ids) == count
    assert {0, 512, 513, 514} <= {*ids}
    counts = Counter(Tokenizer.from_file(str(tokenizer)).encode(text[1]).ids)
    left = {*range(515)} - {*ids}
    least = min(counts[t] for t in {*ids} - {0, 512, 513, 514})
    assert max(counts[t] for t in left) <= least
    assert not [t for t in left if counts[t] == least and t < _last_of(ids, counts, least)]


def _last_of(ids, counts, count):
    return max(t for t in ids if counts[t] == count and t not in (0, 512, 513, 514))


def test_end_tokens_are_always_kept(tokenizer):
    assert {450, 451} <= {*kept(tokenizer, 8, ends=(450, 451))}


def test_more_tokens_are_superset_of_fewer(tokenizer):
    assert {*kept(tokenizer, 20)} < {*kept(tokenizer, 21)}


def test_ids_outside_draft_vocabulary_are_dropped(tokenizer):
    ids = kept(tokenizer, 100, ends=(0, 514), num_tokens=200)
    assert max(ids) < 200


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (515, "--draft-vocab 515: the draft has 515 tokens; use a smaller number, or omit it"),
        (9999, "the draft has 515 tokens"),
        (
            4,
            "--draft-vocab 4: the 4 end tokens and special tokens are always kept; use a larger "
            "number",
        ),
        (1, "use a larger number"),
    ],
)
def test_invalid_vocabulary_size_is_rejected(tokenizer, count, said):
    with pytest.raises(ExportError, match=said):
        kept(tokenizer, count)


def test_note_reports_text_coverage(tokenizer):
    progress = Progress()
    most_frequent_tokens(30, TEXT, tokenizer, (0,), range(515), progress)
    (note,) = progress.notes
    assert "30 of 515 tokens" in note
    assert note.endswith("of a text")


def test_tokenizer_without_added_tokens_has_no_special_tokens(tokenizer, tmp_path):
    settings = json.loads(tokenizer.read_text("utf-8"))
    settings["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings), "utf-8")
    assert len(kept(tmp_path / "tokenizer.json", 3)) == 3
