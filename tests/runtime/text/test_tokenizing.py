"""A tokenizer that panics or cuts prompts."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from specedge.bundle import MANIFEST, Bundle, store
from specedge.bundle.integrity import file_entry
from specedge.errors import BundleError
from specedge.runtime.text.prompts import Prompts

PANIC = {
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }
}
CUTTING = {"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
PADDING = {
    "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None,
    "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
}  # fmt: skip


@pytest.fixture
def changed(tmp_path):
    """The embedded pair with other values in its tokenizer.json."""

    def change(**values):
        folder = shutil.copytree(store.embedded_folder(), tmp_path / "bundle")
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        manifest["files"]["tokenizer.json"] = dataclasses.asdict(file_entry(path))
        (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")
        return Bundle.read(folder)

    return change


@pytest.mark.usefixtures("shared_costs")
def test_tokenizer_panic_is_one_line_error_with_exit_code_1(changed):
    bundle = changed(**PANIC)
    result = subprocess.run(
        [sys.executable, "-m", "specedge", "generate", "x", "--bundle", str(bundle.folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"RUST_BACKTRACE": "1"},
    )
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "tokenizer.json: the tokenizer fails: " in line
    assert line.endswith("export the pair again")


def test_a_late_panic_of_a_tokenizer_is_a_specedge_error(pipeline):
    facts = json.loads(pipeline.tokenizer.to_str()) | {"truncation": CUTTING | {"stride": 9}}
    tokenizer = Tokenizer.from_str(json.dumps(facts))
    with pytest.raises(BundleError, match="the tokenizer fails: `stride`"):
        Prompts(pipeline.bundle, tokenizer).tokens("a b c d e f g")


def test_truncation_and_padding_settings_of_tokenizer_are_ignored(changed, pipeline):
    from specedge.runtime.requests.loader import load

    found = load(changed(truncation=CUTTING, padding=PADDING).folder)
    for text in ("def read_config(path):\n    with open(path) as file:", "x"):
        tokens = Prompts(found.bundle, found.tokenizer).tokens(text)
        assert tokens == pipeline.prompts.tokens(text)
