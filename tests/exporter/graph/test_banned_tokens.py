"""Nodes for banned tokens match the logits processors of the runtime."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from specedge.exporter.graph.banned_tokens import BannedTokens
from specedge.exporter.graph.nodes import GraphBuilder
from specedge.runtime.backend.ort import inference_session
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits_processors import process_logits
from specedge.sampling_options import DecodingDefaults, Sampling

VOCAB_SIZE = 3
MAX_LENGTH = 4


def open_masks(defaults):
    """Return a session of the masks after a text alone, and before and after draft tokens."""
    nodes = GraphBuilder("test")
    bans = BannedTokens.with_inputs(nodes, VOCAB_SIZE, defaults)
    drafted = nodes.input("drafted", ir.DataType.INT64, ["K", 1])
    masks = {"alone": bans.mask(None), "rows": bans.mask(drafted)}
    for name, mask in masks.items():
        nodes.output(name, nodes("Identity", mask), ir.DataType.BOOL, [None, VOCAB_SIZE])
    data = ir.serde.serialize_model(ir.Model(nodes.graph, ir_version=10)).SerializeToString()
    return inference_session(data, ort.SessionOptions(), ["CPUExecutionProvider"])


def expected(sampling, prompt_length, text):
    history = History(text[:prompt_length])
    history.extend(text[prompt_length:])
    return np.isinf(process_logits(np.zeros(VOCAB_SIZE, np.float32), sampling, history))


DEFAULTS = [
    *(DecodingDefaults(no_repeat_ngram_size=size) for size in (1, 2, 3, 4, 9)),
    DecodingDefaults(begin_suppress_tokens=(0, 2)),
    DecodingDefaults(2, suppress_tokens=(1,), begin_suppress_tokens=(2,)),
]


@pytest.mark.parametrize("defaults", DEFAULTS, ids=str)
def test_masks_are_those_of_the_runtime_for_every_text_and_draft(defaults):
    session, sampling = open_masks(defaults), Sampling(**vars(defaults))
    texts = (x for n in range(1, MAX_LENGTH + 1) for x in itertools.product(range(3), repeat=n))
    for text, drafted in itertools.product(texts, itertools.product(range(3), repeat=2)):
        for prompt_length in {1, len(text)}:
            alone, rows = session.run(
                None,
                {
                    "text_tokens": np.array([text]),
                    "prompt_length": np.array([prompt_length]),
                    "drafted": np.array(drafted)[:, None],
                },
            )
            masks = [
                expected(sampling, prompt_length, [*text, *drafted[:i]])
                for i in range(len(drafted) + 1)
            ]
            np.testing.assert_array_equal(alone, masks[:1])
            np.testing.assert_array_equal(rows, masks)


def test_masks_of_suppressed_tokens_need_no_text():
    nodes = GraphBuilder("test")
    bans = BannedTokens.with_inputs(nodes, VOCAB_SIZE, DecodingDefaults(suppress_tokens=(1,)))
    assert not nodes.graph.inputs
    assert bans.append(nodes.constant([[0]])) is bans
    assert BannedTokens.with_inputs(nodes, VOCAB_SIZE, DecodingDefaults()) is None
