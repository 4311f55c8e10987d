"""The model's own generation defaults, where a request leaves its fields out."""

import dataclasses
import json
import shutil

import pytest

from installed import run
from served import PROMPT, ask, chat_pair, serving
from specedge.bundle import MANIFEST, store
from specedge.sampling_options import RecommendedSampling
from specedge.serve.app import ServerSettings, make_app

SMOLLM2 = RecommendedSampling(temperature=0.2, top_p=0.9)
ENDPOINTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "A class."}]},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 8},
    "/v1/responses": {"input": "A class."},
}
FIELDS = [field.name for field in dataclasses.fields(RecommendedSampling)]


@pytest.fixture(scope="module")
def pair():
    return chat_pair(1)


@pytest.fixture
def recommends(pair, monkeypatch):
    """Let the pair's bundle recommend a sampling."""

    def recommend(sampling):
        bundle = dataclasses.replace(pair.bundle, default_sampling=sampling)
        monkeypatch.setattr(pair, "bundle", bundle.at(pair.bundle.folder))

    return recommend


@pytest.fixture
def sampled(pair, monkeypatch):
    """The sampling of each text that begins."""
    options, stream = [], pair.stream

    def recorded(prompt, **given):
        options.append({name: given[name] for name in FIELDS if name in given})
        return stream(prompt, **given | {"max_new_tokens": 8})

    monkeypatch.setattr(pair, "stream", recorded)
    return options


@pytest.mark.parametrize("path", ENDPOINTS)
def test_omitted_sampling_fields_use_model_defaults(pair, recommends, sampled, path):
    recommends(SMOLLM2)
    with serving(pair) as port:
        for fields, sampling in (
            ({}, {"temperature": 0.2, "top_p": 0.9}),
            ({"temperature": None, "top_p": None}, {"temperature": 0.2, "top_p": 0.9}),
            ({"temperature": 0}, {"temperature": 0, "top_p": 0.9}),
            ({"top_p": 1}, {"temperature": 0.2, "top_p": 1}),
            ({"temperature": 1.5, "top_k": 3}, {"temperature": 1.5, "top_k": 3, "top_p": 0.9}),
        ):
            status, _, said = ask(port, "POST", path, ENDPOINTS[path] | fields)
            assert status == 200
            assert sampled.pop() == sampling
            if path == "/v1/responses":
                shown = {name: json.loads(said)[name] for name in ("temperature", "top_p")}
                assert shown == {name: sampling[name] for name in shown}


@pytest.mark.parametrize(
    ("recommended", "generation_config"), [(SMOLLM2, "none"), (RecommendedSampling(), "auto")]
)
def test_sampling_uses_openai_defaults_without_model_defaults(
    pair, recommends, sampled, recommended, generation_config
):
    recommends(recommended)
    with serving(pair, generation_config=generation_config) as port:
        for path, body in ENDPOINTS.items():
            assert ask(port, "POST", path, body)[0] == 200
        model = json.loads(ask(port, "GET", "/v1/models")[2])["data"][0]
    assert sampled == [{"temperature": 1.0}] * len(ENDPOINTS)
    assert model["default_sampling"] == {"temperature": 1.0}


def test_all_model_defaults_are_applied_and_listed(pair, recommends, sampled):
    defaults = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05}
    defaults["repetition_penalty"] = 1.1
    recommends(RecommendedSampling(**defaults))
    with serving(pair) as port:
        ask(port, "POST", "/v1/completions", ENDPOINTS["/v1/completions"])
        model = json.loads(ask(port, "GET", "/v1/models")[2])["data"][0]
    assert sampled == [defaults]
    assert model["default_sampling"] == defaults


def test_an_unknown_generation_config_is_refused(pair):
    with pytest.raises(ValueError, match="generation_config must be auto or none, got 'vllm'"):
        make_app(pair, ServerSettings(generation_config="vllm"))


def test_generate_stays_greedy(tmp_path):
    folder = shutil.copytree(store.embedded_folder(), tmp_path / "pair")
    manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    manifest["default_sampling"] = dataclasses.asdict(SMOLLM2)
    (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    arguments = ("generate", PROMPT, "-n", 24, "--bundle")
    recommended, plain = run(*arguments, folder), run(*arguments, store.embedded_folder())
    assert recommended.stdout == plain.stdout
