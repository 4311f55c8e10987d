"""Train a T5 pair on span corruption of CPython's standard library.

    python tools/train_encoder_decoder_pair.py FOLDER

Writes FOLDER/target and FOLDER/draft, with the layers and key names of T5, and
FOLDER/prompts.jsonl, held-out sources for `specedge bench --prompts`. Half of the tokens of each
window are removed in spans of 8 on average, a denoiser of UL2 (arXiv 2205.05131). The draft model
is distilled from the target. Random numbers are functions of seed and step; an interrupted run is
resumed.
"""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path

import click
import torch
from tokenizers.processors import TemplateProcessing
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from corpus import END, is_held_out, library_files, train_tokenizer
from train_embedded_pair import (
    BATCH,
    BFLOAT16,
    SEED,
    VOCAB_SIZE,
    Trainer,
    encode,
    minimize,
    windows,
)

WINDOW = 256  # tokens of a text, half of which the target restores
SPANS = 16  # per window
TARGET = {"d_model": 192, "d_ff": 768, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 3}
DRAFT = {"d_model": 96, "d_ff": 384, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 1}
TARGET_STEPS = 160
DRAFT_STEPS = 160
NUM_PROMPTS = 128


def sentinels(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return the ids of the sentinel tokens in order. -> [SPANS]"""
    names = [f"<extra_id_{i}>" for i in range(SPANS)]
    return torch.tensor(tokenizer.convert_tokens_to_ids(names))


def corrupt(
    tokens: torch.Tensor, ids: torch.Tensor, end: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace random spans by sentinels, as T5's `random_spans_helper` does.

    Text and spans alternate, beginning with text, and none is empty.

    Args:
        tokens: Text [N].
        ids: Sentinels [S], one for each span.
        end: End token of source and labels.
        seed: Seed of the lengths.

    Returns:
        The source, which has a sentinel in the place of each span [N / 2 + S + 1], and the labels,
        which are each sentinel followed by its span [N / 2 + S + 1].
    """
    generator = torch.Generator().manual_seed(seed)
    half = len(tokens) // 2

    def lengths() -> torch.Tensor:
        cuts = torch.randperm(half - 1, generator=generator)[: len(ids) - 1].sort().values + 1
        return torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([half]))

    parts = tokens.split(torch.stack([lengths(), lengths()], 1).flatten().tolist())
    last = torch.tensor([end])
    source, labels = [], []
    for i, sentinel in enumerate(ids.split(1)):
        source += [parts[2 * i], sentinel]
        labels += [sentinel, parts[2 * i + 1]]
    return torch.cat([*source, last]), torch.cat([*labels, last])


