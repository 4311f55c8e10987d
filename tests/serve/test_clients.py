"""The official OpenAI client against a server of the embedded pair, over loopback."""

import openai
import pytest

import specedge
from served import MODEL, PROMPT, chat_pair, client, serving
from specedge.bundle import store

MESSAGES = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "A class."}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def alone():
    """Return the reference pair, which runs one request at a time."""
    return chat_pair(1)


@pytest.fixture(scope="module")
def port():
    with serving(chat_pair(2), timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def ai(port):
    with client(port) as found:
        yield found


def test_chat_equals_pipeline_output(ai, alone):
    wanted = alone.chat(MESSAGES, 24)
    found = ai.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert found.choices[0].message.content == wanted.text
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == "length"
    assert (found.model, found.object) == (MODEL, "chat.completion")


def test_a_streamed_chat_joins_to_the_same_text(ai, alone):
    chunks = list(ai.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == alone.chat(MESSAGES, 24).text
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_content_parts_and_developer_role_are_supported(ai, alone):
    parts = [
        {"role": "developer", "content": "Write Python."},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("A ", "class.")]},
    ]
    found = ai.chat.completions.create(messages=parts, **GREEDY)
    assert found.choices[0].message.content == alone.chat(MESSAGES, 24).text


def test_completion_supports_text_token_and_list_prompts(ai, alone):
    ids = alone.prompts.tokens("import json")
    wanted = [alone.generate(prompt, 24).text for prompt in (PROMPT, "import json")]
    several = ai.completions.create(prompt=[PROMPT, "import json"], **GREEDY)
    assert [choice.text for choice in several.choices] == wanted
    assert ai.completions.create(prompt=ids, **GREEDY).choices[0].text == wanted[1]
    assert [
        choice.text for choice in ai.completions.create(prompt=[ids, ids], **GREEDY).choices
    ] == [wanted[1]] * 2


def test_choices_have_consecutive_seeds_and_equal_single_requests(ai, alone):
    given = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 1, "seed": 5}
    speculative = {"speculative": {"num_draft_tokens": 3, "drafter": "model"}}
    whole = ai.completions.create(n=3, extra_body=speculative, **given)
    wanted = [
        alone.generate(PROMPT, 20, 1.0, seed=5 + i, num_draft_tokens=3, drafter="model").text
        for i in range(3)
    ]
    assert [choice.text for choice in whole.choices] == wanted
    assert [choice.seed for choice in whole.choices] == [5, 6, 7]
    found = ["", "", ""]
    for chunk in ai.completions.create(n=3, stream=True, extra_body=speculative, **given):
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == wanted


def test_coupled_choices_share_seed_and_equal_single_requests(ai, alone):
    given = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 1}
    coupled = {"coupling": "gumbel", "speculative": {"num_draft_tokens": 3}}
    whole = ai.completions.create(n=3, seed=5, extra_body=coupled, **given)
    expected = [
        alone.generate(PROMPT, 20, 1.0, seed=5, coupling="gumbel", choice=i, num_draft_tokens=0)
        for i in range(3)
    ]
    assert [choice.text for choice in whole.choices] == [one.text for one in expected]
    assert len({one.text for one in expected}) == 3
    fresh = ai.completions.create(n=3, extra_body=coupled, **given)
    assert len({choice.seed for choice in fresh.choices}) == 1
    again = ai.completions.create(n=3, seed=fresh.choices[0].seed, extra_body=coupled, **given)
    assert [choice.text for choice in again.choices] == [choice.text for choice in fresh.choices]


def test_penalties_biases_filters_and_stops_reach_the_sampler(ai, alone):
    ours = {
        "top_p": 0.9,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {7: 2.5, 9: -100},
        "stop": ["return", "\n\n\n"],
        "seed": 3,
    }
    own = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "bad_words": ["self"]}
    theirs = ours | {"logit_bias": {"7": 2.5, "9": -100}}
    off = {"speculative": {"off": True}}
    found = ai.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=60, temperature=0.8, extra_body=own | off, **theirs
    )
    wanted = alone.generate(PROMPT, 60, 0.8, num_draft_tokens=0, **ours, **own)
    assert found.choices[0].text == wanted.text
    assert "return" not in wanted.text
    assert found.usage.speculative["num_drafted"] == 0


def test_finish_reason_distinguishes_stop_string_and_full_context(ai):
    stopped = ai.completions.create(prompt=PROMPT, stop="\n", **GREEDY)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
    full = ai.completions.create(prompt=[9] * 500, model=MODEL, max_tokens=100, temperature=0)
    assert (full.usage.completion_tokens, full.choices[0].finish_reason) == (12, "length")


def test_usage_counts_tokens_reused_accepted_and_drafted(ai):
    given = GREEDY | {"prompt": f"{PROMPT} # usage", "stream": True}
    given["extra_body"] = {"speculative": {"num_draft_tokens": 4}}
    list(ai.completions.create(**given))
    *chunks, last = ai.completions.create(stream_options={"include_usage": True}, **given)
    usage, counts = last.usage, last.usage.speculative
    assert (last.choices, usage.completion_tokens) == ([], 24)
    assert usage.total_tokens == usage.prompt_tokens + 24
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    assert 24 - counts["num_accepted"] <= counts["num_rounds"] + 1
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == counts["num_accepted"] > 0
    assert details.rejected_prediction_tokens == counts["num_drafted"] - counts["num_accepted"]
    assert all(chunk.usage is None for chunk in chunks)


