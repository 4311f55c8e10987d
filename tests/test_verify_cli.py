"""`specedge verify` as a user runs it: reports, exit codes, damaged bundles, bad input."""

import json
import os
import select
import shutil
import signal
import subprocess
from functools import partial
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from auditing import Ticks
from installed import COMMAND, run
from manifests import make_bundle
from specedge.bundle import MANIFEST, Bundle, store
from specedge.bundle.integrity import file_entry
from specedge.cli.verify import verify
from specedge.errors import BundleError
from specedge.verification import audit, decoding_checks, graph_checks
from specedge.verification.defects import DEFECTS
from specedge.verification.report import FAILED, PASSED, SHORT, CheckResult

CHECKS = [
    *("files", "caches", "self-draft", "greedy", "coupled"),
    *("graphs", "batched", "joint", "sampled"),
]
SHORT_RUN = ("verify", "--minutes", "0.0001")


@pytest.fixture
def copy(tmp_path):
    """A copy of the embedded pair."""
    return shutil.copytree(store.embedded_folder(), tmp_path / "pair")


def statuses(report):
    return {finding["check"]: finding["status"] for finding in report["findings"]}


def relist(folder, **changes):
    """List the files as they are now."""
    text = json.loads((folder / MANIFEST).read_text("utf-8"))
    for name in text["files"]:
        text["files"][name] = vars(file_entry(folder / name))
    (folder / MANIFEST).write_text(json.dumps(text | changes), "utf-8")


@pytest.mark.slow
@pytest.mark.usefixtures("all_cpus")
def test_the_embedded_pair_passes_every_check():
    ticks = Ticks(30000)

    def on_progress(check):
        ticks.step = {"greedy": 4.0, "joint": 1.5, "sampled": 290.0}.get(check, 1.0)

    bundle = Bundle.read(store.embedded_folder())
    report = audit.audit(
        bundle, audit.ExecutionSettings(), ["your own\nprompt"], ticks.budget, on_progress
    ).as_dict()
    assert [finding["check"] for finding in report["findings"]] == CHECKS
    assert statuses(report) == dict.fromkeys(CHECKS, PASSED)
    assert report["result"] == "PASSED"
    found = {finding["check"]: finding["facts"] for finding in report["findings"]}
    for role in ("target", "draft"):
        facts = found["graphs"][role]
        recorded = bundle.models[role].parity["gqa"].invariant_lengths
        assert facts["recorded_invariant_lengths"] == list(recorded)
        assert set(recorded) <= set(facts["invariant_lengths"])
        assert {1, 2, 3, 4, 5} <= set(facts["invariant_lengths"])
        assert (
            0 < facts["relative_difference_to_onnx"] <= 0.05
        )  # int8: another last bit rounds otherwise
        assert facts["fixed_shapes_gqa"].keys() == {"step", "catchup", "verify", "prefill"}
    assert set(found["greedy"]["num_tokens_by_k"]) == {*"12345678", "16"}
    assert found["sampled"]["all together"]["num_tokens"] >= 5 * 320
    json.dumps(report)


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--strict",), 1)])
def test_incomplete_audit_fails_only_in_strict_mode(options, code):
    result = run(*SHORT_RUN, *options)
    assert result.returncode == code
    (first, *_) = result.stdout.splitlines()
    assert first.startswith("specedge verify: INCOMPLETE (no check failed; too little time")
    assert first.endswith("increase --minutes)")
    lines = result.stderr.splitlines()
    assert sum(line.startswith("first verdict after ") for line in lines) == 1
    assert "\x1b" not in result.stdout


def test_deterministic_checks_report_first(copy, monkeypatch):
    told, verdicts = [], []
    monkeypatch.setattr(decoding_checks, "greedy", lambda *_: CheckResult("greedy", FAILED, "off"))
    monkeypatch.setitem(audit.DETERMINISTIC, "greedy", decoding_checks.greedy)
    report = audit.audit(
        Bundle.read(copy),
        audit.ExecutionSettings(),
        [],
        Ticks(1).budget,
        told.append,
        on_first_verdict=lambda report: verdicts.append((report.result, [*told])),
    )
    assert verdicts == [("FAILED", CHECKS[:5])]
    assert report.result == "FAILED"


def test_nan_logits_fail_with_a_report(copy):
    weights = copy / Bundle.read(copy).target.weights
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    relist(copy)
    result = run(*SHORT_RUN, "--bundle", copy)
    assert result.returncode == 1
    assert result.stdout.startswith("specedge verify: FAILED")
    assert "logits are not numbers" in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_the_budget_is_a_number_of_passes(copy):
    def audited(step):
        ticks = Ticks(1, step)
        audit.audit(Bundle.read(copy), audit.ExecutionSettings(), [], ticks.budget, passes=3)
        return ticks.budget.end

    assert audited(0.01) == 1
    assert audited(2.0) == 3 * 2.0


def test_json_contains_the_report_fields():
    result = run(*SHORT_RUN, "--json", "--ops", "onnx")
    report = json.loads(result.stdout)
    assert report["result"] == "INCOMPLETE"
    assert list(statuses(report)) == CHECKS
    assert "onnxruntime" in report["about"]["versions"]
    assert "graph variant onnx" in report["about"]["run"]
    assert report["findings"][0]["facts"]["num_bad"] == 0


