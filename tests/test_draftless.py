"""A bundle without a draft model: read, loaded, run, measured and shown."""

import json
from functools import partial

import pytest

import installed
from draftless import make_draftless
from specedge.bundle import Bundle, store
from specedge.errors import DeviceError, DrafterError

PROMPT = "def read_config(path):"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_draftless(tmp_path_factory.mktemp("draftless"))


@pytest.fixture(scope="module")
def loaded(bundle):
    pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")
    import specedge

    with specedge.load(bundle.folder, slots=2) as pipeline:
        yield pipeline


@pytest.fixture
def run(bundle):
    return partial(installed.run, SPECEDGE_BUNDLE=str(bundle.folder))


def test_a_manifest_without_a_draft_reads_as_written(bundle):
    assert bundle.draft is None
    assert bundle.models == {"target": bundle.target}
    assert not bundle.shares_weights
    assert Bundle.from_json(bundle.to_json()) == bundle


@pytest.mark.parametrize("k", [0, 1, 4, "auto"])
def test_greedy_text_equals_text_of_pair(loaded, pipeline, k):
    wanted = pipeline.generate(PROMPT, 48, num_draft_tokens=0).tokens
    generation = loaded.generate(PROMPT, 48, num_draft_tokens=k)
    assert generation.tokens == wanted
    assert generation.stats.num_draft_passes == 0


def test_auto_drafts_by_suffix(loaded):
    generation = loaded.generate("1 2 3 4 1 2 3 4 1 2 3 4 1 2 3", 64, num_draft_tokens=4)
    assert generation.stats.num_accepted > 0
    assert {*generation.stats.drafted_by_source} == {"suffix"}
    assert generation.drafter == "suffix"


def test_slots_have_only_target_caches(loaded):
    with loaded.stream(PROMPT, 8) as one, loaded.stream("import ", 8) as other:
        assert "".join(one) == loaded.generate(PROMPT, 8).text
        assert "".join(other) == loaded.generate("import ", 8).text


@pytest.mark.parametrize("drafter", ["model", "chain"])
def test_drafters_requiring_a_model_are_rejected(loaded, drafter):
    with pytest.raises(DrafterError, match=f"drafter '{drafter}' needs a draft model.*--draft"):
        loaded.generate(PROMPT, 8, drafter=drafter)


@pytest.mark.parametrize("drafter", ["suffix", "lookup", "random"])
def test_other_drafters_run(loaded, drafter):
    plain = loaded.generate(PROMPT, 8, num_draft_tokens=0).text
    assert loaded.generate(PROMPT, 8, drafter=drafter, num_draft_tokens=2).text == plain


def test_memory_counts_the_target_only(bundle):
    from specedge.runtime.requests.loader import memory_of

    alone, pair = memory_of(bundle), memory_of(Bundle.read(store.embedded_folder()))
    assert len(alone.models) == 1
    assert alone.caches == pair.models[0].caches < pair.caches
    assert alone.peak < pair.peak
    assert len(alone.with_context_below(alone.peak).models) == 1


def test_a_draft_device_is_refused(bundle):
    import specedge

    with pytest.raises(DeviceError, match="draft_device=cpu requires a draft model"):
        specedge.load(bundle.folder, draft_device="cpu")


def test_tune_times_the_target_alone(loaded, monkeypatch):
    from specedge.benchmarks import tune

    monkeypatch.setattr(tune, "SECONDS", 0.01)
    monkeypatch.setattr(tune, "TEXT_SECONDS", 0.05)
    costs = tune.measure(loaded).costs
    assert "model" not in costs.greedy.acceptance
    assert costs.greedy.target[0][0] > 0


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("generate", PROMPT, "-n", 8), ""),
        (("inspect",), "draft            none"),
        (("inspect", "--memory"), "caches"),
        (("compare", PROMPT, "-n", 8, "--repeats", 1), "same tokens          yes"),
        (
            ("bench", "--set", "code", "-n", 4, "-k", 2, "--repeats", 1),
            "python-9m without a draft model",
        ),
    ],
)
def test_commands_run_without_a_draft(run, arguments, wanted):
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    assert wanted in result.stdout


