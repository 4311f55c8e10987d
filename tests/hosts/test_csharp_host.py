"""The C# host of hosts/csharp: as it is built for .NET and for Mono, on both layouts of a round."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
from dataclasses import replace

import damages
import pytest
from csharp_builds import SOURCES, build
from hosting import (
    KEEP_FLASH,
    REQUESTS,
    changed,
    check_heads,
    check_refused,
    check_sources,
    check_speech,
    damaged,
    generated,
    host_tools,
    joined,
    options,
    with_another_transcript,
    with_boundaries,
)

from cases import exhaustive

pytestmark = [pytest.mark.hosts]

# What the program does around its session is the same on both libraries that .NET may take.
each_platform = pytest.mark.parametrize("host", ["managed", "mono"], indirect=True)
OTHER_BUILDS = [
    ("managed", "split"),
    ("mono", "fused"),
    ("pinvoke", "fused"),
    ("pinvoke", "split"),
]
# Refusals are the same code on both.
a_platform = pytest.mark.parametrize("host", ["managed", exhaustive("mono")], indirect=True)

# 256 MiB, in hexadecimal digits for .NET
HEAP_LIMIT = {"COMPlus_GCHeapHardLimit": "10000000", "MONO_GC_PARAMS": "max-heap-size=256m"}


@pytest.fixture(scope="session", params=["managed", "pinvoke", "mono"])
def host(request, tmp_path_factory):
    """The host, built once."""
    return build(request.param, tmp_path_factory.mktemp("csharp") / request.param)


def test_golden_transcripts_are_reproduced(host, bundle):
    done = host.run(bundle, "--golden")
    assert done.returncode == 0, done.stdout + done.stderr
    golden = json.loads((bundle / "golden.json").read_text("utf-8"))
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["same"] * len(
        golden["transcripts"]
    )


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("encoder_decoder", check_sources),
        ("split_encoder_decoder", check_sources),
        ("eagle_head", check_heads),
        ("mtp_head", check_heads),
    ],
)
def test_texts_of_encoder_decoders_and_heads_equal_specedge_output(host, name, check, request):
    bundle = request.getfixturevalue(name)
    done = host.run(bundle, "--golden")
    assert done.returncode == 0, done.stdout + done.stderr
    check(host.run, bundle)


@each_platform
@pytest.mark.parametrize(
    ("name", "num_checks"), [("eagle_head", 2), ("mtp_head", 2), ("encoder_decoder", 1)]
)
def test_checks_of_token_ids_pass(host, name, num_checks, request):
    done = host.check(request.getfixturevalue(name))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed ") == num_checks


@pytest.mark.parametrize("name", ["speech", "split_speech"])
def test_texts_of_speech_equal_specedge_output(host, name, request, tmp_path):
    limited = replace(host, environment=host.environment | HEAP_LIMIT)
    check_speech(limited.run, request.getfixturevalue(name), tmp_path)


@pytest.mark.parametrize("host", ["pinvoke", "mono"], indirect=True)
def test_golden_transcripts_are_reproduced_on_oldest_onnxruntime(host, bundle):
    (library,) = host_tools("node_modules/onnxruntime-node").glob(
        "node_modules/onnxruntime-node/bin/*/linux/x64/libonnxruntime.so.1"
    )
    done = host.on(library).run(bundle, "--golden")
    assert done.returncode == 0, done.stdout + done.stderr


@a_platform
@pytest.mark.parametrize("key", ["prompt", "tokens", "num_accepted", "text"])
def test_mismatch_with_golden_transcript_is_an_error(host, fused_bundle, tmp_path, key):
    done = host.run(with_another_transcript(fused_bundle, tmp_path / "bundle", key), "--golden")
    assert done.returncode == 1, done.stderr
    verdicts = [line.split()[0] for line in done.stdout.splitlines()]
    assert [i for i, verdict in enumerate(verdicts) if verdict == "DIFFERS"] == [1]


@pytest.mark.parametrize("name", REQUESTS)
def test_text_equals_specedge_output(host, bundle, pipeline, name):
    prompt, settings = REQUESTS[name]
    done = host.run(bundle, prompt, "-n", 40, *options(settings))
    assert done.returncode == 0, done.stderr
    assert done.stdout == generated(pipeline, prompt, 40, settings).text + "\n"


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 5}])
def test_token_ids_equal_specedge_output(host, bundle, pipeline, settings):
    ids = [60, 61, 62, 63]
    done = host.run(bundle, "--ids", "60,61,62,63", "-n", 33, *options(settings))
    assert done.returncode == 0, done.stderr
    wanted = generated(pipeline, ids, 33, settings).tokens
    assert done.stdout == ",".join(map(str, wanted)) + "\n"


@pytest.mark.parametrize("prompt", ["def f(", "import os\n" * 5])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 5}])
def test_runs_are_cut_at_boundaries(host, split_bundle, pipeline, tmp_path, prompt, settings):
    bundle = with_boundaries(split_bundle, tmp_path / "bundle")
    host = replace(host, environment=host.environment | dict([KEEP_FLASH]))
    done = host.run(bundle, prompt, "-n", 33, *options(settings))
    assert done.stdout == generated(pipeline, prompt, 33, settings).text + "\n", done.stderr


@pytest.mark.parametrize("name", ["eagle_head", "mtp_head"])
def test_runs_of_draft_heads_are_cut_at_boundaries(host, name, request, tmp_path):
    bundle = request.getfixturevalue(name)
    cut = with_boundaries(bundle, tmp_path / "bundle")
    check_heads(lambda _, *arguments: host.run(cut, *arguments), bundle)


def test_number_of_draft_tokens_of_split_round_is_configurable(host, split_bundle, pipeline):
    settings = {"temperature": 0.8, "seed": 3}
    done = host.run(split_bundle, "--ids", "60,61", "-n", 30, "-k", 2, *options(settings))
    wanted = generated(pipeline, [60, 61], 30, settings, k=2).tokens
    assert done.stdout == ",".join(map(str, wanted)) + "\n", done.stderr


@each_platform
def test_text_ends_at_context_limit(host, fused_bundle, pipeline):
    prompt = "a b c d e f g " * 33
    done = host.run(fused_bundle, prompt, "-n", 500)
    wanted = generated(pipeline, prompt, 500, {})
    assert len(wanted.tokens) < 300
    assert done.stdout == wanted.text + "\n", done.stderr


@each_platform
def test_each_input_line_continues_the_conversation(host, fused_bundle, pipeline):
    done = host.run(fused_bundle, "-n", 12, given="def read(path):\nimport os\n")
    text, tokens = "", []
    for line in ("def read(path):\n", "import os\n"):
        tokens += pipeline.tokenizer.encode(line).ids
        found = generated(pipeline, tokens, 12, {})
        tokens += found.tokens
        text += found.text + "\n"
    assert done.stdout == text, done.stderr


def test_ctrl_c_stops_after_current_round(host, fused_bundle):
    seen, terminal = pty.openpty()
    settings = {"temperature": 1, "seed": 8}
    running = host.start(terminal, fused_bundle, "import", "-n", 500, *options(settings))
    os.close(terminal)
    said = b""
    with contextlib.suppress(OSError):  # the terminal's end
        while part := os.read(seen, 1000):
            said += part
            if len(said) > 60:  # more than what a runtime tells the terminal at first
                running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130
    assert b"cancelled\r\n" in said
    os.close(seen)


@a_platform
def test_help_prints_usage(host):
    done = host.run("--help")
    assert done.returncode == 0
    assert "BUNDLE" in done.stdout


@a_platform
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["{bundle}", ""], "the prompt has 0 tokens, the bundle takes 1 to 511"),
        (["{bundle}", "x " * 600], "the prompt has 601 tokens, the bundle takes 1 to 511"),
        (["{bundle}", "--ids", "4096"], "token ids are from 0 to 4095, got 4096"),
        (["{bundle}", "--ids", "-1"], "token ids are from 0 to 4095, got -1"),
        (["{bundle}", "--ids", "1,x"], "--ids must be integers"),
        (["{bundle}", "x", "--decoder-prefix", "5"], "a decoder prefix is for encoder-decoders"),
        (["{bundle}", "x", "-n", "0"], "-n must be an integer from 1 to"),
        (["{bundle}", "x", "-k", "3"], "rounds of 4 draft tokens, not of 3"),
        (["{bundle}", "x", "--temperature", "-1"], "temperature must be at least 0, got -1"),
        (["{bundle}", "x", "--top-k", "-1"], "--top-k must be an integer from 0 to"),
        (["{bundle}", "x", "--top-p", "0"], "top-p must be above 0 and at most 1, got 0"),
        (["{bundle}", "x", "--min-p", "1.5"], "min-p must be from 0 to 1, got 1.5"),
        (["{bundle}", "x", "--repetition-penalty", "0"], "repetition-penalty must be above 0"),
        (["{bundle}", "x", "--seed", "abc"], "--seed must be an integer from -2^64 to 2^64"),
        (["{bundle}", "x", "--seed"], "--seed needs a value"),
        (["{bundle}", "x", "--nothing"], "unexpected argument --nothing"),
        (["{bundle}", "x", "--golden"], "give one of PROMPT, --ids, --audio and --golden"),
        ([], "BUNDLE is missing"),
        (["{bundle}/nothing", "x"], "does not exist; give the folder of a bundle"),
        (["{bundle}/draft", "x"], "is not a bundle: it has no bundle.json"),
    ],
)
def test_invalid_input_is_one_line_error(host, fused_bundle, arguments, wanted):
    check_refused(host.run(*(a.format(bundle=fused_bundle) for a in arguments)), wanted)


@each_platform
def test_nul_in_a_prompt_is_refused(host, fused_bundle):
    check_refused(host.run(fused_bundle, given="a\0b\n"), "the prompt contains a NUL character")


def _without_text(manifest):
    manifest["hosts"]["ids_only"] = "the tokenizer is not a byte-level BPE"


def _with_smaller_caches(manifest):
    damages.with_smaller_caches(manifest)
    for tensor in damages.graph(manifest)["signature"]["outputs"]:
        if tensor["role"] == "state":
            tensor["shape"][2] = 64


def _with_a_path_that_goes_up(manifest):
    damages.with_a_path_that_goes_up(manifest)
    damages.graph(manifest)["file"] = "../x.onnx"


def _with_caches_of_float16(manifest):
    for tensor in damages.graph(manifest)["signature"]["inputs"]:
        if tensor["role"] == "state":
            tensor["dtype"] = "float16"


def _without_an_input(manifest):
    inputs = damages.graph(manifest)["signature"]["inputs"]
    inputs[:] = [tensor for tensor in inputs if tensor["role"] != "tokens"]


def _without_a_key(manifest):
    del manifest["hosts"]["graphs"]


@a_platform
@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (damages.of_format_9, "has format 9, this host reads 10; run `specedge embed`"),
        (damages.without_graphs, "has no graphs for hosts; run `specedge embed --bundle"),
        (_without_text, "supports token ids only: the tokenizer is not a byte-level BPE"),
        (damages.for_a_later_version, "the bundle needs ONNX Runtime 9.0 or later"),
        (_with_smaller_caches, "cannot run round.onnx"),
        (_with_caches_of_float16, "has type float16; this host supports float32 only"),
        (_without_an_input, "round.onnx has no 'tokens'; run `specedge embed` again"),
        (_with_a_path_that_goes_up, "'../x.onnx' is not in the files of bundle.json"),
        (damages.with_an_unlisted_graph, "'round.onnx' is not in the files of bundle.json"),
        (_without_a_key, "'hosts' has no 'graphs'"),
    ],
)
def test_incompatible_manifest_is_rejected(host, fused_bundle, tmp_path, change, wanted):
    check_refused(host.run(changed(fused_bundle, tmp_path / "bundle", change), "x"), wanted)


@each_platform
def test_token_ids_need_no_tokenizer_graphs(host, fused_bundle, tmp_path):
    bundle = changed(fused_bundle, tmp_path / "bundle", _without_text)
    done = host.run(bundle, "--ids", "60", "-n", 3)
    assert done.returncode == 0, done.stderr
    assert host.run(bundle, "--golden").returncode == 0


@a_platform
@pytest.mark.parametrize(
    ("name", "damage", "wanted"),
    [
        ("round.onnx", damages.removed, "is missing"),
        ("encode.onnx", damages.longer, "bytes, not"),
        ("draft/weights.bin", damages.with_another_byte, "its SHA-256 differs"),
    ],
)
def test_a_damaged_file_is_refused(host, fused_bundle, tmp_path, name, damage, wanted):
    bundle = damaged(fused_bundle, tmp_path / "bundle", name, damage)
    check_refused(host.run(bundle, "x"), wanted)


@a_platform
def test_invalid_json_manifest_is_rejected(host, fused_bundle, tmp_path):
    bundle = changed(fused_bundle, tmp_path / "bundle", lambda manifest: None)
    (bundle / "bundle.json").write_text('{"format": 8,', "utf-8")
    check_refused(host.run(bundle, "x"), "is not JSON: it ends too early")


@each_platform
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 5}])
def test_draft_with_shorter_context_restarts_its_window(host, split_bundle, tmp_path, settings):
    import specedge

    def change(manifest):
        manifest["models"]["draft"]["context_length"] = 64

    bundle = changed(split_bundle, tmp_path / "bundle", change)
    pair = specedge.load(bundle)
    for ids in ([60, 61], [60, 61, 62, 63] * 75):  # the target reads the latter in pieces
        done = host.run(bundle, "--ids", joined(ids).strip(), "-n", 150, *options(settings))
        assert done.stdout == joined(generated(pair, ids, 150, settings).tokens), done.stderr


@pytest.mark.parametrize(
    ("host", "bundle"),
    [
        ("managed", "fused"),
        ("mono", "split"),  # calls ONNX Runtime by P/Invoke
        *(exhaustive(*case) for case in OTHER_BUILDS),
    ],
    indirect=True,
)
def test_turns_cancellation_disposal_and_streaming(host, bundle):
    done = host.check(bundle)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed ") >= 15


def test_the_host_class_is_at_most_210_lines():
    files = [SOURCES / "SpeculativeSession.cs", SOURCES / "SpeculativeSession.Async.cs"]
    lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    assert sum(1 for line in lines if line.strip()) <= 210


def test_function_offsets_match_onnxruntime_api_table(tmp_path):
    include = host_tools("include/onnxruntime_c_api.h") / "include"
    if not shutil.which("cc"):
        pytest.skip("a C compiler is missing")
    text = (SOURCES / "OnnxRuntimePInvoke.cs").read_text("utf-8")
    (table,) = re.findall(r"enum Place\s*\{(.*?)\}", text, re.DOTALL)
    places = re.findall(r"(\w+) = (\d+)", table)
    assert len(places) > 20
    checks = "".join(
        f'_Static_assert(offsetof(OrtApi, {name}) == {place} * sizeof(void *), "{name}");\n'
        for name, place in places
    )
    source = tmp_path / "places.c"
    source.write_text(f"#include <stddef.h>\n#include <onnxruntime_c_api.h>\n{checks}")
    command = ["cc", "-fsyntax-only", "-I", include, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
