"""Every family in int8: its own target to the bit, in every op set that it has."""

import pytest

import specedge
from architectures import ARCHITECTURES
from checkpoints import make_model, make_tokenizer, save
from specedge.exporter import export

SLOW = "mixtral"  # experts in a fused node
NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name == SLOW else pytest.mark.architectures)
    for name in ARCHITECTURES
]


@pytest.mark.parametrize("name", NAMES)
def test_a_family_in_int8_writes_what_its_target_alone_writes(name, tmp_path):
    model = make_model(ARCHITECTURES[name][1]())
    target = save(model, make_tokenizer(tmp_path / "tokenizer"), tmp_path / "target")
    bundle = export(target, target, tmp_path / "bundle", precision="int8")
    for ops, report in bundle.target.quantisation.items():
        assert {1, 2, 3, 5, 9, 64} <= {*bundle.target.parity[ops].row_independent_lengths}
        assert report.perplexity == pytest.approx(report.original_perplexity, rel=0.05)
        assert report.divergence < 0.2
        if name == "mixtral":
            by = "MoE" if ops == "gqa" else "MatMul"
            assert f"not rounded, as {by} nodes read it" in "\n".join(report.exceptions)
    pipeline = specedge.load(bundle.folder)
    plain, found = (
        pipeline.generate("def parse(", 32, num_draft_tokens=k, ignore_eos=True, logprobs=1)
        for k in (0, 4)
    )
    assert found.tokens == plain.tokens
    assert found.logprobs == plain.logprobs
