"""Requests to the embedded pair: streams, seeds, reuse, threads and errors."""

import dataclasses
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import specedge
from specedge import BundleError, ContextLengthError, DeviceError, PromptError
from specedge.bundle import store
from specedge.bundle.manifest import signatures
from specedge.bundle.signature import Port

pytestmark = pytest.mark.usefixtures("shared_costs")
PROMPTS = ("def read_config(path):", "class Parser:\n    def __init__(self")


def test_prompt_filling_the_context_is_rejected_before_generation(pipeline):
    context = pipeline.bundle.context_length
    for length in (context, context + 7):
        with pytest.raises(ContextLengthError, match=f"{length} tokens.*{context}.*shorten"):
            pipeline.stream([5] * length)


def test_one_token_prompt_is_accepted_and_empty_prompt_rejected(pipeline):
    assert len(pipeline.generate([7], 5, ignore_eos=True).tokens) == 5
    for empty in ("", []):
        with pytest.raises(PromptError, match="empty"):
            pipeline.generate(empty)


@pytest.mark.parametrize("prompt", [b"def", [1.5], ["def"], "a\udcff"])
def test_prompt_of_invalid_type_is_rejected(pipeline, prompt):
    with pytest.raises(PromptError, match="prompt"):
        pipeline.generate(prompt)


@pytest.mark.parametrize("token", [-1, 10**9])
def test_a_token_outside_the_vocabulary_is_refused(pipeline, token):
    with pytest.raises(PromptError, match=str(token)):
        pipeline.generate([1, token])


def test_a_prompt_may_be_text_or_ids(pipeline):
    ids = pipeline.tokenizer.encode(PROMPTS[0]).ids
    by_ids = pipeline.generate(ids, 20)
    assert by_ids.text == pipeline.generate(PROMPTS[0], 20).text
    assert by_ids.text == pipeline.generate(np.array(ids), 20).text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streamed_pieces_join_to_text_of_same_seed(pipeline, temperature):
    options = {"temperature": temperature, "seed": 11, "max_new_tokens": 80}
    stream = pipeline.stream(PROMPTS[0], **options)
    pieces = list(stream)
    whole = pipeline.generate(PROMPTS[0], **options)
    assert "".join(pieces) == stream.generation.text == whole.text
    stopped = pipeline.stream(PROMPTS[0], **options)
    begun = [next(stopped), next(stopped)]
    assert [*begun, *stopped] == pieces
    assert stream.generation.tokens == whole.tokens
    assert len(pieces) > 5


def test_a_random_seed_is_reported(pipeline):
    one = pipeline.generate(PROMPTS[0], 30, 1.0)
    two = pipeline.generate(PROMPTS[0], 30, 1.0)
    assert one.seed != two.seed
    assert pipeline.generate(PROMPTS[0], 30, 1.0, seed=one.seed).tokens == one.tokens


def test_pipeline_is_reusable_after_abandoned_stream(pipeline):
    whole = pipeline.generate(PROMPTS[0], 60)
    with pipeline.stream(PROMPTS[0], 60) as left:
        first = next(left)
    assert list(left) == []
    assert left.generation.finish_reason == "unfinished"
    assert left.generation.text == first == whole.text[: len(first)]
    assert pipeline.generate(PROMPTS[0], 60).tokens == whole.tokens


