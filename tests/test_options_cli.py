"""Sampling options on the command line and in prompt files."""

import json

from installed import run

PROMPT = "def read_config(path):"
FLAGS = [
    *("--typical-p", 0.9, "--repetition-penalty", 1.2, "--presence-penalty", 0.3),
    *("--frequency-penalty", -0.1, "--logit-bias", "7=2.5", "--logit-bias", "9=-100"),
    *("--bad-word", "self", "--bad-word", "\n", "--min-new-tokens", 5, "--lenience", 0.5),
]
OPTIONS = {
    "typical_p": 0.9,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": -0.1,
    "logit_bias": {7: 2.5, 9: -100},
    "bad_words": ["self", "\n"],
    "min_new_tokens": 5,
    "lenience": 0.5,
}


def test_every_option_reaches_the_sampler_by_flag_and_by_line(pipeline):
    made = pipeline.generate(PROMPT, 30, 0.9, seed=3, logprobs=2, num_draft_tokens=4, **OPTIONS)
    common = ["--temperature", 0.9, "--seed", 3, "-n", 30, "--logprobs", 2, "-k", 4]
    by_flag = json.loads(run("generate", PROMPT, *common, *FLAGS, "--json").stdout)
    line = json.dumps({"prompt": PROMPT, **OPTIONS})
    jsonl = ["generate", "--prompts", "-", "--format", "jsonl"]
    by_line = json.loads(run(*jsonl, *common, stdin=line).stdout)
    for found in (by_flag, by_line):
        assert found["tokens"] == made.tokens
        assert found["lossy"] == made.lossy == "lenience 0.5"
        entries = [
            {"token": one.token, "logprob": one.logprob, "top": [list(pair) for pair in one.top]}
            for one in made.logprobs
        ]
        assert found["logprobs"] == entries


def test_coupled_text_does_not_depend_on_k_for_flag_and_line_options(pipeline):
    options = {"seed": 3, "coupling": "gumbel", "choice": 1}
    plain = pipeline.generate(PROMPT, 20, 0.9, num_draft_tokens=0, **options)
    common = ["--temperature", 0.9, "--seed", 3, "-n", 20, "-k", 4]
    flags = ["--coupling", "gumbel", "--choice", 1]
    by_flag = json.loads(run("generate", PROMPT, *common, *flags, "--json").stdout)
    line = json.dumps({"prompt": PROMPT, "coupling": "gumbel", "choice": 1})
    jsonl = ["generate", "--prompts", "-", "--format", "jsonl"]
    by_line = json.loads(run(*jsonl, *common, stdin=line).stdout)
    assert by_flag["tokens"] == by_line["tokens"] == plain.tokens


def test_compare_reports_identical_coupled_texts():
    coupled = ["-n", 10, "--temperature", 1, "--coupling", "gumbel", "--repeats", 1]
    assert "same tokens          yes" in run("compare", PROMPT, *coupled).stdout


def test_lossy_text_is_marked_in_every_output():
    lenient = ["-n", 10, "--temperature", 1, "--lenience", 0.25]
    marked = run("generate", PROMPT, *lenient, "--trace")
    legend, summary = marked.stderr.splitlines()
    assert "lossy (lenience 0.25)" in legend
    assert "lossy (lenience 0.25)" in summary
    assert "lossy (lenience 0.25)" in run("compare", PROMPT, *lenient, "--repeats", 1).stdout


def test_lossless_text_is_not_marked(pipeline):
    assert pipeline.generate(PROMPT, 5, 0.0, lenience=0.5).lossy is None
    assert pipeline.generate(PROMPT, 5, 1.0, lenience=0.5, num_draft_tokens=0).lossy is None
    assert pipeline.generate(PROMPT, 5, 1.0).lossy is None
    assert pipeline.generate(PROMPT, 5, 1.0, lenience=0.5).lossy == "lenience 0.5"
    plain = run("generate", PROMPT, "-n", 5, "--lenience", 0.5, "--json")
    assert json.loads(plain.stdout)["lossy"] is None
    assert "lossy" not in plain.stderr


def test_unsupported_options_fail_only_their_line():
    lines = [
        {"prompt": "a", "logit_bias": {"99999999": 1}},
        {"prompt": "b", "max_new_tokens": 2},
    ]
    jsonl = ["generate", "--prompts", "-", "--format", "jsonl"]
    result = run(*jsonl, stdin="\n".join(map(json.dumps, lines)))
    first, second = map(json.loads, result.stdout.splitlines())
    assert result.returncode == 1
    assert "token 99999999" in first["error"]
    assert len(second["tokens"]) == 2
    least = json.dumps({"prompt": "a", "min_new_tokens": 9})
    refused = run(*jsonl, "-n", 8, stdin=least)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "line 1: min_new_tokens 9 is above max_new_tokens 8" in refused.stderr
