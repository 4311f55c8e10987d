"""What a piece of a stream costs, however much text came before it."""

import json

import pytest

pytest.importorskip("uvicorn", reason="needs the serve extra")

from specedge.runtime.sampling.logprobs import TokenLogprobs
from specedge.serve import asking
from specedge.serve.jobs import Piece
from specedge.serve.shapes import Choice, Completion
from specedge.serve.tokens import Tokens


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
