"""Drafters as a user names them: on the command line, in files of prompts, in Python."""

import json

import pytest

from cases import slow
from specedge import Draft, DrafterError
from specedge.request import DrafterName, GenerationRequest
from specedge.runtime.drafters import ngram_files
from specedge.runtime.drafters.ngrams import count
from specedge.runtime.sampling.history import History
from test_cli import run

PROMPT = "def read_config(path):"
REPEATED = "for name in names:\n    print(name)\n" * 3
WORDS = REPEATED + "def read(path):\n    with open(path) as file:\n        return file.read()\n"


@pytest.fixture(scope="module")
def tables(tmp_path_factory, pipeline):
    path = tmp_path_factory.mktemp("tables") / "words.npz"
    tokens = pipeline.tokenizer.encode(WORDS).ids
    ngram_files.write(count([tokens], pipeline.bundle.target.vocab_size), pipeline.bundle, path)
    return path


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("name", [*DrafterName, "ngram"])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_greedy_tokens_equal_plain_decoding(pipeline, tables, name, k):
    drafter = f"ngram:{tables}" if name == "ngram" else name
    for prompt in (PROMPT, REPEATED):
        plain = pipeline.generate(prompt, 50, num_draft_tokens=0, ignore_eos=True)
        made = pipeline.generate(prompt, 50, num_draft_tokens=k, ignore_eos=True, drafter=drafter)
        assert (made.tokens, made.text) == (plain.tokens, plain.text)
        assert made.drafter == ("model" if name == "auto" else name)
        assert {source for one in made.rounds for source in one.sources} <= {*DrafterName, "ngram"}


@pytest.mark.parametrize("name", [*(x if x == "chain" else slow(x) for x in DrafterName), "ngram"])
def test_the_same_seed_gives_the_same_text_streamed_or_not(pipeline, tables, name):
    options = {
        "temperature": 0.9, "seed": 3, "drafter": f"ngram:{tables}" if name == "ngram" else name,
    }  # fmt: skip
    made = pipeline.generate(REPEATED, 60, **options)
    assert "".join(pipeline.stream(REPEATED, 60, **options)) == made.text
    assert pipeline.generate(REPEATED, 30, **options).tokens == made.tokens[:30]


@pytest.mark.parametrize("name", ["lookup", "random", "ngram"])
def test_without_a_draft_model_no_draft_runs(pipeline, tables, name):
    pipeline.draft.truncate(0)
    drafter = f"ngram:{tables}" if name == "ngram" else name
    made = pipeline.generate(REPEATED, 40, drafter=drafter, ignore_eos=True)
    assert pipeline.draft.length == made.stats.num_draft_passes == 0
    assert made.stats.num_drafted > 0


def test_chain_skips_model_passes_on_repetitive_text(pipeline):
    options = {"ignore_eos": True, "num_draft_tokens": 4}
    for prompt, names in ((REPEATED, {"suffix"}), (PROMPT, {"suffix", "model"})):
        alone = pipeline.generate(prompt, 120, **options).stats
        chain = pipeline.generate(prompt, 120, drafter="chain", **options).stats
        assert chain.num_draft_passes < 0.8 * alone.num_draft_passes
        assert chain.drafted_by_source.keys() == names
        assert chain.drafted_by_source.get("model", 0) == chain.num_draft_passes


def test_a_custom_drafter_is_used(pipeline):
    plain = pipeline.generate(PROMPT, 60, num_draft_tokens=0, ignore_eos=True)
    commonest = max(plain.tokens, key=plain.tokens.count)

    class Same:
        name = "same"

        def __init__(self):
            self.lengths = []

        def propose(self, history, max_tokens, sampling, uniforms):
            return Draft([commonest] * max_tokens)

        def truncate(self, length):
            self.lengths.append(length)

    mine = Same()
    made = pipeline.generate(PROMPT, 60, drafter=mine, num_draft_tokens=2, ignore_eos=True)
    assert made.tokens == plain.tokens
    assert made.drafter == "same"
    assert 0 < made.stats.accepted_by_source["same"] < made.stats.num_drafted
    assert mine.lengths[0] == 0
    assert sorted(mine.lengths) == mine.lengths


