"""Exports of a target alone."""

import pytest

import specedge
from specedge.bundle import FORMAT, Bundle, store
from specedge.errors import ExportError
from specedge.exporter import export


@pytest.fixture(scope="module")
def bundle(pairs, tmp_path_factory):
    target = pairs.checkpoint("gpt2")[1]
    return export(None, target, tmp_path_factory.mktemp("alone") / "bundle", ops="gqa")


def test_export_without_draft(bundle):
    assert (bundle.draft, bundle.format) == (None, FORMAT)
    assert not [name for name in bundle.files if name.startswith("draft/")]
    assert Bundle.read(bundle.folder) == bundle


def test_target_only_text_equals_pair_text(bundle, pairs):
    with specedge.load(bundle.folder) as alone, specedge.load(pairs.bundle("gpt2").folder) as pair:
        wanted = pair.generate([1, 2, 3, 1, 2], 24, num_draft_tokens=0, ignore_eos=True).tokens
        for k in (0, 3, "auto"):
            assert (
                alone.generate([1, 2, 3, 1, 2], 24, num_draft_tokens=k, ignore_eos=True).tokens
                == wanted
            )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("draft_precision", "int8"),
        ("draft_vocab", 8),
        ("draft_revision", "main"),
        ("draft_adapter", "some/adapter"),
    ],
)
def test_draft_options_require_a_draft(pairs, tmp_path, option, value):
    name = f"--{option.replace('_', '-')}"
    with pytest.raises(
        ExportError, match=f"{name} needs a draft model; specify --draft, or omit {name}$"
    ):
        export("none", pairs.checkpoint("gpt2")[1], tmp_path / "bundle", **{option: value})


def test_target_only_export_has_a_separate_default_folder():
    alone = store.default_destination(None, "some/target")
    assert alone.name == "some-target"
    assert alone != store.default_destination("some/draft", "some/target")