def batch(
    stream: torch.Tensor, step: int, tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sources and labels of random windows, as a function of seed and step. -> [B, T] * 2"""
    texts = windows(stream, step, BATCH)[:, :-1].reshape(-1, WINDOW)
    ids, end = sentinels(tokenizer), tokenizer.eos_token_id
    seed = (SEED * 1_000_003 + step) * len(texts)
    pairs = [corrupt(text, ids, end, abs(seed + i)) for i, text in enumerate(texts)]
    sources, labels = zip(*pairs, strict=True)
    return torch.stack(sources), torch.stack(labels)


def new_model(shape: dict[str, int], vocab_size: int, end: int) -> T5ForConditionalGeneration:
    """Return a T5 whose weights are initialized for AdamW instead of Adafactor's relative steps."""
    torch.manual_seed(SEED)
    config = T5Config(
        **shape, vocab_size=vocab_size, d_kv=64, dropout_rate=0.0,
        pad_token_id=0, decoder_start_token_id=0, eos_token_id=end,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    torch.nn.init.normal_(model.shared.weight, std=0.02)
    # Undoes the division by the same number before the LM head.
    torch.nn.init.constant_(model.decoder.final_layer_norm.weight, shape["d_model"] ** 0.5)
    return model


def logits(
    model: T5ForConditionalGeneration, sources: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the logits of the labels. -> [B, T, V] float32"""
    with torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
        return model(input_ids=sources, labels=labels).logits.float()


def train_target(
    run: Trainer, train: torch.Tensor, test: torch.Tensor, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Minimize cross-entropy."""

    def loss(stream: torch.Tensor, step: int) -> torch.Tensor:
        sources, labels = batch(stream, step, tokenizer)
        predicted = logits(run.model, sources, labels)
        return functional.cross_entropy(predicted.flatten(0, 1), labels.flatten())

    held_out = range(-1, -5, -1)
    minimize("target", run, partial(loss, train), lambda: [float(loss(test, s)) for s in held_out])


def train_draft(
    run: Trainer,
    target: T5ForConditionalGeneration,
    train: torch.Tensor,
    test: torch.Tensor,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Minimize KL + 2 TV to the target; 1 - TV is the acceptance rate."""

    def compare(stream: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        sources, labels = batch(stream, step, tokenizer)
        with torch.no_grad():
            probs = logits(target, sources, labels).softmax(-1)
        log_probs = logits(run.model, sources, labels).log_softmax(-1)
        kl = functional.kl_div(log_probs, probs, reduction="none").sum(-1)
        return kl.mean(), torch.minimum(probs, log_probs.exp()).sum(-1).mean()

    def loss(step: int) -> torch.Tensor:
        kl, alpha = compare(train, step)
        return kl + 2 * (1 - alpha)

    held_out = range(-1, -5, -1)
    minimize("draft", run, loss, lambda: [1 - float(compare(test, s)[1]) for s in held_out])


def load_tokenizer(path: Path, texts: list[str]) -> PreTrainedTokenizerFast:
    """Return the tokenizer, which ends a source with `</s>`; train it unless `path` exists."""
    if not path.exists():
        trained = train_tokenizer(texts, VOCAB_SIZE)
        trained.add_special_tokens(["</s>", *(f"<extra_id_{i}>" for i in range(SPANS))])
        end = trained.token_to_id("</s>")
        trained.post_processor = TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", end)]
        )
        trained.save(str(path))
    return PreTrainedTokenizerFast(tokenizer_file=str(path), pad_token=END, eos_token="</s>")


def write_prompts(path: Path, test: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write sources of held-out windows as token ids."""
    steps = itertools.count(-100, -1)
    batches = (batch(test, step, tokenizer)[0].tolist() for step in steps)
    sources = itertools.islice(itertools.chain.from_iterable(batches), NUM_PROMPTS)
    path.write_text("".join(json.dumps({"prompt": source}) + "\n" for source in sources))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def main(folder: Path) -> None:
    """Train the target and the draft model and write their checkpoints."""
    runs = {name: folder / "runs" / name for name in ("target", "draft")}
    for path in runs.values():
        path.mkdir(parents=True, exist_ok=True)
    files = library_files()
    texts = [text for name, text in files if not is_held_out(name)]
    tokenizer = load_tokenizer(folder / "tokenizer.json", texts)
    train = encode(tokenizer, texts)
    test = encode(tokenizer, [text for name, text in files if is_held_out(name)])
    write_prompts(folder / "prompts.jsonl", test, tokenizer)
    models = {
        name: new_model(shape, len(tokenizer), tokenizer.eos_token_id)
        for name, shape in (("target", TARGET), ("draft", DRAFT))
    }

    def save(name: str) -> None:
        models[name].load_state_dict(torch.load(runs[name] / "best.pt", weights_only=True))
        models[name].save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        print(f"{name}: {models[name].num_parameters()} parameters", flush=True)

    run = Trainer(models["target"], TARGET_STEPS, 2.5e-3, runs["target"])
    train_target(run, train, test, tokenizer)
    save("target")
    run = Trainer(models["draft"], DRAFT_STEPS, 5e-3, runs["draft"])
    train_draft(run, models["target"], train, test, tokenizer)
    save("draft")


if __name__ == "__main__":
    main()
