"""Chunks of a stream: log-probabilities, at a cost independent of earlier text."""

import json
import math

from specedge.runtime.sampling.logprobs import TokenLogprobs
from specedge.serve import requests
from specedge.serve.chat_shapes import MIN_LOGPROB, CompletionShaper, LogprobFormatter
from specedge.serve.choices import ResponseChoice
from specedge.serve.job_queue import TextPiece
from specedge.serve.requests import ParserSettings


class CountingFormatter(LogprobFormatter):
    """Formatter that counts tokens, whose texts are as long as their ids."""

    def __init__(self):
        self.tokens = []

    def _text(self, token):
        self.tokens.append(token)
        return "x" * token


def test_text_offsets_continue_by_choice_without_decoding_earlier_tokens():
    body = {"prompt": "a", "n": 2, "logprobs": 0, "stream": True}
    formatter, choices, offsets = (
        CountingFormatter(),
        [ResponseChoice(), ResponseChoice()],
        ([], []),
    )
    shaper = CompletionShaper(
        "pair", requests.parse_completion(body, ParserSettings(10)), formatter
    )
    for index, ids in [(0, [3, 1]), (1, [2]), (0, []), (0, [4]), (1, [5, 5]), (0, [1])]:
        piece = TextPiece([], [TokenLogprobs(token, -1.0, []) for token in ids])
        (line,) = shaper.piece(index, piece, [], choices[index])
        choices[index].add([], piece.logprobs)
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        offsets[index].extend(choice["logprobs"]["text_offset"])
    assert offsets == ([0, 3, 4, 8], [0, 2, 7])
    assert formatter.tokens == [3, 1, 2, 4, 5, 5, 1]


def test_zero_probability_is_a_finite_logprob():
    found = [TokenLogprobs(2, -math.inf, [(1, -0.5), (3, -math.inf)])]
    told = CountingFormatter().for_completion(found, 0)
    assert told["token_logprobs"] == [MIN_LOGPROB]
    assert told["top_logprobs"] == [{"x": -0.5, "xxx": MIN_LOGPROB}]
    (entry,) = CountingFormatter().for_chat(found)["content"]
    assert [one["logprob"] for one in (entry, *entry["top_logprobs"])] == [
        MIN_LOGPROB,
        -0.5,
        MIN_LOGPROB,
    ]
