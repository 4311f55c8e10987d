"""Batches of `specedge.ray.Generate`, which needs no Ray."""

import dataclasses
import json
import pickle

import numpy as np
import pytest

from installed import run
from specedge.bundle import Bundle, store
from specedge.cli import cluster
from specedge.ray import Generate
from specedge.request import build_request
from specedge.runtime.requests.batch import BatchItem


@pytest.fixture(scope="module")
def generate():
    return Generate(max_new_tokens=2)


def objects(*values):
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def test_a_batch_has_the_lines_of_one_machine(pipeline, jsonl):
    options = {"max_new_tokens": 8, "temperature": 0.8, "num_draft_tokens": 4}
    lines = [{"prompt": "def f(", "id": "a"}, {"prompt": "", "id": "b"}, {"prompt": "import"}]
    jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    flags = ["-n", 8, "--temperature", 0.8, "-k", 4, "--seed", 7]
    alone = run("generate", "--prompts", jsonl, *flags).stdout.splitlines()
    batch = {
        "index": np.array([2, 0, 1]),
        "prompt": np.array(["import", "def f(", ""], dtype=object),
        "id": np.array([None, "a", "b"], dtype=object),
        "top_k": np.array([np.nan] * 3),
        "label": np.array([5, 6, 7]),
    }
    found = Generate(seed=7, **options | {"num_draft_tokens": None})(batch)
    assert found["result"] == [alone[2], alone[0], alone[1]]
    assert found["generated_text"][1] == json.loads(alone[0])["text"]
    assert found["generated_text"][2] is None
    assert [error is None for error in found["error"]] == [True, True, False]
    assert list(found["label"]) == [5, 6, 7]


@pytest.mark.parametrize("actor", ["Generate", "ItemGenerator"])
def test_prompts_of_a_batch_share_passes(actor):
    prompts, options = ["def f(x):", "import os", "class A:"], {"max_new_tokens": 12}
    options |= {"temperature": 0.0, "num_draft_tokens": 4, "ignore_eos": True}
    if actor == "Generate":
        generate = Generate(**options)
        batches = [{"prompt": prompts[:1]}, {"prompt": prompts}]
    else:
        generate = cluster.ItemGenerator(Bundle.read(store.embedded_folder()).digest(), None)
        request = dataclasses.asdict(build_request(**options))
        items = [BatchItem(i, None, prompt, None, request) for i, prompt in enumerate(prompts)]
        batches = [{"item": [pickle.dumps(item) for item in some]} for some in (items[:1], items)]
    engine, num_passes = generate.pipeline.slots.engine, []
    for batch in batches:
        before = engine.num_passes
        generate(batch)
        num_passes.append(engine.num_passes - before)
    alone, together = num_passes
    assert together < 2 * alone


def test_integer_columns_with_nulls_stay_integers():
    """A column of them with a null comes as floats."""
    found = Generate(max_new_tokens=3, temperature=1.0)(
        {
            "prompt": ["a", "a"],
            "id": np.array([7, np.nan]),
            "seed": np.array([5, np.nan]),
            "max_new_tokens": np.array([np.nan, 2]),
        }
    )
    first, second = map(json.loads, found["result"])
    assert (repr(first["id"]), first["seed"], len(first["tokens"])) == ("7", 5, 3)
    assert "id" not in second
    assert len(second["tokens"]) == 2


def test_a_batch_names_missing_columns():
    seeded = Generate(seed=1)
    with pytest.raises(ValueError, match="a seed needs a column index"):
        seeded({"prompt": ["a"]})
    with pytest.raises(ValueError, match="needs a column prompt or messages, got text"):
        seeded({"text": ["a"]})
    with pytest.raises(TypeError, match="unknown option 'temprature'"):
        Generate(temprature=1)


def collecting(items):
    """Return a function that collects the items of batches instead of running them."""
    return lambda _, batch: iter([items.append(item) or {} for item in batch])


