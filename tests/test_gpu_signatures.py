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
