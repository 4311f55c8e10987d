"""Texts that quantization is evaluated on are not calibration texts."""

from pathlib import Path

import reference
from specedge.exporter.quantization import texts


def test_evaluation_texts_are_not_in_the_calibration_set():
    folder = Path(texts.__file__).parent
    files = [path for path in folder.rglob("*.txt") if not path.name.startswith("evaluation")]
    calibration = " ".join(normalize_spaces(path.read_text("utf-8")) for path in files)
    evaluation = [path.read_text("utf-8") for path in reference.TEXTS.glob("*.*")]
    for text in map(normalize_spaces, [*evaluation, reference.code()]):
        assert len(text) > 80
        assert not [i for i in range(0, len(text) - 80, 40) if text[i : i + 80] in calibration]


def normalize_spaces(text):
    return " ".join(text.split())
