"""Signatures of GPU graphs fit their bundle."""

from dataclasses import replace

import pytest

from manifests import make_bundle
from specedge.bundle import Bundle
from specedge.bundle.gpu_signatures import ONE_CALL, one_call


@pytest.mark.parametrize("name", ONE_CALL)
def test_one_call_draft_graph_must_match_bundle_num_draft_tokens(tmp_path, name):
    bundle = make_bundle(tmp_path)
    draft, k = bundle.draft, bundle.num_draft_tokens

    def drafting(num_tokens):
        """The bundle with such a graph."""
        made = one_call(name, draft.signatures["chosen_logits"], draft.num_columns, num_tokens)
        graph = replace(draft.graphs[0], name=name, signature="made")
        signatures = draft.signatures | {"made": made}
        model = replace(draft, graphs=(*draft.graphs, graph), signatures=signatures)
        return replace(bundle, models=bundle.models | {"draft": model})

    assert Bundle.from_json(drafting(k).to_json()) == drafting(k)
    with pytest.raises(ValueError, match=f"draft: {name} drafts 6 tokens, num_draft_tokens is {k}"):
        drafting(6)


@pytest.mark.parametrize("name", ONE_CALL)
def test_more_steps_than_outputs_are_refused_before_they_are_listed(tmp_path, name):
    """A billion steps would take all memory."""
    bundle = make_bundle(tmp_path)
    signature = one_call(name, bundle.draft.signatures["chosen_logits"], 9, 4)
    inputs, outputs = (
        tuple(replace(p, shape=(10**9,)) if p.role in ("uniforms", "drafted") else p for p in ports)
        for ports in (signature.inputs, signature.outputs)
    )
    signature = replace(signature, inputs=inputs, outputs=outputs)
    graph = replace(bundle.draft.graphs[0], name=name, signature="made")
    with pytest.raises(ValueError, match="outputs of too few steps"):
        replace(
            bundle.draft,
            graphs=(*bundle.draft.graphs, graph),
            signatures=bundle.draft.signatures | {"made": signature},
        )
