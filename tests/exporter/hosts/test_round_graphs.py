"""Round graphs generate the text of the runtime's decoder."""

from __future__ import annotations

import shutil

import numpy as np
import onnx_ir as ir
import pytest

import specedge
from cases import exhaustive, slow
from round_host import Fused, Split
from specedge.exporter import export
from specedge.exporter.hosts.round_graphs import RoundBuilder, accept_graph, draft_graph
from specedge.runtime.backend.self_test import exact_device
from specedge.runtime.backend.sessions import Device

SAMPLINGS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 1.2, "top_k": 50, "top_p": 0.95},
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Hosts and pipelines by layout, bundle, K and graph variant."""
    made = {}

    def host(layout, bundle, num_draft_tokens, ops):
        key = layout, bundle.folder, num_draft_tokens, ops
        if key not in made:
            folder = tmp_path_factory.mktemp("rounds") / "bundle"
            shutil.copytree(bundle.folder, folder)
            device = exact_device([bundle.draft, bundle.target], Device())

            def opened(model, name):
                ir.save(model, folder / name)
                return device.open(folder / name)

            both = {r: m.cpu_ops if ops == "auto" else ops for r, m in bundle.models.items()}
            if layout == "fused":
                builder = RoundBuilder(bundle.at(folder), num_draft_tokens, both)
                session = opened(builder.fused_model(), "round.onnx")
                one = Fused(session, bundle, bundle.end_tokens)
            else:
                sessions = (
                    opened(draft_graph(bundle.at(folder), both["draft"]), "draft.onnx"),
                    device.open(folder / bundle.target.graph("decoder", both["target"]).file),
                    opened(accept_graph(bundle), "accept.onnx"),
                )
                one = Split(sessions, bundle, num_draft_tokens, bundle.end_tokens)
            made[key] = one, specedge.load(folder, ops=ops)
        return made[key]

    return host


@pytest.fixture(params=["gpt2", "embedded"])
def bundle(request, pairs):
    """A pair in float32, and one in integers."""
    return pairs.bundle(request.param)


EVERY_LAYOUT = pytest.mark.parametrize("layout", ["fused", "split"])
IN_FLOAT32 = pytest.mark.parametrize("bundle", ["gpt2", exhaustive("embedded")], indirect=True)


def check(host, pipeline, sampling, num_seeds=1):
    for seed in range(num_seeds):
        prompt = np.random.default_rng(seed).integers(0, 200, 5 + 7 * seed).tolist()
        wanted = pipeline.generate(
            prompt, 40, seed=seed, num_draft_tokens=4, drafter="model", **sampling
        )
        tokens, accepted = host.generate(prompt, 40, seed=seed, **sampling)
        assert tokens == wanted.tokens
        left = 40 - np.cumsum([0, *(len(round_.tokens) for round_ in wanted.rounds)])
        counts = [round_.num_accepted for round_ in wanted.rounds]
        assert accepted == np.minimum(counts, left[:-1]).tolist()


@pytest.mark.parametrize(
    "sampling",
    [
        *SAMPLINGS[-1:],
        *(exhaustive(x) for x in SAMPLINGS[1:-1]),
        SAMPLINGS[0],
    ],
    ids=str,
)
@pytest.mark.parametrize("ops", ["gqa", exhaustive("onnx")])
@EVERY_LAYOUT
def test_round_graphs_generate_the_text_of_the_decoder(bundle, hosts, layout, ops, sampling):
    check(*hosts(layout, bundle, 4, ops), sampling)


@pytest.mark.parametrize(
    "exported",
    [
        slow("bfloat16"),
        *map(exhaustive, ("embedded", "gpt2", "llama", "qwen2", "mistral", "padded", "windowed")),
    ],
    indirect=True,
)
@EVERY_LAYOUT
def test_round_graphs_of_every_pair_generate_the_text_of_the_decoder(exported, hosts, layout):
    for sampling in (SAMPLINGS[0], SAMPLINGS[1], SAMPLINGS[-1]):
        check(*hosts(layout, exported, 4, "auto"), sampling, num_seeds=3)


@pytest.fixture(scope="module", params=["fp32", exhaustive("int8")])
def cut(request, pairs, tmp_path_factory):
    """A pair whose draft knows 200 of 512 tokens."""
    output = tmp_path_factory.mktemp("cut") / "bundle"
    options = {"draft_vocab": 200, "draft_precision": request.param}
    return export(*pairs.checkpoint("gpt2"), output, ops="all", **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [SAMPLINGS[0], SAMPLINGS[-1], *(exhaustive(x) for x in SAMPLINGS[1:-1])],
    ids=str,
)
@EVERY_LAYOUT
def test_round_graphs_of_a_reduced_vocabulary_generate_the_text_of_the_decoder(
    cut, hosts, layout, sampling
):
    ids = cut.ids_of(cut.draft)
    assert list(ids) != list(range(len(ids)))
    check(*hosts(layout, cut, 4, "auto"), sampling)


@pytest.mark.parametrize("num_draft_tokens", [exhaustive(1), 8])
@IN_FLOAT32
@EVERY_LAYOUT
def test_round_graphs_of_another_k_generate_the_text_of_the_decoder(
    bundle, hosts, layout, num_draft_tokens
):
    host, pipeline = hosts(layout, bundle, num_draft_tokens, "gqa")
    for sampling in ({}, {"temperature": 1.0}):
        options = {"seed": 5, "num_draft_tokens": num_draft_tokens, "drafter": "model"}
        wanted = pipeline.generate([40, 41, 42], 40, **options, **sampling)
        assert host.generate([40, 41, 42], 40, seed=5, **sampling)[0] == wanted.tokens


@IN_FLOAT32
@EVERY_LAYOUT
def test_round_graphs_stop_at_the_end_of_the_context(bundle, hosts, layout):
    host, pipeline = hosts(layout, bundle, 4, "gqa")
    length = bundle.context_length - 9
    prompt = np.random.default_rng(3).integers(0, 200, length).tolist()
    for sampling in ({}, {"temperature": 1.0}):
        options = {"seed": 1, "num_draft_tokens": 4, "drafter": "model", "ignore_eos": True}
        wanted = pipeline.generate(prompt, 40, **options, **sampling)
        host.ends, ends = set(), host.ends
        assert host.generate(prompt, 40, seed=1, **sampling)[0] == wanted.tokens
        host.ends = ends
        assert len(wanted.tokens) == 9


@IN_FLOAT32
@EVERY_LAYOUT
def test_chunked_prompt_leaves_the_same_caches(bundle, hosts, layout):
    host, pipeline = hosts(layout, bundle, 4, "gqa")
    prompt = np.random.default_rng(4).integers(0, 200, 50).tolist()
    for sampling in ({}, {"temperature": 1.0}):
        options = {"seed": 1, "num_draft_tokens": 4, "drafter": "model"}
        wanted = pipeline.generate(prompt, 20, **options, **sampling)
        assert host.generate(prompt, 20, seed=1, piece=16, **sampling)[0] == wanted.tokens