def test_two_pipelines_run_in_two_threads(pipeline):
    other = specedge.load(store.embedded_folder())
    expected = [pipeline.generate(p, 60, ignore_eos=True).tokens for p in PROMPTS[:2]]
    found = [None, None]

    def run(i, one):
        found[i] = [one.generate(PROMPTS[i], 60, ignore_eos=True).tokens for _ in range(2)]

    threads = [threading.Thread(target=run, args=(i, p)) for i, p in enumerate((pipeline, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[tokens] * 2 for tokens in expected]


def test_seconds_add_up_and_passes_are_counted(pipeline):
    start = time.perf_counter()
    one = pipeline.generate(PROMPTS[0], 50, ignore_eos=True)
    elapsed = time.perf_counter() - start
    stats = one.stats
    assert stats.num_target_passes == stats.num_rounds == len(one.rounds)
    assert stats.num_draft_passes == stats.drafted_by_source["model"]
    parts = (stats.draft_seconds, stats.verify_seconds, stats.sampling_seconds)
    assert all(part > 0 for part in parts)
    assert stats.decode_seconds == sum(parts) + stats.other_seconds
    assert stats.decode_seconds + stats.prefill_seconds <= elapsed
    assert stats.num_tested == sum(stats.tested_by_position)


def test_graph_inconsistent_with_manifest_is_rejected(pipeline):
    model = without_batched_graphs(pipeline.bundle.draft)
    for states, columns in ((model.states, model.padded_vocab_size + 1), (model.layers[0], 4096)):
        wrong = dataclasses.replace(
            model, states=states, padded_vocab_size=columns,
            signatures=signatures(states, model.capacity, columns),
        )  # fmt: skip
        with pytest.raises(
            BundleError, match=r"bundle.json specifies .*export or copy the bundle again"
        ):
            _opened(pipeline.bundle, wrong)


def test_a_graph_with_an_unknown_input_role_is_refused(pipeline):
    model = pipeline.bundle.draft
    signature = model.signatures["chosen_logits"]
    new = Port("logit_rows", "rows", None, "int64", ("T",))
    later = dataclasses.replace(signature, inputs=(*signature.inputs, new))
    model = dataclasses.replace(model, signatures=model.signatures | {"chosen_logits": later})
    with pytest.raises(BundleError, match=r"input logit_rows is unknown to this version"):
        _opened(pipeline.bundle, model)


def without_batched_graphs(model):
    graphs = tuple(graph for graph in model.graphs if graph.name != "batched")
    return dataclasses.replace(model, graphs=graphs)


def _opened(bundle, model):
    from specedge.runtime.backend.onnx_model import OrtModel
    from specedge.runtime.backend.sessions import Device

    return OrtModel(bundle, model, Device())


def test_unknown_device_and_invalid_threads_are_rejected(pipeline):
    with pytest.raises(DeviceError, match="'abacus'"):
        specedge.load(store.embedded_folder(), device="abacus")
    for threads in (0, 10**6, 1.5, "2"):
        with pytest.raises(DeviceError, match="threads must be"):
            specedge.load(store.embedded_folder(), threads=threads)
    specedge.load(store.embedded_folder(), share_threads=True)
    with pytest.raises(DeviceError, match="new process"):
        specedge.load(store.embedded_folder(), threads=1, share_threads=True)


def test_an_oversized_prompt_is_refused_without_tokenizing(pipeline):
    with pytest.raises(ContextLengthError, match=r"characters.*shorten it"):
        pipeline.stream("x" * 10_000_000)


def test_onnxruntime_collects_no_telemetry(tmp_path):
    environment = os.environ | {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    code = "import specedge; specedge.load().generate('x', 3)"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["specedge"])


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_missing_onnxruntime_names_the_pip_command():
    code = "import sys; sys.modules['onnxruntime'] = None; import specedge; specedge.load()"
    assert "pip install 'specedge[cpu]'" in run_python(code).stderr


def in_another_process(prepared, after):
    """Return the output of 30 tokens in a child process, with code before and after loading."""
    generated = f"print(pipeline.generate({PROMPTS[0]!r}, 30).tokens)"
    quiet = "ort.set_default_logger_severity(3)"  # without warnings of unused options
    loaded = f"import onnxruntime as ort, specedge; {quiet}", prepared, "pipeline = specedge.load()"
    result = run_python("\n".join([*loaded, generated, after]))
    assert result.stderr == ""
    return result.stdout.splitlines()


def test_loading_does_not_change_application_thread_pools(pipeline):
    after = (
        "path = pipeline.bundle.path(pipeline.bundle.draft.graph('decoder', 'onnx').file)\n"
        "ort.InferenceSession(str(path), providers=['CPUExecutionProvider'])\n"
    )
    assert in_another_process("", after) == [str(pipeline.generate(PROMPTS[0], 30).tokens)]


def test_sessions_use_an_existing_shared_pool(pipeline):
    after = (
        "try:\n"
        "    specedge.load(threads=1)\n"
        "except specedge.DeviceError as error:\n"
        "    print(error)\n"
    )
    tokens, message = in_another_process("ort.set_global_thread_pool_sizes(1, 1)", after)
    assert tokens == str(pipeline.generate(PROMPTS[0], 30).tokens)
    assert message == (
        "cannot use threads=1: this process already has ONNX Runtime's shared thread pool; "
        "omit threads, or use a new process"
    )
