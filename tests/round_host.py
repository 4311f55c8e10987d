"""Hosts of rounds, as docs/hosts.md has them: no sampling, and caches that are bound in place."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import onnxruntime as ort

from specedge.runtime.decoding.random_numbers import uniforms

PER_TOKEN = ("hidden", "fused", "logits")  # outputs with a row for each token, or for the last ones
DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


class Graph:
    """A session whose memory is bound once; its outputs have K + 1 rows."""

    def __init__(self, session, num_rows):
        self.session, self.binding = session, session.io_binding()
        self.shapes = {value.name: value.shape for value in session.get_inputs()}
        self.buffers = {
            name: ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
            for name, shape in self.shapes.items()
            if "past_key_values." in name
        }
        self.given, self.results, self.writes = {}, {}, {}
        self.allocated = []  # outputs that ONNX Runtime allocates in each run
        self.run_time = 0.0  # seconds of the processor in ONNX Runtime
        for name, buffer in self.buffers.items():
            self.binding.bind_ortvalue_input(name, buffer)
        for value in session.get_outputs():
            if "present." in value.name:
                self.writes[value.name] = _read_as(value.name)
                place = self.buffers[self.writes[value.name]]
            elif value.name in PER_TOKEN:
                self.allocated.append(value.name)
                self.binding.bind_output(value.name)
                continue
            else:
                shape = [{"B": 1, "R": num_rows}.get(size, size) for size in value.shape]
                zeros = np.zeros(shape, DTYPES[value.type])
                place = self.results[value.name] = ort.OrtValue.ortvalue_from_numpy(zeros)
            self.binding.bind_ortvalue_output(value.name, place)

    def fill(self, name, values):
        """Replace the content of a buffer, if the graph has it."""
        if name in self.buffers:
            self.buffers[name].update_inplace(values)

    def run(self, given):
        for name in self.shapes.keys() - self.buffers.keys():
            if self.given.get(name) is not given[name]:
                self.given[name] = given[name]
                self.binding.bind_cpu_input(name, given[name])
        for name in self.allocated:  # not into the memory of the run before
            self.binding.bind_output(name)
        start = time.process_time()
        self.session.run_with_iobinding(self.binding)
        self.run_time += time.process_time() - start
        results = {name: value.numpy().copy() for name, value in self.results.items()}
        names = [value.name for value in self.session.get_outputs()] if self.allocated else []
        outputs = dict(zip(names, self.binding.get_outputs() if names else [], strict=True))
        return results | {name: outputs[name].numpy() for name in self.allocated}


def _read_as(present):
    """The input of an output's buffer: of draft.2.present.0.key, draft.past_key_values.0.key."""
    before, after = present.split("present.")
    role = f"{before.split('.')[0]}." if before else ""
    return f"{role}past_key_values.{after}"


class Host:
    """The loop that both layouts share. `ends` are tokens that end a text, and `opener` is the
    session of an encoder-decoder's source.
    """

    def __init__(self, bundle, num_draft_tokens, graphs, ends=(), opener=None):
        self.bundle, self.num_draft_tokens, self.ends = bundle, num_draft_tokens, {*ends}
        self.graphs, self.opener = graphs, opener
        self.source_length = {}  # an input of the graphs
        self.boundaries = bundle.hosts.pass_boundaries if bundle.hosts else ()
        self.reads_hidden = any("hidden" in graph.shapes for graph in graphs)
        self.reads_text = "text_tokens" in graphs[0].shapes

    def open(self, source):
        """Set the constant states to those of a source: tokens, or samples of audio [n]."""
        names = [value.name for value in self.opener.get_outputs()]
        (port,) = self.opener.get_inputs()
        values, length = np.array([source], np.int64), len(source)
        if port.name == "audio":
            values, length = np.zeros(port.shape, np.float32), self.bundle.target.encoder.capacity
            values[0, : len(source)] = source
        states = self.opener.run(names, {port.name: values})
        for name, state in zip(names, states, strict=True):
            for graph in self.graphs:
                input_name = _read_as(name)
                graph.fill(input_name, state)
                if graph is getattr(self, "target", None):  # a decoder's own names have no role
                    graph.fill(input_name.removeprefix("target."), state)
        self.source_length = {"source_length": np.array([length], np.int64)}

    def parts(self, length, count):
        """The runs that process `count` tokens after `length` rows of a cache: start and end."""
        inner = (end - length for end in self.boundaries if length < end < length + count)
        return pairwise((0, *inner, count))

    def generate(
        self, prompt, max_new_tokens, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0,
        repetition_penalty=1.0, seed=0, piece=None, source=None,
    ):  # fmt: skip
        """The new tokens, and how many drafted ones each round accepted. `piece` tokens of the
        prompt are read at a time. The text of a `source` begins with the decoder tokens `prompt`.
        """
        if source is not None:
            self.open(source)
        k, tokens, accepted = self.num_draft_tokens, list(prompt), []
        limit = min(len(prompt) + max_new_tokens, self.bundle.context_length)
        settings = self.source_length | {
            "temperature": np.array([temperature], np.float32),
            "top_k": np.array([top_k], np.int64),
            "top_p": np.array([top_p], np.float64),
            "min_p": np.array([min_p], np.float32),
            "repetition_penalty": np.array([repetition_penalty], np.float32),
            "seen": np.zeros((1, self.bundle.target.vocab_size), bool),
        }
        settings["seen"][0, prompt] = True
        if self.reads_text:
            settings["prompt_length"] = np.array([len(prompt)], np.int64)
        draft_length = target_length = 0
        while piece and len(prompt) - target_length > piece:
            nothing = settings | {"num_draft_tokens": np.array([0], np.int64)}
            chunk_end = target_length + piece
            chunk = tokens[:chunk_end]
            self.round(nothing, chunk, draft_length, target_length, np.zeros(2 * k + 1))
            draft_length, target_length = target_length, chunk_end
            if not self.reads_hidden:
                draft_length = target_length
        while len(tokens) < limit:
            wanted, length = limit - len(tokens), len(tokens)
            room = wanted - 1 if temperature == 0 else self.bundle.context_length - length
            if self.reads_hidden and not accepted:  # a head does not draft in the first round
                room = 0
            settings["num_draft_tokens"] = np.array([min(k, room)], np.int64)
            numbers = uniforms(seed, len(accepted) * (2 * k + 1), 2 * k + 1)
            new, num_accepted = self.round(settings, tokens, draft_length, target_length, numbers)
            accepted.append(min(num_accepted, wanted))
            for token in new[: num_accepted + 1][:wanted]:
                tokens.append(token)
                settings["seen"][0, token] = True
                if token in self.ends:
                    return tokens[len(prompt) :], accepted
            # A head has read the states of all tokens before this run of the target.
            num_read = target_length if self.reads_hidden else length + k - 1
            target_length = len(tokens) - 1
            draft_length = min(target_length, num_read)
        return tokens[len(prompt) :], accepted