def test_a_batch_of_chats_and_of_token_ids_is_plain_values(monkeypatch):
    found = []
    generate = Generate(max_new_tokens=1)
    monkeypatch.setattr(
        "specedge.ray.run_items",
        lambda _, items: iter([found.append(item) or {} for item in items]),
    )
    message = {"role": "user", "content": "Hi"}
    generate({"messages": [np.array([message], dtype=object)], "seed": np.array([3])})
    generate({"prompt": [np.array([1, 2])]})
    assert found[0].messages == [message]
    assert type(found[0].request["seed"]) is int
    assert found[1].prompt == [1, 2]
    assert found[1].request["num_draft_tokens"] == 4


BAD = [
    ("temperature", -1.0, "temperature must be at least 0"),
    ("temperature", True, "temperature must not be true"),
    ("drafter", "ngram:nowhere", "nowhere: No such file"),
    ("stop", ["\ud800"], "not valid Unicode"),
    ("logit_bias", {(1, 2): 3}, "a token of logit_bias must be"),
    ("remember", True, "remember makes"),
    ("replay", [["oracle", 1, 1]], "the replay has rounds of 'oracle'"),
    ("id", 1.5, "id must be text or an integer"),
    ("index", "first", "index must be an integer"),
    ("prompt", None, "either 'prompt' or 'messages'"),
    ("prompt", [1, "a"], "prompt must be text or a list of token ids"),
    ("messages", [{"role": "user", "content": "a"}], "either 'prompt' or 'messages'"),
]


@pytest.mark.parametrize(("column", "value", "said"), BAD)
def test_an_invalid_value_is_an_error_of_its_row_only(generate, column, value, said):
    row = {"prompt": "a", "id": 7, "index": 1} | {column: value}
    other = {"prompt": "a", "id": 8, "index": 0}
    batch = {name: objects(row[name], other.get(name)) for name in row}
    found = generate(batch)
    assert said in found["error"][0]
    bad, well = map(json.loads, found["result"])
    assert bad["error"] == found["error"][0]
    assert bad.get("id") == (None if column == "id" else 7)
    assert bad["index"] == {"first": 0}.get(row["index"], 1)
    assert (found["error"][1], well["id"], len(well["tokens"])) == (None, 8, 2)


def test_row_without_index_and_seed_is_an_error_with_global_seed():
    """It was drawn with the seed of index 0."""
    batch = {"prompt": ["a"] * 3, "index": objects(4, None, None), "seed": objects(None, 9, None)}
    found = Generate(seed=1, temperature=1.0, max_new_tokens=1)(batch)
    assert found["error"][:2] == [None, None]
    assert found["error"][2] == "a seed needs an index: prompt i is sampled with seed + i"
    assert [json.loads(one)["seed"] for one in found["result"][:2]] == [5, 9]


def test_keys_of_other_rows_objects_are_omitted(generate, monkeypatch):
    """A column of objects has the keys of all of them."""
    items = []
    monkeypatch.setattr(
        "specedge.ray.run_items", lambda _, rows: iter([items.append(item) or {} for item in rows])
    )
    bias = objects({"4": 1.0, "5": None}, {"4": None, "5": 2.0})
    generate({"prompt": ["a", "b"], "logit_bias": bias})
    messages = [{"role": "user", "content": "a", "name": None}]
    generate({"messages": objects(messages), "json_schema": objects({"type": "object", "b": None})})
    assert [item.request["logit_bias"] for item in items[:2]] == [{"4": 1.0}, {"5": 2.0}]
    assert items[2].messages == [{"role": "user", "content": "a"}]
    assert items[2].request["json_schema"] == {"type": "object"}


def test_row_can_replay_rounds_of_another_run(generate):
    found = generate({"prompt": ["a"], "replay": objects([["random", 1, 2]])})
    assert "random" in found["error"][0]
    found = generate(
        {"prompt": ["a"], "drafter": ["random"], "replay": objects([["random", 1, 2]])}
    )
    assert found["error"] == [None]
