"""What a piece of a stream costs, however much text came before it."""

import json
import math

import pytest

pytest.importorskip("uvicorn", reason="needs the serve extra")

from specedge.runtime.sampling.logprobs import TokenLogprobs
from specedge.serve import asking
from specedge.serve.jobs import Piece
from specedge.serve.shapes import Choice, Completion
from specedge.serve.tokens import LEAST, Tokens


class Counting(Tokens):
    """Tokens whose texts are as long as their numbers."""

    def __init__(self):
        self.asked = []

    def text(self, token):
        self.asked.append(token)
        return "x" * token


def test_offsets_go_on_by_choice_without_the_texts_of_earlier_tokens():
    body = {"prompt": "a", "n": 2, "logprobs": 0, "stream": True}
    tokens, choices, told = Counting(), [Choice(), Choice()], ([], [])
    shape = Completion("pair", asking.completions(body, 10), tokens)
    for index, ids in [(0, [3, 1]), (1, [2]), (0, []), (0, [4]), (1, [5, 5]), (0, [1])]:
        piece = Piece([], [TokenLogprobs(token, -1.0, []) for token in ids])
        (line,) = shape.piece(index, piece, [], choices[index])
        choices[index].add([], piece.logprobs)
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        told[index].extend(choice["logprobs"]["text_offset"])
    assert told == ([0, 3, 4, 8], [0, 2, 7])
    assert tokens.asked == [3, 1, 2, 4, 5, 5, 1]


def test_a_token_of_no_probability_has_a_number_that_json_knows():
    found = [TokenLogprobs(2, -math.inf, [(1, -0.5), (3, -math.inf)])]
    told = Counting().of_completion(found, 0)
    assert told["token_logprobs"] == [LEAST]
    assert told["top_logprobs"] == [{"x": -0.5, "xxx": LEAST}]
    (entry,) = Counting().of_chat(found)["content"]
    assert [one["logprob"] for one in (entry, *entry["top_logprobs"])] == [LEAST, -0.5, LEAST]


def test_log_probabilities_from_a_token_on_are_not_looked_for_in_the_rounds_before(pipeline):
    options = {"num_draft_tokens": 2, "ignore_eos": True}
    stream = pipeline.stream("a", 30, logprobs=1, **options)
    list(stream)
    found = stream.generation.logprobs
    assert [one.token for one in found] == stream.generation.tokens
    stream._run.done.clear()
    assert stream.logprobs(20) == found[20:]
    assert pipeline.generate("a", 5, **options).logprobs is None
