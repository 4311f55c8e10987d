"""The server of an encoder-decoder: its prompt is the source, and it has no chats."""

import json

import pytest

import specedge
from encoder_decoder_bundles import FRENCH, GERMAN, PAD, SOURCE, make_encoder_decoder
from served import ask, serving

PROMPT = "w1 w2 w3 w4"
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
CHAT = [{"role": "user", "content": "w1"}]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    make_encoder_decoder(folder)
    with specedge.load(folder) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def port(pair):
    with serving(pair) as port:
        yield port


def post(port, path, **body):
    status, _, text = ask(port, "POST", path, body)
    return status, json.loads(text)


def generate(pair, **options):
    return pair.generate(PROMPT, 12, ignore_eos=True, **options)


def test_completions_read_the_prompt_as_source(port, pair):
    status, answer = post(port, "/v1/completions", **BODY, return_token_ids=True)
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["text"] == generate(pair).text
    assert choice["prompt_token_ids"] == pair.prompts.tokens(PROMPT)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 12)
    usage = post(port, "/v1/completions", **BODY)[1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 5


def test_decoder_prefix_is_a_field(port, pair):
    texts = {}
    for prefix in ("deu_Latn", [GERMAN]):
        answer = post(port, "/v1/completions", **BODY, decoder_prefix=prefix)[1]
        texts[str(prefix)] = answer["choices"][0]["text"]
    assert {*texts.values()} == {generate(pair, decoder_prefix="deu_Latn").text}
    assert generate(pair).text not in texts.values()
    status, answer = post(port, "/v1/completions", **BODY, decoder_prefix=5)
    assert (status, answer["error"]["param"]) == (400, "decoder_prefix")
    status, answer = post(port, "/v1/completions", **BODY, decoder_prefix=[1000])
    assert (status, answer["error"]["param"]) == (400, "decoder_prefix")
    assert "token 1000 is not between" in answer["error"]["message"]


def test_text_offsets_are_those_of_the_text(port, pair):
    """The pieces follow the first tokens of the decoder, not the source."""
    (choice,) = post(port, "/v1/completions", **BODY, logprobs=1)[1]["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert pair.prompts.decoder_tokens() == [PAD, FRENCH]


def test_choices_and_streams(port, pair):
    (one, two) = post(port, "/v1/completions", **BODY | {"temperature": 1, "seed": 3, "n": 2})[1][
        "choices"
    ]
    assert one["text"] == generate(pair, temperature=1.0, seed=3).text
    assert two["text"] == generate(pair, temperature=1.0, seed=4).text
    text = ask(port, "POST", "/v1/completions", BODY | {"stream": True})[2].decode()
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    pieces = [json.loads(line)["choices"][0]["text"] for line in lines]
    assert "".join(pieces) == generate(pair).text


def test_regular_expressions_constrain_the_decoder(port):
    body = BODY | {"ignore_eos": False}
    status, answer = post(port, "/v1/completions", **body, regex=" ?w1( w2)*")
    assert status == 200
    first, *words = answer["choices"][0]["text"].split()
    assert first == "w1"
    assert {*words} <= {"w2"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": "w1"}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 3}),
        ("/v1/messages/count_tokens", {"messages": CHAT}),
        ("/tokenize", {"messages": CHAT}),
    ],
)
def test_chats_are_refused(port, path, body):
    status, answer = post(port, path, **body)
    assert status == 400
    assert answer["error"]["message"] == "some/target is an encoder-decoder; use /v1/completions"


def test_prompts_are_not_echoed(port):
    for field in ({"echo": True}, {"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
        status, answer = post(port, "/v1/completions", **BODY, **field)
        assert (status, answer["error"]["param"]) == (400, next(iter(field)))
        assert "an encoder-decoder" in answer["error"]["message"]


def test_sources_that_are_too_long(port):
    long = BODY | {"prompt": "w1 " * 200}
    status, answer = post(port, "/v1/completions", **long)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, answer = post(port, "/v1/completions", **long, truncate_prompt_tokens=-1)
    assert (status, answer["usage"]["prompt_tokens"]) == (200, SOURCE)


def test_a_decoder_only_model_refuses_the_field(port):
    with specedge.load() as pipeline, serving(pipeline) as other:
        status, answer = post(other, "/v1/completions", prompt="x", decoder_prefix="y")
        assert (status, answer["error"]["param"]) == (400, "decoder_prefix")
        for path, body in (("chat/completions", {"messages": CHAT}), ("responses", {"input": "w"})):
            status, answer = post(other, f"/v1/{path}", **body, decoder_prefix="y")
            assert (status, answer["error"]["param"]) == (400, "decoder_prefix")


def test_the_model_has_no_chat_capability(port):
    text = ask(port, "GET", "/v1/models")[2]
    card = json.loads(text)["data"][0]
    assert not card["chat"]
    assert "chat" not in card["capabilities"]
