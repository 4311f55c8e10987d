"""The embedded pair matches models/README.md."""

import re
import sysconfig
from pathlib import Path

import pytest

from specedge.bundle import Bundle, store

# Modules of CPython's library that neither model saw; models/README.md lists them all.
HELD_OUT = ("asyncio/base_subprocess.py", "encodings/idna.py", "json/tool.py", "pydoc.py")


def held_out_prompts(tokenizer):
    """96 tokens up to the middle of each module, and up to its quarters."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in HELD_OUT:
        tokens = tokenizer.encode((library / name).read_text("utf-8")).ids
        for part in (1, 2, 3):
            end = max(96, part * len(tokens) // 4)
            yield tokens[end - 96 : end]


def test_the_bundle_is_small_enough_for_a_wheel():
    files = [path for path in store.embedded_folder().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 22e6


def test_every_large_file_has_its_hash():
    bundle = Bundle.read(store.embedded_folder())
    for name in bundle.large_files():
        bundle.check_hash(name)
    assert bundle.target.source.license == "apache-2.0"


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize(("temperature", "least"), [(0.0, 2.7), (1.0, 2.2)])
def test_held_out_text_reaches_minimum_tokens_per_round(pipeline, temperature, least, report):
    rounds = tokens = 0
    for i, prompt in enumerate(held_out_prompts(pipeline.tokenizer)):
        one = pipeline.generate(prompt, 64, temperature, seed=i, ignore_eos=True)
        rounds, tokens = rounds + one.stats.num_rounds, tokens + one.stats.num_new_tokens
    report(f"embedded pair, temperature {temperature:g}: {tokens / rounds:.2f} tokens a round")
    assert tokens / rounds >= least


def test_function_continuation_resembles_python(pipeline):
    text = pipeline.generate("def read_config(path):", 60).text
    assert re.match(r"\n {4,8}\S", text)
    assert re.search(r"\b(return|self|if|for|raise|with|import|\"\"\")", text)
