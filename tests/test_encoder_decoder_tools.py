"""Data of the trained encoder-decoder pair, and expansion of T5 checkpoints."""

from __future__ import annotations

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import grow
import train_encoder_decoder_pair as training

SENTINELS = torch.arange(1000, 1000 + training.SPANS)
END = 999


@pytest.mark.parametrize("seed", range(5))
def test_spans_fill_the_sentinels_of_their_source(seed: int) -> None:
    text = torch.arange(training.WINDOW)

    source, labels = training.corrupt(text, SENTINELS, END, seed)

    assert len(source) == len(labels) == training.WINDOW // 2 + training.SPANS + 1
    spans: dict[int, list[int]] = {}
    for token in labels.tolist()[:-1]:
        if token >= END:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    assert list(spans) == SENTINELS.tolist()
    assert all(spans.values())
    restored = [t for token in source.tolist()[:-1] for t in spans.get(token, [token])]
    assert restored == text.tolist()
    assert source[-1] == labels[-1] == END


def test_seeds_corrupt_differently() -> None:
    text = torch.arange(training.WINDOW)
    sources = [training.corrupt(text, SENTINELS, END, seed)[0] for seed in (1, 1, 2)]
    assert torch.equal(sources[0], sources[1])
    assert not torch.equal(sources[0], sources[2])


def test_grown_t5_has_the_logits_of_its_source() -> None:
    def model(width: int, layers: int, heads: int) -> T5ForConditionalGeneration:
        config = T5Config(
            vocab_size=64, d_model=width, d_ff=2 * width, d_kv=8, num_layers=layers,
            num_decoder_layers=layers, num_heads=heads, decoder_start_token_id=0,
        )  # fmt: skip
        return T5ForConditionalGeneration(config).double().eval()

    torch.manual_seed(0)
    small, large = model(16, 2, 2), model(40, 5, 3)
    for name, weight in small.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2)
    weights = {name: value.float() for name, value in small.state_dict().items()}
    growth = grow.T5Growth(weights, small.config, large.config, 0.0)
    values = {n: growth.tensor(n, p.shape).double() for n, p in large.named_parameters()}
    large.load_state_dict(values, strict=False)
    source, text = torch.randint(64, (2, 30)), torch.randint(64, (2, 20))

    with torch.no_grad():
        expected, logits = (m(input_ids=source, labels=text).logits for m in (small, large))

    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
