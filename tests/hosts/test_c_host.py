"""The C host of hosts/c, which takes a round in one graph."""

from __future__ import annotations

import json
import signal
import subprocess
from functools import partial

import damages
import pytest
from c_builds import SOURCES, compile_host, run
from hosting import (
    KEEP_FLASH,
    REQUESTS,
    changed,
    check_refused,
    check_sources,
    damaged,
    generated,
    joined,
    libraries,
    options,
    with_another_transcript,
    with_boundaries,
)

pytestmark = [pytest.mark.hosts]

HOST_LINES = 375
TURNS = r"""
#include "specedge_host.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool print(void *num_rounds, const SpecedgeRound *round) {
    for (int64_t i = 0; i < round->num_tokens; i++) printf("%d ", (int)round->tokens[i]);
    return --*(int *)num_rounds;
}

/* Prompts of "5,6,7:3" are tokens, and after how many rounds to stop. */
int main(int argc, char **argv) {
    void *library = dlopen(getenv("SPECEDGE_ONNXRUNTIME"), RTLD_NOW);
    const OrtApiBase *(*base)(void) = NULL;
    *(void **)&base = dlsym(library, "OrtGetApiBase");
    SpecedgeHost *host = specedge_open(argv[1], 0, base(), NULL);
    SpecedgeSettings settings = {.max_new_tokens = 20, .temperature = 0.9f, .top_p = 1,
                                 .repetition_penalty = 1, .seed = 4};
    for (int i = 2; i < argc && !*specedge_error(host); i++) {
        int64_t tokens[500], num_tokens = 0;
        int num_rounds = atoi(strchr(argv[i], ':') + 1);
        for (char *one = strtok(argv[i], ",:"); one; one = strtok(NULL, ",:"))
            tokens[num_tokens++] = atoi(one);
        specedge_generate(host, tokens, num_tokens - 1, &settings, print, &num_rounds);
        printf("\n");
    }
    fprintf(stderr, "%s", specedge_error(host));
    specedge_close(host);
}
"""


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """The host, built once."""
    return compile_host(tmp_path_factory.mktemp("c") / "specedge_host")


@pytest.fixture(scope="session")
def checked_program(tmp_path_factory):
    """The host with AddressSanitizer, which makes a leak or a wrong access exit with 23."""
    output = tmp_path_factory.mktemp("c") / "checked_host"
    return compile_host(output, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def test_golden_transcripts_are_reproduced(program, fused_bundle):
    done = run(program, fused_bundle, "--golden")
    assert done.returncode == 0, done.stdout + done.stderr
    golden = json.loads((fused_bundle / "golden.json").read_text("utf-8"))
    verdicts = [line.split()[0] for line in done.stdout.splitlines()]
    assert verdicts == ["same"] * len(golden["transcripts"])
    assert "alone" not in done.stdout


def test_texts_of_encoder_decoders_equal_specedge_output(checked_program, encoder_decoder):
    done = run(checked_program, encoder_decoder, "--golden", SPECEDGE_EXTENSIONS="")
    assert done.returncode == 0, done.stdout + done.stderr
    check_sources(partial(run, checked_program, SPECEDGE_EXTENSIONS=""), encoder_decoder)


@pytest.mark.parametrize("key", ["prompt", "tokens", "num_accepted", "text"])
def test_mismatch_with_golden_transcript_is_an_error(program, fused_bundle, tmp_path, key):
    done = run(program, with_another_transcript(fused_bundle, tmp_path / "bundle", key), "--golden")
    assert done.returncode == 1, done.stderr
    verdicts = [line.split()[0] for line in done.stdout.splitlines()]
    assert [i for i, verdict in enumerate(verdicts) if verdict == "DIFFERS"] == [1]


@pytest.mark.parametrize("name", REQUESTS)
def test_text_equals_specedge_output(program, fused_bundle, pipeline, name):
    prompt, settings = REQUESTS[name]
    done = run(program, fused_bundle, prompt, "-n", 40, *options(settings))
    assert done.stdout == generated(pipeline, prompt, 40, settings).text + "\n", done.stderr


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 5}])
def test_token_ids_equal_specedge_output_without_extensions(
    program, fused_bundle, pipeline, settings
):
    arguments = ("--ids", "60,61,62,63", "-n", 33, *options(settings))
    done = run(program, fused_bundle, *arguments, SPECEDGE_EXTENSIONS="")
    wanted = generated(pipeline, [60, 61, 62, 63], 33, settings).tokens
    assert done.stdout == joined(wanted), done.stderr