class Fused(Host):
    """One run a round."""

    def __init__(self, session, bundle, ends=(), opener=None):
        (num_uniforms,) = next(v.shape for v in session.get_inputs() if v.name == "uniforms")
        graph = Graph(session, num_uniforms // 2 + 1)
        super().__init__(bundle, num_uniforms // 2, [graph], ends, opener)

    def round(self, settings, tokens, draft_length, target_length, numbers):
        for start, end in self.parts(draft_length, len(tokens) - draft_length):
            inputs = {
                "text_tokens": np.array([tokens], np.int64),
                "tokens": np.array([tokens[draft_length:][start:end]], np.int64),
                "draft_length": np.array([draft_length + start], np.int64),
                "target_length": np.array([target_length + start], np.int64),
                "uniforms": numbers,
            }
            outputs = self.graphs[0].run(settings | inputs)
        return outputs["next_tokens"].tolist(), int(outputs["num_accepted"][0])


class Split(Host):
    """A run for each draft token, one of the target, and one of the accept rule.

    A draft head reads the hidden states of the target's last run first.
    """

    def __init__(self, sessions, bundle, num_draft_tokens, ends=(), opener=None):
        graphs = [Graph(session, num_draft_tokens + 1) for session in sessions]
        super().__init__(bundle, num_draft_tokens, graphs, ends, opener)
        self.draft, self.target, self.accept, *self.fuse = graphs  # fuse: of some draft heads
        self.hidden = None  # states of the tokens of the last run of the target

    def round(self, settings, tokens, draft_length, target_length, numbers):
        k, settings = self.num_draft_tokens, settings | {"seen": settings["seen"].copy()}
        before, drafted, rows = settings["seen"].copy(), [], []
        fed, position, hidden, num_steps = tokens[draft_length:], draft_length, {}, k
        if self.reads_hidden:  # state i and token i + 1
            fed = tokens[draft_length + 1 : target_length + 1]
            hidden = {"hidden": self.hidden[:, : len(fed)]} if fed else {}
            if fed and self.fuse:
                hidden = {"hidden": self.fuse[0].run(hidden)["fused"]}
            if not settings["num_draft_tokens"][0]:  # at most one step, for the states
                num_steps = min(len(fed), 1)
        for i in range(num_steps):
            for start, end in self.parts(position, len(fed)):
                inputs = {name: states[:, start:end] for name, states in hidden.items()}
                inputs["tokens"] = np.array([fed[start:end]])
                inputs["draft_length"] = np.array([position + start])
                inputs["text_tokens"] = np.array([tokens + drafted])
                outputs = self.draft.run(settings | inputs | {"uniforms": numbers[i : i + 1]})
            hidden = {"hidden": outputs["next_hidden"]} if hidden else {}
            position, fed = position + len(fed), outputs["token"].tolist()
            drafted += fed
            rows.append(outputs["weights"])
            settings["seen"][0, fed] = True
        drafted += [0] * (k - num_steps)
        rows += [np.zeros_like(before, np.float32)] * (k - num_steps)
        missing = tokens[target_length:]
        outputs = self.verify(missing + drafted, target_length, len(missing) - 1)
        self.hidden = outputs.get("hidden")
        inputs = {
            "logits": outputs["logits"][:, -k - 1 :],
            "tokens": np.array(drafted),
            "weights": np.concatenate(rows),
            "text_tokens": np.array([tokens]),
            "seen": before,
            "uniforms": numbers[k:],
        }
        outputs = self.accept.run(settings | inputs)
        return outputs["next_tokens"].tolist(), int(outputs["num_accepted"][0])

    def verify(self, tokens, length, first):
        """Outputs of the target for tokens after `length` rows, with logits of at least the rows
        from `first` on.
        """
        outputs = []
        for start, end in self.parts(length, len(tokens)):
            inputs = self.source_length | {
                "input_ids": np.array([tokens[start:end]]),
                "past_length": np.array([length + start]),
                "logits_from": np.array([min(max(first - start, 0), end - start - 1)]),
            }
            outputs.append(self.target.run(inputs))
        return {name: np.concatenate([x[name] for x in outputs], 1) for name in outputs[0]}