@pytest.mark.parametrize("file", ["target/weights.bin", "draft/decoder.onnx"])
def test_corrupt_byte_fails_and_file_is_named(copy, file):
    with (copy / file).open("r+b") as opened:
        opened.seek(1000)
        byte = opened.read(1)
        opened.seek(1000)
        opened.write(bytes([byte[0] ^ 1]))
    result = run(*SHORT_RUN, "--bundle", copy)
    assert result.returncode == 1
    assert "specedge verify: FAILED (files)" in result.stdout
    assert file in result.stdout
    assert "graphs     not run" in result.stdout
    assert "Traceback" not in result.stderr


def test_graph_of_another_model_fails_despite_valid_hash(copy):
    shutil.copy(copy / "draft/decoder-gqa.onnx", copy / "target/decoder-gqa.onnx")
    relist(copy)
    result = run(*SHORT_RUN, "--bundle", copy)
    assert result.returncode == 1
    assert "FAILED (graphs)" in result.stdout
    assert "sampled    not run" in result.stdout


def test_the_loop_is_audited_with_the_first_passes_of_requests(pipeline):
    bundle = pipeline.bundle
    pair = audit.make_audited_pair(
        bundle, audit.ExecutionSettings(), audit.built_in_prompts(bundle)
    )
    assert pair.max_first_length == pipeline.max_first_length > 64
    unread = min(len(pair.greedy_prompts[-1].tokens), 64)
    assert max(pair.greedy_ks) + unread <= pair.max_first_length


@pytest.mark.parametrize(
    ("capacity", "context", "count"), [(512, 512, 256), (2**17, 2**17, 128), (32, 32, 32)]
)
def test_graphs_are_compared_over_the_longest_pass_and_two_of_the_longest_shape(
    capacity, context, count
):
    model = SimpleNamespace(capacity=capacity, context_length=context, vocab_size=9)
    assert len(graph_checks._tokens(model)) == count


@pytest.mark.slow
def test_fixed_shape_graph_of_another_model_fails(copy):
    """Found though nothing of ours runs it: step has the shape of catchup."""
    shutil.copy(copy / "target/catchup.onnx", copy / "target/step.onnx")
    relist(copy)
    settings, bundle = audit.ExecutionSettings(), Bundle.read(copy)
    variant, open_ = partial(settings.graph_variant, bundle), partial(settings.open, bundle)
    with pytest.raises(BundleError, match=r"input_ids is tensor\(int64\) \[1, 2\]"):
        graph_checks.graphs(bundle, variant, open_, Ticks(10**6).budget)


def test_auto_is_the_cpu_where_the_bundle_has_no_graphs_for_gpus():
    devices = ("--device", "auto", "--draft-device", "cpu")
    result = run(*SHORT_RUN, "--json", *devices)
    assert json.loads(result.stdout)["about"]["run"].startswith("on cpu, graph variant")


def read_until(text, terminal):
    seen = b""
    while text not in seen:
        assert select.select([terminal], [], [], 60)[0], seen
        seen += os.read(terminal, 1000)
    return seen


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_terminal_shows_progress_and_ctrl_c_exits_with_one_line():
    master, slave = os.openpty()
    process = subprocess.Popen(
        [*COMMAND, "verify"],
        stdout=subprocess.PIPE,
        stderr=slave,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(slave)
    seen = read_until(b"caches", master)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == b""
    seen += read_until(b"interrupted", master)
    assert process.returncode == 130
    assert b"Traceback" not in seen
    os.close(master)


@pytest.mark.parametrize(
    ("caught", "alarm", "code"), [(5, False, 0), (4, False, 2), (5, True, 1), (0, False, 2)]
)
def test_the_self_test_sets_the_exit_code(monkeypatch, caught, alarm, code):
    failed, passed = CheckResult("joint", FAILED, "off"), CheckResult("joint", PASSED, "fine")
    result = audit.SelfTest(
        [failed if alarm else passed],
        [(defect, [failed if i < caught else passed]) for i, defect in enumerate(DEFECTS)],
    )
    monkeypatch.setattr(audit, "self_test", lambda *_: result)
    shown = CliRunner().invoke(verify, ["--self-test", "--bundle", str(store.embedded_folder())])
    assert shown.exit_code == code
    assert f"detected {caught} of 5" in shown.output
    assert shown.output.count("MISSED") == 5 - caught
    assert ("FALSE ALARM" in shown.output) == alarm


def test_a_control_without_time_is_incomplete(monkeypatch):
    short = CheckResult("joint", SHORT, "too few texts")
    result = audit.SelfTest([short], [(defect, [short]) for defect in DEFECTS])
    monkeypatch.setattr(audit, "self_test", lambda *_: result)
    shown = CliRunner().invoke(verify, ["--self-test", "--bundle", str(store.embedded_folder())])
    assert shown.exit_code == 2
    assert "no defect: incomplete: joint" in shown.output


def test_a_bundle_with_noisy_weights_fails(tmp_path):
    make_bundle(tmp_path)
    result = run(*SHORT_RUN, "--bundle", tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
