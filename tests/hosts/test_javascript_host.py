"""The JavaScript host of hosts/javascript, which takes a round in one graph."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path
from random import Random

import damages
import pytest
from hosting import (
    KEEP_FLASH,
    REQUESTS,
    changed,
    check_refused,
    check_sources,
    damaged,
    generated,
    host_tools,
    joined,
    options,
    with_another_transcript,
    with_boundaries,
)

from specedge.runtime.text.detokenizer import Detokenizer
from tokenizer_kinds import KINDS, units_of

pytestmark = [pytest.mark.hosts]

SOURCES = Path(__file__).parents[2] / "hosts" / "javascript"
HOST_LINES = 190
# Node.js takes what begins with - for an option.
FILTERED, FILTERS = REQUESTS["with all filters"]
OWN_REQUESTS = REQUESTS | {
    "with all filters": (FILTERED, FILTERS | {"seed": 2**60 + 1}),
    "after a special token that is text": ("a<|endoftext|>b", {"temperature": 0.7, "seed": 1}),
}
CHECKS = r"""
import assert from 'node:assert/strict';
import { SpecedgeHost } from './specedge_host.js';

const [folder, given] = [process.argv[2], JSON.parse(process.argv[3])];
const settings = { temperature: 0.9, seed: 4, maxNewTokens: 20 };

async function tokens(host, prompt, options = {}, onRound = () => {}) {
  const found = [];
  for await (const round of host.generate(prompt, { ...settings, ...options })) {
    found.push(...round.tokens);
    onRound();
  }
  return found;
}

const checks = {
  async 'another turn goes on from the caches'(host) {
    for (const [prompt, wanted] of given) assert.deepEqual(await tokens(host, prompt), wanted);
  },
  async 'a text that is left early can be followed by another'(host) {
    for await (const _ of host.generate(given[0][0], settings)) break;
    assert.deepEqual(await tokens(host, ...given[1].slice(0, 1)), given[1][1]);
  },
  async 'an aborted signal ends the text after the round, with its reason'(host) {
    const controller = new AbortController();
    let numRounds = 0;
    const onRound = () => (++numRounds === 2 ? controller.abort() : null);
    const started = tokens(host, given[0][0], { signal: controller.signal }, onRound);
    await assert.rejects(started, { name: 'AbortError' });
    assert.equal(numRounds, 2);
    assert.deepEqual(await tokens(host, given[0][0]), given[0][1]);
  },
  async 'two texts at a time are refused'(host) {
    const both = [tokens(host, [60]), tokens(host, [61])];
    const [first, second] = await Promise.allSettled(both);
    assert.equal(first.status, 'fulfilled');
    assert.match(second.reason.message, /is writing another text/);
  },
  async 'NUL is text as any other'(host) {
    const parts = [await host.encode('a'), await host.encode('\0'), await host.encode('b')];
    assert.deepEqual(await host.encode('a\0b'), parts.flat());
  },
  async 'what cannot be is refused'(host) {
    for (const bad of ['', [], [-1], [4096], [1.5], new Array(600).fill(5)]) {
      await assert.rejects(tokens(host, bad), RangeError);
    }
    await assert.rejects(tokens(host, 'x', { topK: 1.5 }), /topK must be an integer/);
    await assert.rejects(tokens(host, 'x', { maxNewTokens: -1 }), /maxNewTokens must be/);
    await assert.rejects(tokens(host, 'x', { nothing: 1 }), TypeError);
  },
  async 'release frees the sessions'(host) {
    await host.release();
    await assert.rejects(tokens(host, [60]));
    await host.release();
  },
};
for (const [name, check] of Object.entries(checks)) {
  const host = await SpecedgeHost.open(folder);
  await check(host);
  await host.release();
  console.log('passed', name);
}
"""


TEXTS = r"""
import assert from 'node:assert/strict';
import { readFile } from 'node:fs/promises';
import { Text } from './text.js';

