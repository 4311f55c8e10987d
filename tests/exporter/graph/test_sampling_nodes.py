"""Graph nodes for distributions, sampling and the accept rule match the runtime."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from specedge.exporter.graph.nodes import GraphBuilder
from specedge.exporter.graph.sampling_nodes import SamplingNodes
from specedge.runtime.backend.ort import inference_session
from specedge.runtime.decoding.verification import Draft, verify
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Logits
from specedge.runtime.sampling.probabilities import probabilities
from specedge.sampling_options import DecodingDefaults, Sampling

FLOAT, INT, DOUBLE = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.DOUBLE
TEXT = History([0])
LAST_UNIFORM = 1 - 2**-53
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 20},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 10**6},
]


@cache
def session(vocab_size, num_draft_tokens):
    """Weights of a draft's and a target's rows, and the verdict."""
    nodes = GraphBuilder("test")
    sampling = SamplingNodes.with_inputs(nodes, vocab_size, DecodingDefaults())
    rows = [
        nodes.input(name, FLOAT, [num, vocab_size])
        for name, num in (("draft", num_draft_tokens), ("target", num_draft_tokens + 1))
    ]
    tokens = nodes.input("tokens", INT, [num_draft_tokens, 1])
    limit = nodes.input("limit", INT, [1])
    tests = nodes.input("tests", DOUBLE, [num_draft_tokens])
    last = nodes.input("last", DOUBLE, [1])
    draft, target = (sampling.token_weights(row, sampling.seen, vocab_size) for row in rows)
    verdict = sampling.accept_tokens(tokens, draft.weights, target, limit, tests, last)
    weights = [row.weights for row in (draft, target)]
    found = dict(
        zip(("of_draft", "of_target", "accepted", "next"), [*weights, *verdict], strict=True)
    )
    for name, value in found.items():
        nodes.output(name, value, FLOAT if name.startswith("of") else INT, [None])
    model = ir.Model(nodes.graph, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    data = ir.serde.serialize_model(model).SerializeToString()
    return inference_session(data, options, ["CPUExecutionProvider"])


def run(draft, target, tokens, sampling, uniforms, limit=None):
    num_draft_tokens, vocab_size = draft.shape
    return session(vocab_size, num_draft_tokens).run(
        None,
        {
            "temperature": np.array([sampling.temperature], np.float32),
            "top_k": np.array([sampling.top_k]),
            "top_p": np.array([sampling.top_p]),
            "min_p": np.array([sampling.min_p], np.float32),
            "repetition_penalty": np.ones(1, np.float32),
            "seen": np.zeros((1, vocab_size), bool),
            "draft": draft,
            "target": target,
            "tokens": np.array(tokens)[:, None],
            "limit": np.array([num_draft_tokens if limit is None else limit]),
            "tests": uniforms[num_draft_tokens : 2 * num_draft_tokens],
            "last": uniforms[-1:],
        },
    )


def check(draft, target, sampling, uniforms, limit):
    """The graph and the runtime draw from the same rows, and decide alike."""
    num = len(draft)
    distributions = None
    if sampling.greedy:
        tokens = [int(row.argmax()) for row in draft]
    else:
        distributions = [probabilities(row, sampling, TEXT) for row in draft]
        tokens = [d.pick(float(u)) for d, u in zip(distributions, uniforms, strict=False)]
    wanted = verify(
        Draft(tokens[:limit], distributions and distributions[:limit]),
        Logits(target), sampling, TEXT, uniforms[num:], float(uniforms[-1]), is_block=True,
    )  # fmt: skip
    weights, _, accepted, next_token = run(draft, target, tokens, sampling, uniforms, limit)
    if distributions:
        rows = np.stack([d.weights_of_all(draft.shape[1]) for d in distributions])
        odd = (weights > 0) != (rows > 0)
        if odd.any():  # the last bit of an exp decides the nucleus boundary
            assert sampling.top_p < 1
            assert odd.sum(1).max() == 1
            least = np.where(rows > 0, rows, 1).min(1, keepdims=True)
            np.testing.assert_allclose((weights + rows)[odd], (least + 0 * rows)[odd], rtol=0.01)
            return
        np.testing.assert_allclose(weights, rows, rtol=1e-6)
    assert (int(accepted[0]), int(next_token[0, 0])) == (wanted.num_accepted, wanted.next_token)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [7, 300, 5000])
def test_graph_samples_accepts_and_recovers_like_runtime(vocab_size, filters):
    rng = np.random.default_rng(vocab_size)
    for i, temperature in enumerate(np.tile([0.0, 0.001, 0.7, 1.0, 30.0], 3)):
        draft = rng.normal(0, (0.1, 1, 4)[i % 3], (4, vocab_size)).astype(np.float32)
        noise = rng.normal(0, 1, (5, vocab_size))
        target = (np.concatenate([draft, draft[:1]]) + noise).astype(np.float32)
        sampling = Sampling(temperature=float(temperature), **filters)
        check(draft, target, sampling, rng.random(9), limit=i % 5)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST_UNIFORM])
def test_ties_equal_rows_and_disjoint_rows_are_decided_as_by_runtime(uniform, filters):
    vocab_size, uniforms = 300, np.full(9, uniform)
    steps = np.round(np.random.default_rng(0).normal(0, 2, (5, vocab_size))).astype(np.float32)
    flat = np.zeros((5, vocab_size), np.float32)
    low, high = flat.copy(), flat.copy()
    low[:, :150], high[:, 150:] = 200, 200
    rows = {"steps": steps, "flat": flat, "low": low, "high": high}
    for draft, target in itertools.product(rows.values(), repeat=2):
        for temperature in (1.0,) if filters else (0.0, 1.0):
            sampling = Sampling(temperature=temperature, **filters)
            check(draft[:4], target, sampling, uniforms, limit=4)


def test_nucleus_larger_than_top_tokens_uses_full_distribution():
    rng = np.random.default_rng(1)
    rows = rng.normal(0, 0.1, (5, 5000)).astype(np.float32)
    weights, *_ = run(rows[:4], rows, [0] * 4, Sampling(temperature=1, top_p=0.9), np.zeros(9))
    assert (weights > 0).sum(1).min() > 4000
    check(rows[:4], rows, Sampling(temperature=1, top_p=0.9), rng.random(9), limit=4)


def test_first_token_follows_target_distribution_for_any_draft():
    """Integrated over a grid of the random numbers, as the runtime's own rule is."""
    draft = np.log(np.array([[0.5, 0.3, 0.2]], np.float32))
    target = np.log(np.array([[0.2, 0.3, 0.5], [1, 1, 1]], np.float32))
    sampling, num = Sampling(temperature=1), 20
    grid = (np.arange(num) + 0.5) / num
    seen = np.zeros(3)
    for token, share in enumerate((0.5, 0.3, 0.2)):
        for test, last in itertools.product(grid, repeat=2):
            uniforms = np.array([0, test, last])
            _, _, accepted, next_token = run(draft, target, [token], sampling, uniforms)
            seen[token if accepted[0] else int(next_token[0, 0])] += share / num**2
    np.testing.assert_allclose(seen, [0.2, 0.3, 0.5], atol=0.03)
