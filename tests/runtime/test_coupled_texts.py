"""Texts of the embedded checkpoints under Gumbel coupling: the seed alone decides."""

from pathlib import Path

import pytest

import specedge

CHECKPOINTS = Path(__file__).parents[2] / "models" / "checkpoints"
PROMPT = "def read_config(path):\n"
LENGTH = 16
SEEDS = range(5)
DRAFTING = [
    *((name, k) for k in range(1, 9) for name in ("model", "suffix")),
    *((name, "auto") for name in ("auto", "model", "suffix", "chain")),
]


@pytest.fixture(scope="module")
def float32(tmp_path_factory):
    """The embedded checkpoints in float32, loaded."""
    pytest.importorskip("torch", reason="needs the export extra")
    from specedge.exporter import export

    folder = tmp_path_factory.mktemp("float32") / "bundle"
    names = ("python-1m", "python-9m")
    draft, target = (CHECKPOINTS / name for name in names)
    export(draft, target, folder, precision="fp32", draft_precision="fp32")
    return specedge.load(folder)


def texts(pipeline, seed, temperature, **options):
    options |= {"seed": seed, "coupling": "gumbel", "ignore_eos": True}
    plain = pipeline.generate(PROMPT, LENGTH, temperature, num_draft_tokens=0, **options)
    yield plain.tokens
    for name, k in DRAFTING:
        drafted = pipeline.generate(
            PROMPT, LENGTH, temperature, num_draft_tokens=k, drafter=name, **options
        )
        yield drafted.tokens


def check(pipeline, temperature):
    written = set()
    for seed in SEEDS:
        plain, *others = texts(pipeline, seed, temperature)
        assert all(tokens == plain for tokens in others), seed
        written.add(tuple(plain))
    assert len(written) == len(SEEDS)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_coupled_text_is_independent_of_k_and_drafter_in_int8(pipeline, temperature):
    check(pipeline, temperature)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_coupled_text_is_independent_of_k_and_drafter_in_float32(float32, temperature):
    check(float32, temperature)