def test_prompts_are_cut_at_boundaries(program, fused_bundle, pipeline, tmp_path, monkeypatch):
    monkeypatch.setenv(*KEEP_FLASH)
    bundle = with_boundaries(fused_bundle, tmp_path / "bundle")
    done = run(program, bundle, "--ids", ",".join(map(str, range(60, 90))), "-n", 20)
    assert done.stdout == joined(generated(pipeline, [*range(60, 90)], 20, {}).tokens), done.stderr


def test_number_of_draft_tokens_is_configurable(program, pipeline, small_rounds):
    settings = {"temperature": 0.8, "seed": 3}
    done = run(program, small_rounds, "--ids", "60,61", "-n", 30, "-k", 2, *options(settings))
    wanted = generated(pipeline, [60, 61], 30, settings, 2).tokens
    assert done.stdout == joined(wanted), done.stderr
    assert run(program, small_rounds, "--golden").stdout.count("same    K 1") > 1


def test_text_ends_at_context_limit(program, fused_bundle, pipeline):
    prompt = "a b c d e f g " * 33
    wanted = generated(pipeline, prompt, 500, {})
    assert len(wanted.tokens) < 300
    assert run(program, fused_bundle, prompt, "-n", 500).stdout == wanted.text + "\n"


def test_turns_and_stopped_turns_reuse_the_caches(fused_bundle, pipeline, tmp_path):
    source = tmp_path / "turns.c"
    source.write_text(TURNS)
    program = compile_host(tmp_path / "turns", sources=[source])
    prompts = [[60, 61, 62], [60, 61, 62, 63, 64, 65], [60, 61, 99], [5]]
    ends = [99, 2, 99, 99]  # rounds
    turns = [f"{','.join(map(str, p))}:{n}" for p, n in zip(prompts, ends, strict=True)]
    done = run(program, fused_bundle, *turns)
    assert done.stderr == ""
    found = [[int(token) for token in line.split()] for line in done.stdout.splitlines()]
    wanted = [generated(pipeline, p, 20, {"temperature": 0.9, "seed": 4}).tokens for p in prompts]
    assert len(found[1]) < 20
    wanted[1] = wanted[1][: len(found[1])]
    assert found == wanted


def test_output_is_flushed_by_whole_characters(program, fused_bundle, pipeline):
    """A text of many broken characters, which are U+FFFD each, as specedge shows them."""
    settings = {"temperature": 2.0, "seed": 35}
    wanted = generated(pipeline, "x", 300, settings)
    assert "\ufffd" in wanted.text
    assert (
        run(program, fused_bundle, "x", "-n", 300, *options(settings)).stdout == wanted.text + "\n"
    )


def test_ctrl_c_stops_after_current_round_without_leaks(checked_program, fused_bundle):
    arguments = ["--ids", "60,61", "-n", "505", "--temperature", "1.5", "--seed", "8"]
    environment = libraries() | {"SPECEDGE_EXTENSIONS": "", "ASAN_OPTIONS": "exitcode=23"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        [checked_program, fused_bundle, *arguments], env=environment, **pipes
    ) as host:
        assert host.stdout.read(1)
        host.send_signal(signal.SIGINT)
        left, said = host.communicate(timeout=120)
    assert host.returncode == 130, said.decode()
    assert 1 <= len(left.split(b",")) < 505


@pytest.mark.parametrize("extensions", [False, True])
def test_no_memory_errors_or_leaks_under_sanitizers(checked_program, fused_bundle, extensions):
    """Leaks of ONNX Runtime Extensions themselves do not count."""
    variables = {} if extensions else {"SPECEDGE_EXTENSIONS": ""}
    checks = f"exitcode=23:detect_leaks={int(not extensions)}"
    done = run(checked_program, fused_bundle, "--golden", ASAN_OPTIONS=checks, **variables)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [("--ids", "60,5000"), ("--ids", "60", "-k", "9")])
def test_no_memory_leaks_on_errors(checked_program, fused_bundle, arguments):
    done = run(checked_program, fused_bundle, *arguments, SPECEDGE_EXTENSIONS="")
    assert done.returncode == 1, done.stderr


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([""], "the number of prompt tokens must be from 1 to 511, got 0"),
        (["x " * 600], "the number of prompt tokens must be from 1 to 511, got 601"),
        ([b"a\xff"], "the prompt is not UTF-8"),
        (["--ids", ""], "--ids are token ids with commas between them"),
        (["--ids", "4096"], "a token must be from 0 to 4095, got 4096"),
        (["--ids", "-1"], "a token must be from 0 to 4095, got -1"),
        (["--ids", "1,x"], '--ids are token ids with commas between them, got "x"'),
        (["x", "-n", "-1"], "max_new_tokens must be from 0 to 9.22337e+18, got -1"),
        (["x", "-k", "3"], "has no round.onnx of K = 3 draft tokens"),
        (["x", "--temperature", "-1"], "temperature must be from 0 to 3.40282e+38, got -1"),
        (["x", "--temperature", "nan"], "temperature must be from 0 to 3.40282e+38, got nan"),
        (["x", "--top-k", "-1"], "top_k must be from 0 to 9.22337e+18, got -1"),
        (["x", "--top-p", "0"], "top_p must be from 2.22507e-308 to 1, got 0"),
        (["x", "--min-p", "1.5"], "min_p must be from 0 to 1, got 1.5"),
        (
            ["x", "--repetition-penalty", "0"],
            "repetition_penalty must be from 1.17549e-38 to 3.40282e+38, got 0",
        ),
        (["x", "--seed", "abc"], '--seed is an integer of 64 bits, got "abc"'),
        (["x", "--top-k", "1e"], '--top-k is a number, got "1e"'),
    ],
)
def test_invalid_input_is_one_line_error(program, fused_bundle, arguments, wanted):
    command = [program, fused_bundle, *arguments]
    done = subprocess.run(command, capture_output=True, env=libraries())
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
    check_refused(done, wanted)


