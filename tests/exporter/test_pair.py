"""A draft that does not fit its target is refused with an example of what differs."""

import json
import shutil

import pytest
from tokenizers import Tokenizer

from specedge.errors import PairError
from specedge.exporter import checkpoints, pair
from specedge.exporter.progress import Progress
from specedge.options import Sampling


def edit(path, change):
    value = json.loads(path.read_text("utf-8"))
    change(value)
    path.write_text(json.dumps(value), "utf-8")


@pytest.fixture
def both(pairs, tmp_path):
    """Folders of a draft and a target to spoil."""
    return [
        shutil.copytree(source, tmp_path / name)
        for name, source in zip(("draft", "target"), pairs.checkpoint("gpt2"), strict=True)
    ]


def fit(both):
    found = [
        checkpoints.find(r, str(f), None) for r, f in zip(("draft", "target"), both, strict=True)
    ]
    progress = Progress()
    return pair.fit(*found, progress), progress.notes, found[1]


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


def strip_end(value):
    value["added_tokens"][0]["lstrip"] = True


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swap_tokens, "vocabularies: 'a' is"),
        (swap_merges, "merges: number"),
        (prefix_space, "pre-tokeniser"),
        (lowercase, "normaliser"),
        (strip_end, "added tokens"),
    ],
)
def test_another_tokenizer_is_refused(both, change, said):
    edit(both[0] / "tokenizer.json", change)
    with pytest.raises(PairError, match=said):
        fit(both)


def test_padding_and_truncation_do_not_matter_and_are_not_shipped(both, tmp_path):
    settings = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    edit(both[1] / "tokenizer.json", lambda value: value.update(truncation=settings))
    text, notes, target = fit(both)
    assert notes == []
    pair.write_tokenizer(text, target, tmp_path)
    shipped = Tokenizer.from_file(str(tmp_path / pair.FILE))
    assert len(shipped.encode("one two three four five").ids) > 3


def test_other_end_tokens_and_chat_templates_are_noted(both):
    edit(both[0] / "generation_config.json", lambda value: value.update(eos_token_id=[0, 7]))
    (both[0] / "chat_template.jinja").write_text("{{ messages }}", "utf-8")
    _, notes, _ = fit(both)
    assert all(word in note for word, note in zip(("ends at", "template"), notes, strict=True))


def test_end_tokens_come_from_the_generation_config_then_the_config(both):
    def ends():
        return pair.end_tokens(checkpoints.find("target", str(both[1]), None))

    edit(both[1] / "generation_config.json", lambda value: value.update(eos_token_id=[5, 6, 5]))
    assert ends() == (5, 6)
    (both[1] / "generation_config.json").unlink()
    edit(both[1] / "config.json", lambda value: value.update(eos_token_id=9))
    assert ends() == (9,)


def test_default_sampling_is_the_generation_configs(both):
    def sampling():
        return pair.default_sampling(checkpoints.find("target", str(both[1]), None))

    assert sampling() == Sampling()
    change = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    edit(both[1] / "generation_config.json", lambda value: value.update(change))
    assert sampling() == Sampling(temperature=0.7, top_k=20, top_p=0.8)


def test_a_long_context_is_cut_with_a_note(both):
    edit(both[1] / "config.json", lambda value: value.update(n_positions=9000))
    target, progress = checkpoints.find("target", str(both[1]), None), Progress()
    assert pair.context_length(target, 6000, progress) == 6000
    assert progress.notes == []
    assert pair.context_length(target, None, progress) == 4096
    assert "--max-length" in progress.notes[0]
    assert pair.context_length(target, 10000, progress) == 9000