for (const [file, cases] of JSON.parse(await readFile(process.argv[2], 'utf8'))) {
  const text = await Text.open(file);
  for (const [prompt, tokens, wanted] of cases) {
    const newText = await text.stream(prompt);
    const pieces = [];
    for (let i = 0; i <= tokens.length; i++) {
      pieces.push(await newText([...prompt, ...tokens.slice(0, i)], i === tokens.length));
    }
    assert.deepEqual(pieces.join(''), wanted, JSON.stringify([file, prompt, tokens]));
  }
}
console.log('passed');
"""


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """The host beside the packages that it imports."""
    tools = host_tools("javascript/node_modules/onnxruntime-node")
    if not (node := shutil.which("node")):
        pytest.skip("node is missing; install Node.js 20 or later")
    folder = tmp_path_factory.mktemp("javascript")
    for file in (*SOURCES.glob("*.js"), SOURCES / "package.json"):
        shutil.copy(file, folder)
    (folder / "node_modules").symlink_to(tools / "javascript" / "node_modules")
    (folder / "checks.js").write_text(CHECKS)
    (folder / "texts.js").write_text(TEXTS)
    return [node, folder / "cli.js"]


def run(program, *arguments):
    command = [*program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_golden_transcripts_are_reproduced(program, fused_bundle):
    done = run(program, fused_bundle, "--golden")
    assert done.returncode == 0, done.stdout + done.stderr
    golden = json.loads((fused_bundle / "golden.json").read_text("utf-8"))
    verdicts = [line.split()[0] for line in done.stdout.splitlines()]
    assert verdicts == ["same"] * len(golden["transcripts"])


def test_texts_of_encoder_decoders_equal_specedge_output(program, encoder_decoder):
    done = run(program, encoder_decoder, "--golden")
    assert done.returncode == 0, done.stdout + done.stderr
    check_sources(partial(run, program), encoder_decoder)


@pytest.mark.parametrize("key", ["prompt", "tokens", "num_accepted", "text"])
def test_mismatch_with_golden_transcript_is_an_error(program, fused_bundle, tmp_path, key):
    done = run(program, with_another_transcript(fused_bundle, tmp_path / "bundle", key), "--golden")
    assert done.returncode == 1, done.stderr
    verdicts = [line.split()[0] for line in done.stdout.splitlines()]
    assert [i for i, verdict in enumerate(verdicts) if verdict == "DIFFERS"] == [1]


@pytest.mark.parametrize("name", OWN_REQUESTS)
def test_text_equals_specedge_output(program, fused_bundle, pipeline, name):
    prompt, settings = OWN_REQUESTS[name]
    done = run(program, fused_bundle, prompt, "-n", 40, *options(settings))
    assert done.stdout == generated(pipeline, prompt, 40, settings).text + "\n", done.stderr


def test_streamed_text_is_that_of_specedge_for_any_tokenizer(program, tmp_path):
    cases = []
    for name, tokenizer in KINDS.items():
        tokenizer.save(str(tmp_path / f"{name}.json"))
        random, units = Random(name), units_of(name)
        texts = []
        for _ in range(60):
            parts = random.choices(units, k=random.randrange(8))
            tokens = [token for part in parts for token in part]
            tokens += random.choices(range(tokenizer.get_vocab_size()), k=random.randrange(4))
            prompt = [tokens.pop(0) for _ in range(random.randint(0, len(tokens)))]
            detokenizer = Detokenizer(tokenizer, prompt)
            text = "".join(map(detokenizer.feed, tokens)) + detokenizer.flush()
            texts.append((prompt, tokens, text))
        cases.append((str(tmp_path / f"{name}.json"), texts))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    node, cli = program
    done = run([node, cli.with_name("texts.js")], tmp_path / "cases.json")
    assert done.stdout == "passed\n", done.stderr


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 5}])
def test_token_ids_equal_specedge_output(program, fused_bundle, pipeline, settings):
    done = run(program, fused_bundle, "--ids", "60,61,62,63", "-n", 33, *options(settings))
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


def test_speech_is_rejected(program, speech):
    done = run(program, speech, "--ids", "5")
    check_refused(done, "the bundle reads speech; this host reads text")


def test_split_round_layout_is_rejected(program, split_bundle):
    check_refused(run(program, split_bundle, "x"), "there is no round.onnx of any draft tokens")


def test_text_ends_at_context_limit(program, fused_bundle, pipeline):
    prompt = "a b c d e f g " * 33
    wanted = generated(pipeline, prompt, 500, {})
    assert len(wanted.tokens) < 300
    assert run(program, fused_bundle, prompt, "-n", 500).stdout == wanted.text + "\n"


def test_output_is_flushed_by_whole_characters(program, fused_bundle, pipeline):
    """A text of some broken characters, which are U+FFFD each, as specedge shows them."""
    settings = {"temperature": 2.0, "seed": 35}
    wanted = generated(pipeline, "x", 300, settings)
    assert "\ufffd" in wanted.text
    assert (
        run(program, fused_bundle, "x", "-n", 300, *options(settings)).stdout == wanted.text + "\n"
    )


def test_turns_abort_release_and_errors(program, fused_bundle, pipeline):
    prompts = [[60, 61, 62], [60, 61, 62, 63, 64, 65], [60, 61, 99], [5]]
    settings = {"temperature": 0.9, "seed": 4}
    given = [[prompt, generated(pipeline, prompt, 20, settings).tokens] for prompt in prompts]
    node, cli = program
    done = run([node, cli.with_name("checks.js")], fused_bundle, json.dumps(given))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed ") == CHECKS.count("  async '")


def test_ctrl_c_stops_after_current_round(program, fused_bundle):
    arguments = ["--ids", "60,61", "-n", "505", "--temperature", "1.5", "--seed", "8"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*program, fused_bundle, *arguments], **pipes) as host:
        assert host.stdout.read(1)
        host.send_signal(signal.SIGINT)
        left, said = host.communicate(timeout=120)
    assert host.returncode == 130, said.decode()
    assert not said
    assert 1 <= len(left.split(b",")) < 505


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([""], "the number of prompt tokens must be an integer from 1 to 511, got 0"),
        (["x " * 600], "an integer from 1 to 511, got 601"),
        (["--ids", ""], '--ids takes a number, got ""'),
        (["--ids", "4096"], "a token must be an integer from 0 to 4095, got 4096"),
        (["--ids=-1"], "a token must be an integer from 0 to 4095, got -1"),
        (["--ids", "1,x"], '--ids takes a number, got "x"'),
        (["x", "--max-new-tokens=-1"], "--max-new-tokens must be an integer from 0 to"),
        (["x", "-n", "many"], '--max-new-tokens takes a number, got "many"'),
        (["x", "-k", "3"], "there is no round.onnx of 3 draft tokens"),
        (["x", "--temperature=-1"], "--temperature must be a number from 0 to 3e+38, got -1"),
        (
            ["x", "--temperature", "Infinity"],
            "--temperature must be a number from 0 to 3e+38, got I",
        ),
        (["x", "--top-k", "1.5"], "--top-k must be an integer from 0 to 900"),
        (["x", "--top-p", "0"], "--top-p must be a number from 1e-37 to 1, got 0"),
        (["x", "--min-p", "1.5"], "--min-p must be a number from 0 to 1, got 1.5"),
        (["x", "--repetition-penalty", "0"], "--repetition-penalty must be a number from"),
        (["x", "--seed", "abc"], '--seed takes an integer, got "abc"'),
        (["x", "--nothing"], "Unknown option '--nothing'"),
    ],
)
def test_invalid_input_is_one_line_error(program, fused_bundle, arguments, wanted):
    check_refused(run(program, fused_bundle, *arguments), wanted)


@pytest.mark.parametrize("arguments", [[], ["{bundle}"]])
def test_invalid_command_line_prints_usage(program, fused_bundle, arguments):
    done = run(program, *(one.format(bundle=fused_bundle) for one in arguments))
    assert done.returncode == 1
    assert "usage: node cli.js BUNDLE PROMPT" in done.stderr


def test_missing_bundle_is_one_line_error(program, tmp_path):
    check_refused(run(program, tmp_path / "nothing", "x"), "give the folder of a bundle")


@pytest.mark.parametrize(
    ("name", "damage", "wanted"),
    [
        ("round.onnx", damages.removed, "is missing"),
        ("tokenizer.json", damages.longer, "bytes, bundle.json says"),
        ("draft/weights.bin", damages.with_another_byte, "has another SHA-256"),
    ],
)
def test_a_damaged_file_is_refused(program, fused_bundle, tmp_path, name, damage, wanted):
    bundle = damaged(fused_bundle, tmp_path / "bundle", name, damage)
    check_refused(run(program, bundle, "x"), wanted)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (damages.of_format_9, "has format 9, not 10; run specedge embed"),
        (damages.without_graphs, "has no graphs for hosts; run specedge embed"),
        (damages.for_a_later_version, "the bundle needs 9.0"),
        (damages.with_smaller_caches, "Got invalid dimensions for input: draft.past_key"),
        (damages.with_a_path_that_goes_up, "/x.onnx is outside of the bundle"),
        (damages.with_an_unlisted_graph, "bundle.json does not list the graph round.onnx"),
    ],
)
def test_incompatible_manifest_is_rejected(program, fused_bundle, tmp_path, change, wanted):
    check_refused(run(program, changed(fused_bundle, tmp_path / "bundle", change), "x"), wanted)


def test_the_host_class_is_small():
    lines = (SOURCES / "specedge_host.js").read_text("utf-8").splitlines()
    assert sum(1 for line in lines if line.strip()) <= HOST_LINES


def test_lock_file_uses_only_npm_registry_and_pinned_versions():
    lock = json.loads((SOURCES / "package-lock.json").read_text("utf-8"))
    package = json.loads((SOURCES / "package.json").read_text("utf-8"))
    places = {entry.get("resolved", "") for entry in lock["packages"].values()}
    assert all(re.match("$|https://registry.npmjs.org/", place) for place in places)
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", pin) for pin in package["dependencies"].values())
    assert lock["packages"][""]["dependencies"] == package["dependencies"]
