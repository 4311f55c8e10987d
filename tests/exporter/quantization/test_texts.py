"""Calibration and evaluation texts of a quantized export."""

import pytest
from tokenizers import Tokenizer, processors

from checkpoints import make_tokenizer
from specedge.bundle.precision import GPTQ, NEAREST
from specedge.errors import ExportError
from specedge.exporter.quantization import texts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer that begins every text with token 0, and its file."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder).save_pretrained(folder)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    name = tokenizer.id_to_token(0)
    tokenizer.post_processor = processors.TemplateProcessing(f"{name} $A", None, [(name, 0)])
    tokenizer.save(str(path))
    return path


def cut(tokenizer, source=None, template=None, context=10_000):
    source = texts.read_source(None) if source is None else source
    return texts.tokenize(source, tokenizer, 10_000, context, template)


def test_built_in_evaluation_and_calibration_texts_are_disjoint():
    source = texts.read_source(None)
    lines = [{line for text in part for line in text.splitlines() if len(line) > 40}
             for part in (source.calibration, source.evaluation)]  # fmt: skip
    assert all(len(part) > 100 for part in lines)
    assert not lines[0] & lines[1]


def test_pieces_start_with_the_tokenizer_prefix(tokenizer):
    found = cut(tokenizer)
    for pieces, size in (
        (found.calibration, texts.CALIBRATION_WINDOW),
        (found.evaluation, texts.EVALUATION_WINDOW),
    ):
        assert all(piece[0] == 0 and len(piece) <= size for piece in pieces)
        assert sum(len(piece) == size for piece in pieces) > len(pieces) / 2


def test_pieces_fit_the_context(tokenizer):
    found = cut(tokenizer, context=96)
    assert max(map(len, (*found.calibration, *found.evaluation))) == 96


@pytest.mark.parametrize("has_int8_caches", [False, True])
def test_weights_rounded_to_nearest_need_fewer_windows_than_hessians_and_caches(
    tokenizer, has_int8_caches
):
    found = cut(tokenizer)
    for rounding, number in ((GPTQ, 18), (NEAREST, 3)):
        selected = found.select(rounding, has_int8_caches)
        assert len(selected.calibration) == number
        assert len(selected.caches) == 18 * has_int8_caches
        assert selected.evaluation == found.evaluation


def test_a_prefix_leaves_room_for_text_in_a_context_of_two_tokens(tokenizer):
    found = cut(tokenizer, context=2)
    assert found.calibration
    assert all(len(piece) == 2 for piece in found.evaluation)


def test_chat_template_failure_is_an_export_error(tokenizer):
    def template(turns):
        raise ValueError("roles must alternate")

    with pytest.raises(ExportError, match="chat template fails on the calibration text: roles"):
        cut(tokenizer, template=template)


def test_a_chat_may_have_several_turns_and_blank_lines():
    found = texts.parse_conversations(
        "User: a\nAssistant: b\n\nc\nUser: d\nAssistant: e\n\nUser: f\n"
    )
    assert [[turn["content"] for turn in turns] for turns in found] == [
        ["a", "b\n\nc", "d", "e"],
        ["f"],
    ]


def test_user_text_alternates_between_calibration_and_evaluation(tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(map(str, range(2000))))
    found = cut(tokenizer, texts.read_source(str(path)))
    assert found.name == "text.txt"
    assert len(found.calibration) - len(found.evaluation) in (0, 1)
    assert not {piece.tobytes() for piece in found.calibration} & {
        piece.tobytes() for piece in found.evaluation
    }


def test_a_file_that_is_too_short_is_refused(tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a few words")
    with pytest.raises(ExportError, match=r"text.txt has \d+ tokens"):
        cut(tokenizer, texts.read_source(str(path)))
