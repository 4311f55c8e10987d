"""Requests that share passes have the texts and log-probabilities of the requests alone."""

import random
import threading

import pytest

import specedge
from specedge.bundle import Bundle, store
from specedge.runtime.backend import memory
from specedge.runtime.requests import loader
from threads import in_threads

NUM_SLOTS = 8
PROMPTS = ["def read_config(path):", "import json", "class Parser:", "for i in range(", "# x"]
LONG = "\n".join(f"value_{i} = read({i})" for i in range(30))
OPTIONS = [
    {},
    {"logprobs": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"top_k": 20, "top_p": 0.9},
    {"regex": r"[a-z_ ]{5,30}\n"},
    {"stop": ["\n"]},
    {"logit_bias": {9: 2.0}, "logprobs": 0},
]


@pytest.fixture(scope="module")
def alone():
    return specedge.load(store.embedded_folder())


@pytest.fixture(scope="module")
def shared():
    loaded = specedge.load(store.embedded_folder(), slots=NUM_SLOTS)
    assert not loaded.notes
    return loaded


def random_request(number):
    """Return prompt and options of a request; its text depends on nothing else."""
    rng = random.Random(number)
    temperature = rng.choice([0.0, 0.0, 0.8, 1.2])
    is_coupled = temperature > 0 and rng.random() < 0.3
    options = {
        "max_new_tokens": rng.randint(1, 40),
        "temperature": temperature,
        "seed": number,
        "drafter": rng.choice(["model", "suffix", "chain", "auto"]),
        "num_draft_tokens": rng.choice([0, 1, 3, 4, 7]),
        **({"coupling": "gumbel"} if is_coupled else {}),
        **rng.choice(OPTIONS),
    }
    if (temperature == 0 or is_coupled) and rng.random() < 0.3:
        options["num_draft_tokens"], options["drafter"] = "auto", "auto"
    if options["drafter"] == "auto" and options["num_draft_tokens"] != "auto":
        options["drafter"] = "model"
    prompt = f"{rng.choice([*PROMPTS, LONG])} # {number}"
    return prompt, options


def outcome(generation):
    return generation.text, generation.tokens, generation.finish_reason, generation.logprobs


def check(alone, shared, numbers):
    """Run requests in as many threads as there are slots; some are cancelled."""
    remaining, lock, finished = iter(numbers), threading.Lock(), {}

    def client(rng):
        while True:
            with lock:
                number = next(remaining, None)
            if number is None:
                return
            prompt, options = random_request(number)
            stream = shared.stream(prompt, **options)
            is_cancelled = rng.random() < 0.15
            for i, _ in enumerate(stream):
                if is_cancelled and i == 2:
                    stream.cancel()
                    break
            else:
                finished[number] = outcome(stream.generation)

    errors = in_threads(*(lambda i=i: client(random.Random(i)) for i in range(NUM_SLOTS)))
    assert errors == [None] * NUM_SLOTS
    assert all(slot.is_free for slot in shared.slots.all)
    assert len(finished) > 0.7 * len(numbers)
    for number, result in finished.items():
        prompt, options = random_request(number)
        assert result == outcome(alone.generate(prompt, **options)), random_request(number)


def test_mixed_requests_equal_themselves_alone(alone, shared):
    check(alone, shared, range(60))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 1500, 50))
def test_hundreds_of_mixed_requests_equal_themselves_alone(alone, shared, start):
    check(alone, shared, range(start, start + 50))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_that_run_together_take_fewer_passes(alone, shared, temperature):
    prompts = [f"{prompt} # {i}" for i, prompt in enumerate(PROMPTS)]
    options = {"num_draft_tokens": 4, "drafter": "model", "seed": 1, "ignore_eos": True}
    counts = []
    for pipeline in (alone, shared):
        pipeline.forget()
        before = pipeline.slots.engine.num_passes
        batch = pipeline.generate_batch(prompts, 24, temperature, **options)
        counts.append((pipeline.slots.engine.num_passes - before, [outcome(g) for g in batch]))
    (num_alone, expected), (num_shared, texts) = counts
    assert texts == expected
    assert num_shared < num_alone / 2.5


def test_files_of_prompts_get_slots_only_where_passes_are_shared(monkeypatch):
    folder = store.embedded_folder()
    assert loader.batch_slots(folder, 3) == 3
    assert loader.batch_slots(folder, 500) == loader.BATCH_SLOTS
    assert loader.batch_slots(folder, 500, ops="onnx") == 1
    need = loader.memory_of(Bundle.read(folder)).with_slots(loader.BATCH_SLOTS)
    available = int(memory.SAFETY_FACTOR * need.peak)
    monkeypatch.setattr(memory, "available_bytes", lambda: available)
    assert loader.batch_slots(folder, 500) == loader.BATCH_SLOTS
    assert 1 <= loader.batch_slots(folder, 500, memory_share=0.25) < loader.BATCH_SLOTS
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    assert loader.batch_slots(folder, 500) == 1
