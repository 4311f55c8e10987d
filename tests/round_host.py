"""Hosts of rounds, as docs/hosts.md has them: no sampling, and caches that are bound in place."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from specedge.runtime.loop.randomness import uniforms


class Graph:
    """A session whose caches are bound in place."""

    def __init__(self, session):
        self.session = session
        self.shapes = {value.name: value.shape for value in session.get_inputs()}
        self.results = [v.name for v in session.get_outputs() if "present." not in v.name]
        self.buffers = {
            name: ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
            for name, shape in self.shapes.items()
            if "past_key_values." in name
        }

    def run(self, given):
        binding = self.session.io_binding()
        for name in self.shapes.keys() - self.buffers.keys():
            binding.bind_cpu_input(name, given[name])
        for name, buffer in self.buffers.items():
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), buffer)
        for name in self.results:
            binding.bind_output(name)
        self.session.run_with_iobinding(binding)
        names = [*(n.replace("past_key_values", "present") for n in self.buffers), *self.results]
        found = dict(zip(names, binding.get_outputs(), strict=True))
        return {name: found[name].numpy() for name in self.results}


class Host:
    """The loop that both layouts share. `ends` are tokens that end a text."""

    def __init__(self, bundle, num_draft_tokens, ends=()):
        self.bundle, self.num_draft_tokens, self.ends = bundle, num_draft_tokens, {*ends}

    def generate(
        self, prompt, max_new_tokens, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0,
        repetition_penalty=1.0, seed=0, piece=None,
    ):  # fmt: skip
        """The new tokens, and how many drafted ones each round accepted. `piece` tokens of the
        prompt are read at a time.
        """
        k, tokens, accepted = self.num_draft_tokens, list(prompt), []
        limit = min(len(prompt) + max_new_tokens, self.bundle.context_length)
        settings = {
            "temperature": np.array([temperature], np.float32),
            "top_k": np.array([top_k], np.int64),
            "top_p": np.array([top_p], np.float64),
            "min_p": np.array([min_p], np.float32),
            "repetition_penalty": np.array([repetition_penalty], np.float32),
            "seen": np.zeros((1, self.bundle.target.vocab_size), bool),
        }
        draft_length = target_length = 0
        while piece and len(prompt) - draft_length > piece:
            nothing = settings | {"num_draft_tokens": np.array([0], np.int64)}
            read = tokens[: draft_length + piece]
            self.round(nothing, read, draft_length, target_length, np.zeros(2 * k + 1))
            draft_length = target_length = len(read)
        while len(tokens) < limit:
            wanted, length = limit - len(tokens), len(tokens)
            settings["seen"][0, tokens] = True
            settings["num_draft_tokens"] = np.array([min(k, wanted - (temperature == 0))], np.int64)
            numbers = uniforms(seed, len(accepted) * (2 * k + 1), 2 * k + 1)
            new, num_accepted = self.round(settings, tokens, draft_length, target_length, numbers)
            accepted.append(min(num_accepted, wanted))
            for token in new[: num_accepted + 1][:wanted]:
                tokens.append(token)
                if token in self.ends:
                    return tokens[len(prompt) :], accepted
            target_length = len(tokens) - 1
            draft_length = min(target_length, length + k - 1)
        return tokens[len(prompt) :], accepted


class Fused(Host):
    """One run a round."""

    def __init__(self, session, bundle, ends=()):
        self.graph = Graph(session)
        super().__init__(bundle, self.graph.shapes["uniforms"][0] // 2, ends)

    def round(self, settings, tokens, draft_length, target_length, numbers):
        found = self.graph.run(
            settings
            | {
                "tokens": np.array([tokens[draft_length:]], np.int64),
                "draft_length": np.array([draft_length], np.int64),
                "target_length": np.array([target_length], np.int64),
                "uniforms": numbers,
            }
        )
        return found["next_tokens"].tolist(), int(found["num_accepted"][0])


class Split(Host):
    """A run for each draft token, one of the target, and one of the accept rule."""

    def __init__(self, sessions, bundle, num_draft_tokens, ends=()):
        self.draft, self.target, self.accept = map(Graph, sessions)
        super().__init__(bundle, num_draft_tokens, ends)

    def round(self, settings, tokens, draft_length, target_length, numbers):
        k, settings = self.num_draft_tokens, settings | {"seen": settings["seen"].copy()}
        before, drafted, rows = settings["seen"].copy(), [], []
        fed, place = tokens[draft_length:], draft_length
        for i in range(k):
            given = {"tokens": np.array([fed]), "draft_length": np.array([place])}
            found = self.draft.run(settings | given | {"uniforms": numbers[i : i + 1]})
            place, fed = place + len(fed), found["token"].tolist()
            drafted += fed
            rows.append(found["weights"])
            settings["seen"][0, fed] = True
        missing = tokens[target_length:]
        given = {
            "input_ids": np.array([missing + drafted]),
            "past_length": np.array([target_length]),
            "logits_from": np.array([len(missing) - 1]),
        }
        given = {
            "logits": self.target.run(given)["logits"],
            "tokens": np.array(drafted),
            "weights": np.concatenate(rows),
            "seen": before,
            "uniforms": numbers[k:],
        }
        found = self.accept.run(settings | given)
        return found["next_tokens"].tolist(), int(found["num_accepted"][0])
