"""A small encoder-decoder as a bundle, with graphs written by hand and random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from manifests import write_manifest, write_model
from specedge import bundle as b
from specedge.bundle import manifest as m

PAD, END, UNKNOWN, FRENCH, GERMAN = range(5)
VOCAB_SIZE, NUM_MEL_BINS, FRAME = 40, 4, 400
CONTEXT, CAPACITY, SOURCE, ROWS = 120, 132, 30, 32
HEADS, SIZE, HIDDEN = 2, 8, 16
WORDS = [f"\u2581w{i}" for i in range(VOCAB_SIZE - 5)]


class Graph:
    """Nodes and initializers of an ONNX graph."""

    def __init__(self) -> None:
        self.nodes, self.initializers = [], []

    def constant(self, values, dtype=np.float32):
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def op(self, kind, *inputs, output=None, **attributes):
        output = output or f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def heads(self, x, weights):
        """[1, T, F] -> [1, H, T, D]"""
        product = self.op("MatMul", x, weights)
        shape = self.constant([1, -1, HEADS, SIZE], np.int64)
        return self.op("Transpose", self.op("Reshape", product, shape), perm=[0, 2, 1, 3])

    def attend(self, queries, keys, values, mask):
        scores = self.op("MatMul", queries, self.op("Transpose", keys, perm=[0, 1, 3, 2]))
        masked = self.op("Where", mask, scores, self.constant(-1e9))
        context = self.op("MatMul", self.op("Softmax", masked, axis=-1), values)
        rows = self.op("Transpose", context, perm=[0, 2, 1, 3])
        return self.op("Reshape", rows, self.constant([1, -1, HIDDEN], np.int64))

    def embed(self, weights, capacity):
        """Return the embeddings of the tokens with their positions, and the causal mask."""
        bounds = (self.constant([i], np.int64) for i in (1, 2))
        length = self.op("Slice", self.op("Shape", "input_ids"), *bounds)
        rows = self.constant(range(capacity), np.int64)
        steps = self.op("Slice", rows, self.constant([0], np.int64), length)
        positions = self.op("Add", steps, "past_length")
        tokens = self.op("Gather", self.constant(weights["embedding"]), "input_ids")
        places = self.op("Gather", self.constant(weights["positions"]), positions)
        column = self.op("Unsqueeze", positions, self.constant([1], np.int64))
        return self.op("Add", tokens, places), self.op("LessOrEqual", rows, column)

    def attend_to_cache(self, x, queries, keys, values, index, causal):
        """Add rows to the caches of a layer, and attend to them."""
        states = {}
        for name, matrix in (("key", keys), ("value", values)):
            states[name] = self.op(
                "TensorScatter", f"past_key_values.{index}.{name}", self.heads(x, matrix),
                "past_length", output=f"present.{index}.{name}",
            )  # fmt: skip
        return self.attend(self.heads(x, queries), states["key"], states["value"], causal)

    def write_logits(self, x, head, capacity):
        end = self.constant([capacity], np.int64)
        last = self.op("Slice", x, "logits_from", end, self.constant([1], np.int64))
        self.op("MatMul", last, self.constant(head), output="logits")

    def save(self, path, signature):
        dtypes = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}

        def values(ports):
            shapes = [[1 if s == "B" else s for s in port.shape] for port in ports]
            return [
                helper.make_tensor_value_info(port.name, dtypes[port.dtype], shape)
                for port, shape in zip(ports, shapes, strict=True)
            ]

        graph = helper.make_graph(
            self.nodes, path.stem, values(signature.inputs), values(signature.outputs),
            self.initializers,
        )  # fmt: skip
        opset = [helper.make_opsetid("", 24)]
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)


def _decoder(weights, num_layers):
    g = Graph()
    x, causal = g.embed(weights, CAPACITY)
    reads = g.op("Less", g.constant(range(ROWS), np.int64), "source_length")
    for i in range(num_layers):
        q, k, v, o, cross_q, cross_o = (g.constant(w) for w in weights[i])
        mixed = g.attend_to_cache(x, q, k, v, i, causal)
        x = g.op("Add", x, g.op("MatMul", mixed, o))
        cross = [f"past_key_values.{i}.cross.{name}" for name in ("key", "value")]
        read = g.attend(g.heads(x, cross_q), *cross, reads)
        x = g.op("Tanh", g.op("Add", x, g.op("MatMul", read, cross_o)))
    g.write_logits(x, weights["head"], CAPACITY)
    return g


def _encoder(weights, is_speech):
    g = Graph()
    if is_speech:
        x = g.op("Transpose", "source", perm=[0, 2, 1])
        first, last, axis, step = (g.constant([i], np.int64) for i in (0, 2 * ROWS, 1, 2))
        x = g.op("MatMul", g.op("Slice", x, first, last, axis, step), g.constant(weights["mel"]))
    else:
        x = g.op("Gather", g.constant(weights["encoder"]), "source")
    total = g.op("CumSum", x, g.constant(1, np.int64))
    g.op("Tanh", g.op("Add", x, total), output="hidden")
    return g


def _opener(weights, num_layers):
    g = Graph()
    length = g.op(
        "Slice", g.op("Shape", "hidden"), *(g.constant([i], np.int64) for i in (1, 2))
    )  # fmt: skip
    missing = g.op("Sub", g.constant([ROWS], np.int64), length)
    zeros = [g.constant([0] * count, np.int64) for count in (6, 1)]
    pads = g.op("Concat", zeros[0], missing, zeros[1], axis=0)
    for i in range(num_layers):
        for name, matrix in zip(("key", "value"), weights["cross", i], strict=True):
            states = g.heads("hidden", g.constant(matrix))
            g.op("Pad", states, pads, output=f"present.{i}.cross.{name}")
    return g


def _weights(seed, num_layers):
    random = np.random.default_rng(seed)

    def matrix(*shape, gain=1.0):
        return gain * random.standard_normal(shape) / np.sqrt(shape[0])

    weights = {
        "embedding": random.standard_normal((VOCAB_SIZE, HIDDEN)),
        "positions": 1.5 * random.standard_normal((CAPACITY, HIDDEN)),
        "encoder": random.standard_normal((VOCAB_SIZE, HIDDEN)),
        "mel": matrix(NUM_MEL_BINS, HIDDEN),
        "head": matrix(HIDDEN, VOCAB_SIZE, gain=4),
    }
    for i in range(num_layers):
        weights[i] = [matrix(HIDDEN, HIDDEN, gain=1.5) for _ in range(6)]
        weights["cross", i] = [matrix(HIDDEN, HIDDEN, gain=1.5) for _ in range(2)]
    return weights


def _model(folder, role, weights, num_layers, has_encoder, is_speech, token_ids=None):
    states = tuple(
        state
        for i in range(num_layers)
        for make in (m.key_value_states, m.cross_attention_states)
        for state in make(i, (HEADS, SIZE), (HEADS, SIZE), "float32")
    )
    bins = NUM_MEL_BINS if is_speech else None
    encoder = m.EncoderEntry(2 * ROWS if is_speech else SOURCE, bins, HIDDEN, ROWS)
    columns = weights["head"].shape[1]
    signatures = m.signatures(states, CAPACITY, columns, encoder)
    graphs = {"decoder": _decoder(weights, num_layers), "open": _opener(weights, num_layers)}
    if has_encoder:
        graphs["encoder"] = _encoder(weights, is_speech)
    if is_speech and role == "target":
        graphs[m.FEATURES] = LogMelGraph(encoder.num_samples)
    return write_model(
        folder,
        role,
        graphs,
        17,
        architecture="t5",
        vocab_size=len(weights["embedding"]),
        padded_vocab_size=columns,
        context_length=CONTEXT,
        capacity=CAPACITY,
        states=states,
        token_ids=token_ids,
        signatures=signatures,
        encoder=encoder,
    )


class LogMelGraph:
    """Spectrogram of audio, with random filters."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def save(self, path, signature):
        import onnx_ir as ir

        from specedge.exporter.graph.log_mel import build_log_mel

        filters = np.random.default_rng(2).random((FRAME // 2 + 1, NUM_MEL_BINS))
        ir.save(build_log_mel(filters, FRAME, self.num_samples), path)


def make_tokenizer():
    names = ["<pad>", "</s>", "<unk>", "fra_Latn", "deu_Latn"]
    vocabulary = {name: i for i, name in enumerate([*names, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", END)]
    )
    return tokenizer


def make_encoder_decoder(
    folder: Path,
    draft: str | None = "own",
    is_speech: bool = False,
    prefix=(FRENCH,),
    vocab_size: int = VOCAB_SIZE,
    token_ids: tuple[int, ...] | None = None,
) -> b.Bundle:
    """Write a bundle whose draft has its own encoder, shares the target's ("shared"), or is None.

    A draft that shares the encoder has half of the target's layers. One with its own has the first
    `vocab_size` tokens, or a reduced vocabulary of `token_ids`.
    """
    weights = _weights(0, 2)
    entries = {"target": _model(folder, "target", weights, 2, True, is_speech)}
    if draft == "own":
        other = _weights(0, 2)
        other["head"] = other["head"] + 0.4 * _weights(1, 2)["head"]
        for name in ("embedding", "encoder"):
            other[name] = other[name][:vocab_size]
        other["head"] = other["head"][:, [*(token_ids or range(vocab_size))]]
        file = None if token_ids is None else "draft/token_ids.bin"
        entries["draft"] = _model(folder, "draft", other, 2, True, is_speech, file)
        if file is not None:
            (folder / file).write_bytes(b.pack_ids(token_ids))
    elif draft == "shared":
        entries["draft"] = _model(folder, "draft", weights, 1, False, is_speech)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    fields = {"decoder_start": (PAD,), "decoder_prefix": tuple(prefix)}
    write_manifest(folder, entries, end_tokens=(END,), **fields)
    return b.Bundle.read(folder)
