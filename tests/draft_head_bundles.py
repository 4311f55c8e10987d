"""A small target with a draft head as a bundle, with graphs written by hand and random weights.

The target's next token depends mostly on its last one, and so does the head's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from encoder_decoder_bundles import HEADS, HIDDEN, SIZE, Graph, make_tokenizer
from manifests import write_manifest, write_model
from specedge import bundle as b
from specedge.bundle import manifest as m

VOCAB_SIZE, CONTEXT, CAPACITY = 40, 300, 320
LAYERS = (1, 2)  # the second layer's input, and its output
TOKEN_IDS = tuple(range(0, VOCAB_SIZE, 2))  # of the head
FEATURES = len(LAYERS) * HIDDEN


def make_draft_head(
    folder: Path, token_ids: tuple[int, ...] | None = TOKEN_IDS, fuses: bool = True
) -> b.Bundle:
    """Write a bundle of a target and a draft head.

    Without `fuses`, the head reads the target's last states as they are, as an MTP head.
    """
    layers = LAYERS if fuses else LAYERS[1:]
    weights = _weights(0)
    hidden = m.HiddenStates(layers, len(layers) * HIDDEN)
    states = {role: _states(count) for role, count in (("target", 2), ("draft", 1))}
    graphs = {"target": {"decoder": _target(weights, layers)}}
    graphs["draft"] = {"decoder": _head(weights, token_ids)}
    if fuses:
        graphs["draft"]["fuse"] = _fuse(weights)
    hidden_of = {"target": hidden, "draft": m.HiddenStates(layers, hidden.size, HIDDEN)}
    entries = {}
    for role in ("target", "draft"):
        columns = VOCAB_SIZE if role == "target" or token_ids is None else len(token_ids)
        signatures = m.signatures(states[role], CAPACITY, columns, hidden=hidden_of[role])
        entries[role] = write_model(
            folder,
            role,
            graphs[role],
            256,
            architecture="llama",
            vocab_size=VOCAB_SIZE,
            padded_vocab_size=columns,
            context_length=CONTEXT,
            capacity=CAPACITY,
            states=states[role],
            token_ids="draft/token_ids.bin" if columns < VOCAB_SIZE else None,
            signatures=signatures,
            hidden=hidden_of[role],
        )
    if entries["draft"].token_ids:
        ids = np.array(token_ids, "<u4").tobytes()
        (folder / "draft/token_ids.bin").write_bytes(ids)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    write_manifest(folder, entries, end_tokens=(1,))
    return b.Bundle.read(folder)


def _states(num_layers):
    return tuple(
        state
        for i in range(num_layers)
        for state in m.key_value_states(i, (HEADS, SIZE), (HEADS, SIZE), "float32")
    )


def _weights(seed):
    random = np.random.default_rng(seed)

    def matrix(*shape, gain=1.0):
        return gain * random.standard_normal(shape) / np.sqrt(shape[0])

    layers = [[matrix(HIDDEN, HIDDEN) for _ in range(4)] for _ in range(3)]
    return {
        "embedding": 1.5 * random.standard_normal((VOCAB_SIZE, HIDDEN)),
        "positions": 0.3 * random.standard_normal((CAPACITY, HIDDEN)),
        "head": matrix(HIDDEN, VOCAB_SIZE, gain=4),
        "fuse": matrix(FEATURES, HIDDEN, gain=0.3),
        "layers": layers,
    }


def _layer(g, x, matrices, index, causal, output=None):
    q, k, v, o = (g.constant(matrix) for matrix in matrices)
    mixed = g.attend_to_cache(x, q, k, v, index, causal)
    return g.op("Tanh", g.op("Add", x, g.op("MatMul", mixed, o)), output=output)


def _target(weights, layers):
    g = Graph()
    x, causal = g.embed(weights, CAPACITY)
    inputs = [x]
    for i in range(2):
        inputs.append(_layer(g, inputs[-1], weights["layers"][i], i, causal))
    chosen = [inputs[layer] for layer in layers]
    g.op("Concat", *chosen, output="hidden", axis=-1)
    g.write_logits(inputs[-1], weights["head"], CAPACITY)
    return g


def _head(weights, token_ids):
    g = Graph()
    x, causal = g.embed(weights, CAPACITY)
    x = g.op("Add", x, g.op("Mul", "hidden", g.constant(0.4)))
    _layer(g, x, weights["layers"][2], 0, causal, output="next_hidden")
    head = weights["head"] if token_ids is None else weights["head"][:, [*token_ids]]
    g.write_logits("next_hidden", head, CAPACITY)
    return g


def _fuse(weights):
    g = Graph()
    g.op("MatMul", "hidden", g.constant(weights["fuse"]), output="fused")
    return g