def test_a_custom_drafter_is_planned_and_changes_no_token(pipeline):
    plain = pipeline.generate(PROMPT, 60, num_draft_tokens=0, ignore_eos=True)
    text = [*pipeline.tokenizer.encode(PROMPT).ids, *plain.tokens]

    class Knowing:
        name = "model"

        def propose(self, history, max_tokens, sampling, uniforms):
            at = len(history.tokens)
            known = [token if (at + i) % 4 else 5 for i, token in enumerate(text[at:])]
            return Draft(known[:max_tokens])

        def truncate(self, length):
            pass

    made = pipeline.generate(PROMPT, 60, drafter=Knowing(), ignore_eos=True)
    assert made.tokens == plain.tokens
    assert 0 < made.stats.num_accepted < made.stats.num_drafted


def test_invalid_draft_fails_the_request(pipeline):
    class Wrong:
        name = "wrong"

        def propose(self, history, max_tokens, sampling, uniforms):
            return Draft([5000])

        def truncate(self, length):
            pass

    with pytest.raises(DrafterError, match="'wrong' proposed token 5000"):
        pipeline.generate(PROMPT, 5, drafter=Wrong())


@pytest.mark.parametrize("name", ["lookup", "suffix"])
def test_match_lengths_reach_the_suffix_drafter(pipeline, name):
    def draft(**options):
        request = GenerationRequest(drafter=name, **options)
        drafter = pipeline.drafters.create(request, None)["suffix"]
        return drafter.propose(History([1, 2, 3, 1, 2]), 1, request.sampling(), None).tokens

    assert [draft(lookup_min=2), draft(lookup_min=4)] == [[3], []]


def test_tables_are_read_again_only_when_their_file_has_changed(pipeline, tables, monkeypatch):
    path = tables.with_name("changing.npz")
    path.write_bytes(tables.read_bytes())
    read, calls = ngram_files.read, []
    monkeypatch.setattr(ngram_files, "read", lambda *given: calls.append(given) or read(*given))
    for _ in range(3):
        pipeline.stream(PROMPT, drafter=f"ngram:{path}")
    assert len(calls) == 1
    vocab_size = pipeline.bundle.target.vocab_size
    ngram_files.write(count([[1, 2]], vocab_size), pipeline.bundle, path)
    pipeline.stream(PROMPT, drafter=f"ngram:{path}")
    assert len(calls) == 2


def test_drafter_can_be_set_per_prompt_line(tmp_path, pipeline):
    lines = [
        {"prompt": REPEATED, "drafter": "lookup", "lookup_min": 3},
        {"prompt": REPEATED},
        {"prompt": REPEATED, "drafter": "model", "lookup_max": None},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    result = run("generate", "--prompts", file, "-n", 20, "--drafter", "chain")
    made = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["drafter"] for one in made] == ["suffix", "chain", "model"]
    assert {tuple(one["tokens"]) for one in made} == {tuple(pipeline.generate(REPEATED, 20).tokens)}


def test_invalid_table_is_rejected_before_generation(tmp_path):
    lines = [{"prompt": "a"}, {"prompt": "b", "drafter": f"ngram:{tmp_path}/none"}]
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out"
    file.write_text("\n".join(map(json.dumps, lines)))
    result = run("generate", "--prompts", file, "-n", 3, "--output", output)
    assert result.returncode == 1
    assert "none: No such file" in result.stderr
    assert not output.exists()


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [4, "auto"])
@pytest.mark.parametrize("drafter", ["suffix", "chain"])
def test_compare_predicts_speedup_only_with_known_costs(drafter, k):
    result = run("compare", REPEATED, "-n", 30, "--repeats", 1, "--drafter", drafter, "-k", k)
    assert result.returncode == 0
    assert ("predicted" in result.stdout) == (k == "auto")
    for word in ("speed-up", "tokens per round", "acceptance rate", "same tokens          yes"):
        assert word in result.stdout