@pytest.mark.parametrize("arguments", [[], ["{bundle}"], ["{bundle}", "x", "--nothing"]])
def test_invalid_command_line_prints_usage(program, fused_bundle, arguments):
    done = run(program, *(one.format(bundle=fused_bundle) for one in arguments))
    assert done.returncode == 1
    assert "usage: specedge_host BUNDLE PROMPT" in done.stderr


def test_missing_bundle_or_library_is_one_line_error(program, fused_bundle, tmp_path):
    check_refused(run(program, tmp_path / "nothing", "x"), "nothing/bundle.json is not read: ")
    done = run(program, fused_bundle, "x", SPECEDGE_ONNXRUNTIME="/nothing.so")
    check_refused(done, "ONNX Runtime does not load: /nothing.so")
    done = run(program, fused_bundle, "x", SPECEDGE_EXTENSIONS="")
    check_refused(done, "no path of libortextensions.so was given")


@pytest.mark.parametrize(
    ("name", "damage", "wanted"),
    [
        ("round.onnx", damages.removed, "is missing"),
        ("encode.onnx", damages.longer, "has another size than bundle.json says"),
        ("draft/weights.bin", damages.with_another_byte, "has another SHA-256"),
    ],
)
def test_a_damaged_file_is_refused(program, fused_bundle, tmp_path, name, damage, wanted):
    bundle = damaged(fused_bundle, tmp_path / "bundle", name, damage)
    check_refused(run(program, bundle, "x"), wanted)


def _without_a_shape(manifest):
    damages.graph(manifest)["signature"]["inputs"][-1]["shape"] = None


def _with_a_context_below_0(manifest):
    manifest["models"]["target"]["context_length"] = -1


def _without_an_input(manifest):
    inputs = damages.graph(manifest)["signature"]["inputs"]
    del inputs[-1]  # a cache


def _without_text(manifest):
    manifest["hosts"]["ids_only"] = "the tokenizer is not a byte-level BPE"
    del manifest["hosts"]["graphs"][1:]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (damages.of_format_9, "has format 9, this host reads 10; run specedge embed"),
        (damages.without_graphs, "has no graphs for hosts; run specedge embed"),
        (
            _without_text,
            "the bundle supports token ids only: the tokenizer is not a byte-level BPE",
        ),
        (damages.for_a_later_version, "the bundle needs 9.0"),
        (
            damages.with_smaller_caches,
            "ONNX Runtime: Got invalid dimensions for input: draft.past_",
        ),
        (_without_an_input, "ONNX Runtime: "),
        (
            _with_a_context_below_0,
            "vocab_size, context_length and max_length are from 1 to",
        ),
        (_without_a_shape, "ONNX Runtime: Got invalid dimensions for input: target."),
        (
            damages.with_a_path_that_goes_up,
            "/../x.onnx is outside of the bundle; copy the whole bundle again",
        ),
        (damages.with_an_unlisted_graph, "bundle.json does not list a graph's file: round.onnx"),
    ],
)
def test_incompatible_manifest_is_rejected(program, fused_bundle, tmp_path, change, wanted):
    check_refused(run(program, changed(fused_bundle, tmp_path / "bundle", change), "x"), wanted)


def test_speech_is_rejected(program, speech):
    check_refused(run(program, speech, "--ids", "5"), "the bundle reads speech, not text")


def test_split_round_layout_is_rejected(program, split_bundle):
    done = run(program, split_bundle, "x")
    check_refused(done, "has no round.onnx of K = 0 draft tokens (0: any); run specedge embed")


def test_the_host_is_small():
    lines = (SOURCES / "specedge_host.c").read_text("utf-8").splitlines()
    assert sum(1 for line in lines if line.strip()) <= HOST_LINES