def test_list_shows_missing_draft_as_none():
    from draftless import make_draftless

    make_draftless(store.bundles_folder() / "alone")
    result = installed.run("list")
    assert "alone     python-9m  none " in result.stdout
    (entry, _) = json.loads(installed.run("list", "--json").stdout)
    assert entry["draft"] is None


@pytest.mark.slow
def test_the_audit_passes_without_a_draft_model(bundle):
    pytest.importorskip("scipy", reason="the audit needs SciPy")
    from auditing import Ticks
    from specedge.verification import audit

    report = audit.audit(bundle, audit.ExecutionSettings(), [], Ticks(150).budget).as_dict()
    assert not [f for f in report["findings"] if f["status"] == "FAILED"]
    assert "draft none" in report["about"]["pair"]
    found = {finding["check"]: finding["facts"] for finding in report["findings"]}
    assert "draft" not in found["caches"]


def test_the_substitute_draft_overlaps_the_target(loaded):
    from specedge.benchmarks.acceptance import acceptances
    from specedge.runtime.requests.pipeline import Pipeline
    from specedge.sampling_options import Sampling
    from specedge.verification.audited_pair import SubstituteDraft

    stand_in = SubstituteDraft(loaded.target.with_new_cache())
    embedded = Bundle.read(store.embedded_folder())
    pair = Pipeline(embedded, loaded.tokenizer, loaded.target, stand_in)
    tokens = loaded.prompts.tokens(PROMPT)
    text = loaded.generate(tokens, 32, 1.0, seed=1).tokens
    chances = acceptances(pair, tokens, text, Sampling(1.0))
    assert 0.4 < sum(chances) / len(chances) < 0.9


@pytest.fixture(scope="module")
def embedded(bundle, tmp_path_factory):
    """Graphs of a plain round, for hosts."""
    pytest.importorskip("onnx_ir", reason="needs the export extra")
    from specedge.exporter import embed
    from specedge.verification.transcripts import transcripts

    folder = tmp_path_factory.mktemp("hosts") / "bundle"
    return embed(bundle.folder, folder, golden=transcripts)


@pytest.mark.slow
def test_hosts_replay_the_transcripts_of_plain_rounds(embedded):
    import onnxruntime

    from round_host import Fused
    from specedge.runtime.backend.sessions import has_pool

    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = not has_pool()  # commands run in this process make one
    for entry in embedded.hosts.session_options.items():
        options.add_session_config_entry(*entry)
    session = onnxruntime.InferenceSession(embedded.path("round.onnx"), options)
    host = Fused(session, embedded, embedded.end_tokens)
    golden = json.loads(embedded.path(embedded.hosts.golden).read_text("utf-8"))
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    assert len(golden["transcripts"]) >= 5
    for one in golden["transcripts"]:
        settings = {name: one[name] for name in names}
        written = host.generate(one["prompt_tokens"], one["max_new_tokens"], **settings)
        assert written == (one["tokens"], one["num_accepted"])
        assert {*one["num_accepted"]} == {0}


@pytest.mark.slow
def test_a_bundle_with_a_plain_round_reads_as_written(embedded):
    assert Bundle.read(embedded.folder) == embedded
    (graph,) = (graph for graph in embedded.hosts.graphs if graph.name == "round")
    assert not [t.state for t in graph.signature.inputs if (t.state or "").startswith("draft")]


@pytest.mark.parametrize("option", [("-k", 2), ("--layout", "split")])
def test_graphs_that_need_a_draft_model_are_refused(run, tmp_path, option):
    pytest.importorskip("onnx_ir", reason="needs the export extra")
    result = run("embed", "--output", tmp_path / "out", *option)
    assert result.returncode == 1
    assert f"{option[0]}" in result.stderr
    assert "needs a draft model" in result.stderr
    assert result.stderr.count("\n") == 1