def test_choices_of_one_prompt_share_its_tokens_in_usage(ai, alone):
    prompts = [PROMPT, "import json and more"]
    one, two = (len(alone.prompts.tokens(prompt)) for prompt in prompts)
    usage = ai.completions.create(prompt=prompts, n=2, **GREEDY).usage
    assert one != two
    assert (usage.prompt_tokens, usage.completion_tokens) == (one + two, 4 * 24)


def test_log_probabilities_of_a_chat_streamed_or_not(ai, alone):
    wanted = alone.chat(MESSAGES, 24, logprobs=3)
    given = GREEDY | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
    whole = ai.chat.completions.create(**given).choices[0].logprobs.content
    streamed = [
        entry
        for chunk in ai.chat.completions.create(stream=True, **given)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [one.logprob for one in whole] == [one.logprob for one in wanted.logprobs]
    assert streamed == whole
    assert "".join(one.token for one in whole) == wanted.text
    assert bytes(byte for one in whole for byte in one.bytes).decode() == wanted.text
    for entry, one in zip(whole, wanted.logprobs, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == [value for _, value in one.top]


def test_log_probabilities_of_a_completion_streamed_or_not(ai, alone):
    wanted = alone.generate(PROMPT, 24, logprobs=2)
    whole = ai.completions.create(prompt=PROMPT, logprobs=2, **GREEDY).choices[0].logprobs
    assert whole.token_logprobs == [one.logprob for one in wanted.logprobs]
    for token, offset in zip(whole.tokens, whole.text_offset, strict=True):
        assert wanted.text[offset:].startswith(token)
    assert all(len(top) == 2 for top in whole.top_logprobs)
    chunks = list(ai.completions.create(prompt=PROMPT, logprobs=2, stream=True, **GREEDY))
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [o for one in streamed for o in one.text_offset] == whole.text_offset


def test_end_token_ends_text_without_logprobs(ai, alone):
    end = alone.bundle.end_tokens[0]
    given = GREEDY | {"logit_bias": {str(end): 100}, "logprobs": 0}
    found = ai.completions.create(prompt=PROMPT, **given).choices[0]
    assert (found.text, found.finish_reason, found.logprobs.tokens) == ("", "stop", [])


def test_response_equals_streamed_response(ai, alone):
    given = {"model": MODEL, "instructions": "Write Python.", "temperature": 0}
    facts = {"topic": "classes"}
    whole = ai.responses.create(input="A class.", max_output_tokens=24, metadata=facts, **given)
    assert whole.metadata == facts
    assert whole.output_text == alone.chat(MESSAGES, 24).text
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 24
    events = list(
        ai.responses.create(input=[MESSAGES[1]], max_output_tokens=24, stream=True, **given)
    )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.metadata == {}


def test_log_probabilities_of_a_response_streamed_or_not(ai, alone):
    wanted = alone.chat(MESSAGES, 24, logprobs=3)
    options = {"model": MODEL, "input": MESSAGES, "temperature": 0, "max_output_tokens": 24}
    options |= {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    whole = ai.responses.create(**options).output[0].content[0].logprobs
    assert [entry.logprob for entry in whole] == [entry.logprob for entry in wanted.logprobs]
    assert all(len(entry.top_logprobs) == 3 for entry in whole)
    assert bytes(byte for entry in whole for byte in entry.bytes).decode() == wanted.text
    events = list(ai.responses.create(stream=True, **options))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.logprob for delta in deltas for entry in delta.logprobs] == [
        entry.logprob for entry in whole
    ]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [entry.token for entry in done.logprobs] == [entry.token for entry in whole]
    assert events[-1].response.output[0].content[0].logprobs == whole


def test_top_logprobs_of_a_response_that_does_not_include_them_are_refused(ai):
    with pytest.raises(openai.BadRequestError, match=r"message\.output_text\.logprobs") as caught:
        ai.responses.create(model=MODEL, input="a", top_logprobs=2)
    assert caught.value.param == "top_logprobs"


def test_openai_responses_stream_helper_parses_events(ai, alone):
    text = alone.chat(MESSAGES, 40).text
    stop = text[-20:]
    given = {"model": MODEL, "input": MESSAGES, "temperature": 0, "extra_body": {"stop": stop}}
    with ai.responses.stream(**given) as stream:
        found = stream.get_final_response()
    assert found.output_text == text[: text.index(stop)]
    assert (found.status, found.incomplete_details) == ("completed", None)


def test_models_are_listed_and_described(ai):
    assert [one.id for one in ai.models.list()] == [MODEL]
    assert ai.models.retrieve(MODEL).context_length == 512
    with pytest.raises(openai.NotFoundError, match="the model 'gpt-5' does not exist"):
        ai.models.retrieve("gpt-5")
    assert ai.completions.create(prompt=PROMPT, **(GREEDY | {"model": "gpt-5"})).model == MODEL


def test_pair_without_template_supports_only_completions():
    with serving(specedge.load(store.embedded_folder())) as port, client(port) as ai:
        with pytest.raises(openai.BadRequestError, match="has no chat template; use /v1/comp"):
            ai.chat.completions.create(messages=MESSAGES, **GREEDY)
        assert ai.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
