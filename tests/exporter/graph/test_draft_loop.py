"""K draft steps in one graph are K passes."""

import numpy as np
import onnx
import pytest

from specedge.bundle.gpu_signatures import UNROLLED
from specedge.runtime.backend.cuda.draft_graphs import GreedyDraftGraph
from specedge.runtime.backend.model_session import ModelSession
from specedge.runtime.backend.sessions import Device
from specedge.runtime.decoding.verification import DraftRequest
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling

OPS = "onnx"  # float32 is batch-invariant
TEXT = [7 * i % 500 for i in range(300)]


@pytest.fixture
def unrolled(bundle, cached):
    session = ModelSession(bundle, bundle.draft, Device(), OPS, UNROLLED)
    return GreedyDraftGraph(session, cached.cache)


def drafted(unrolled, tokens, count):
    request = DraftRequest(History(tokens), count, Sampling(), np.zeros(count))
    draft = unrolled.draft(tokens, request)
    assert draft.probs is None
    return draft.tokens


def by_passes(model, tokens, count):
    found = []
    while len(found) < count:
        row = model.forward(found[-1:] or tokens)[-1]
        found.append(int(row.largest(1)[0][0]))
    return found


def check(passes, cached, unrolled, tokens, count):
    """The same tokens, and the same rows after them."""
    assert drafted(unrolled, tokens, count) == by_passes(passes, tokens, count)
    assert cached.length == passes.length
    assert cached.cache._tokens == passes.cache._tokens
    found, wanted = (model.cache_rows(0, model.length) for model in (cached, passes))
    assert all(map(np.array_equal, found, wanted))


@pytest.mark.parametrize("num_fed", [1, 2])
def test_draft_loop_equals_single_passes(passes, cached, unrolled, num_fed):
    for count in (1, unrolled.num_steps, unrolled.num_steps + 1, 2 * unrolled.num_steps + 1):
        for model in (passes, cached):
            model.truncate(0)
            model.prefill(TEXT[:40])
        check(passes, cached, unrolled, TEXT[40 : 40 + num_fed], count)


def test_draft_loop_continues_after_rejection(passes, cached, unrolled):
    for i in range(20):
        for model in (passes, cached):
            model.truncate(model.length - min(i % 4, model.length))
        check(passes, cached, unrolled, TEXT[i : i + 1 + i % 2], 1 + i % unrolled.num_steps)


def test_steps_beyond_contexts_end_are_dropped(bundle, passes, cached, unrolled):
    context = bundle.draft.context_length
    for left in range(1, unrolled.num_steps + 2):
        for model in (passes, cached):
            model.truncate(0)
            model.prefill(TEXT[: context - left])
        check(passes, cached, unrolled, TEXT[:1], left)


def test_rows_beyond_drafted_tokens_are_never_read(passes, cached, unrolled):
    drafted(unrolled, TEXT[:2], 1)
    passes.forward(TEXT[:2])
    assert np.array_equal(passes.forward([3]).array(), cached.forward([3]).array())


def test_every_step_has_outputs_for_each_buffer_and_weights_are_stored_once(bundle):
    entry = bundle.draft.graph(UNROLLED, OPS)
    outputs = bundle.draft.signatures[entry.signature].outputs
    buffers = [tensor.state for tensor in outputs if tensor.role == "state"]
    assert len(buffers) == bundle.num_draft_tokens * len({*buffers})
    proto = onnx.load(bundle.path(entry.file), load_external_data=False)
    places = [tuple(e.value for e in t.external_data) for t in proto.graph.initializer]
    places = [place for place in places if place]
    assert len(places) == len({*places})


def test_pruned_head_columns_map_to_token_ids(bundle, passes, open_with_pruned_head):
    ids, session, feed = open_with_pruned_head(UNROLLED)
    tokens = [5]
    for _ in range(bundle.num_draft_tokens):
        tokens.append(ids[int(passes.forward(tokens[-1:]).array()[-1].argmax())])
    assert session.run(["drafted"], feed)[0].tolist() == [tokens[1:]]
